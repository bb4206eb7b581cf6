"""Progress bars on standard error of a terminal, and the effort of a search, which a time limit can cut short."""

from __future__ import annotations

import contextlib
import math
import sys
import time
from collections.abc import Callable, Iterator

from swarmnode.terminal.console import say
from swarmnode.terminal.formatting import one_line

NOMINAL_S = 10.0  # most time of a search of effort 1 on a slow core
RESERVE_S, RESERVE_SHARE = 0.1, 0.02  # of a limit, kept for the start and for printing the result


@contextlib.contextmanager
def spinner(what: str, *, quiet: bool) -> Iterator[Callable[[], None]]:
    """Show that something goes on, and for how long; yield the function that ends the display early. It does nothing if standard
    error is no terminal or `quiet` is true."""
    if not _watched(quiet):
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        bars.add_task(one_line(what), total=None)
        yield bars.stop


@contextlib.contextmanager
def bytes_bar(
    what: str, *, quiet: bool, first: Callable[[], None] = lambda: None
) -> Iterator[Callable[[int, int], None] | None]:
    """Show a bar of bytes; yield the function `progress(done, total)` that updates it, or None if standard error is no terminal or
    `quiet` is true. The bar appears at the first call, after `first` has been called."""
    if not _watched(quiet):
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    bars = Progress(*columns, console=Console(stderr=True), transient=True)
    task = bars.add_task(one_line(what), total=None)

    def progress(done: int, total: int) -> None:
        first()
        bars.start()
        bars.update(task, completed=done, total=total)

    try:
        yield progress
    finally:
        bars.stop()


@contextlib.contextmanager
def share_bar(what: str, *, quiet: bool) -> Iterator[Callable[[float, str], None]]:
    """Show a bar of work; yield the function `progress(share, text)` that updates it with the share done and a text beside it. It
    does nothing if standard error is no terminal or `quiet` is true."""
    if not _watched(quiet):
        yield lambda _share, _told: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    described, beside = (TextColumn(text, markup=False) for text in ("{task.description}", "{task.fields[told]}"))
    columns = (described, BarColumn(), beside, TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task(one_line(what), total=1.0, told="")
        yield lambda share, told: bars.update(task, completed=share, told=one_line(told))


def _watched(quiet: bool) -> bool:
    return not quiet and sys.stderr.isatty()


class Effort:
    """Effort and time limit of a search, measured from construction. Without a limit, the amount of work counts and not the clock,
    so that the result does not depend on the machine."""

    def __init__(self, limit_s: float | None, seed: int, *, quiet: bool) -> None:
        self.seed = seed
        self.share = 1.0 if limit_s is None else limit_s / NOMINAL_S  # relative to the work without a limit
        self._limit_s = limit_s
        self._quiet = quiet
        self._begun_s = time.monotonic()
        self._cut = False

    def __repr__(self) -> str:
        return f"Effort({self.taken_s:.1f} s of {self._limit_s or math.inf:g} s)"

    def begin(self) -> None:
        """Restart the clock, because the time until now was not spent on searching."""
        self._begun_s = time.monotonic()

    @property
    def taken_s(self) -> float:
        """Seconds since the clock started."""
        return time.monotonic() - self._begun_s

    def expired(self) -> bool:
        """Return whether the time limit, less a reserve for printing the result, is reached; always False without a limit. If
        so, remember that the search was cut short."""
        self._cut = self._cut or (
            self._limit_s is not None and self.taken_s >= (1 - RESERVE_SHARE) * self._limit_s - RESERVE_S
        )
        return self._cut

    def tell_if_cut(self) -> None:
        """Print a note if the time limit cut the search short, because the result then depends on the machine."""
        if self._cut:
            say(f"The search was cut short after {self._limit_s:g} s; a faster machine may find another plan.")

    @contextlib.contextmanager
    def progress(self) -> Iterator[Callable[[float, float], None]]:
        """Show a bar of the search; yield the function `progress(done, cost_s)` that updates it with the share done and the lowest
        cost."""
        with share_bar("Planning", quiet=self._quiet) as tell:
            yield lambda done, cost_s: tell(done, f"{cost_s:.3f} s")
