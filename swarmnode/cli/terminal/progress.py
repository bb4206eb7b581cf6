"""Progress bars on standard error of a terminal, and the effort of a search, which a time limit may cut short."""

from __future__ import annotations

import contextlib
import math
import sys
import time
from collections.abc import Callable, Iterator

from swarmnode.cli.terminal.console import say

NOMINAL_S = 10.0  # what a search of effort 1 takes at most on a slow core
RESERVE_S, RESERVE_SHARE = 0.1, 0.02  # of a limit, kept to start and to print what was found


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


class Effort:
    """Measured from its creation. Without a limit work counts, not the clock: what is found does not depend on the machine."""

    def __init__(self, limit_s: float | None, seed: int, *, quiet: bool) -> None:
        self.seed = seed
        self.share = 1.0 if limit_s is None else limit_s / NOMINAL_S  # of the work that is done without a limit
        self._limit_s = limit_s
        self._quiet = quiet
        self._begun_s = time.monotonic()
        self._cut = False

    def __repr__(self) -> str:
        return f"Effort({self.taken_s:.1f} s of {self._limit_s or math.inf:g} s)"

    def begin(self) -> None:
        """Start the clock anew: what was done so far was not searching, and could not be cut short."""
        self._begun_s = time.monotonic()

    @property
    def taken_s(self) -> float:
        """Seconds so far."""
        return time.monotonic() - self._begun_s

    def expired(self) -> bool:
        """Whether the limit is reached; then it has cut the search short."""
        self._cut = self._cut or (
            self._limit_s is not None and self.taken_s >= (1 - RESERVE_SHARE) * self._limit_s - RESERVE_S
        )
        return self._cut

    def tell_if_cut(self) -> None:
        """Tell that the clock has ended the search, which makes its result depend on the machine."""
        if self._cut:
            say(f"The search was cut short after {self._limit_s:g} s; a faster machine may find another plan.")

    @contextlib.contextmanager
    def progress(self) -> Iterator[Callable[[float, float], None]]:
        """A bar on standard error with the best cost so far, as `progress(done, cost_s)`, where somebody watches."""
        with share_bar("Planning", quiet=self._quiet) as tell:
            yield lambda done, cost_s: tell(done, f"{cost_s:.3f} s")
