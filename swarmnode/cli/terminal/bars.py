"""Progress bars on standard error, where somebody watches."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def bytes_bar(what: str, *, quiet: bool) -> Iterator[Callable[[int, int], None] | None]:
    """A bar of bytes, as `progress(done, total)`, drawn from the first call on; None where nobody watches."""
    if not _watched(quiet):
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    bars = Progress(*columns, console=Console(stderr=True), transient=True)
    task = bars.add_task(what, total=None)

    def progress(done: int, total: int) -> None:
        bars.start()
        bars.update(task, completed=done, total=total)

    try:
        yield progress
    finally:
        bars.stop()


@contextlib.contextmanager
def share_bar(what: str, *, quiet: bool) -> Iterator[Callable[[float, str], None]]:
    """A bar of work, as `progress(share of it that is done, what to tell beside it)`."""
    if not _watched(quiet):
        yield lambda _share, _told: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[told]}"), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task(what, total=1.0, told="")
        yield lambda share, told: bars.update(task, completed=share, told=told)


def _watched(quiet: bool) -> bool:
    return not quiet and sys.stderr.isatty()
