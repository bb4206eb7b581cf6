"""Progress of a command on a terminal: one line that changes, bars, and the effort of a search, which a time limit can cut short.

No command is silent for long: what it does stands in a `spinner`, from the start of the process on, with its seconds.

Output of a service while it runs: a line or a JSON object per event. Passing events share one line of a terminal.
"""

from __future__ import annotations

import contextlib
import logging
import math
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import IO, Any

from swarmnode.terminal.console import changing_lines, make_room, outliving_terminal, print_json, say
from swarmnode.terminal.formatting import one_line

NOMINAL_S = 10.0  # most time of a search of effort 1 on a slow core
RESERVE_S, RESERVE_SHARE = 0.1, 0.02  # of a limit, kept for the start and for printing the result
TICK_S = 0.5
STAGES = (
    "swarmnode.stages"  # logger of long parts of a deed, by rooms that know no terminal; a changing line shows them
)
CLEAR_LINE = "\x1b[2K"


class ChangingLine:
    """Line of a terminal whose text is replaced, with the seconds since it was set. Other output goes above it.

    The cursor stays at the line's beginning, so that output that does not know of it overwrites it. A thread draws the line
    again, also while the main thread imports or computes.
    """

    def __init__(self, stream: IO[str], *, until_output: bool = False) -> None:
        """Make an empty line on `stream`. With `until_output` the first other output ends it."""
        self._stream = stream
        self._until_output = until_output
        self._text, self._since_s, self._drawn = "", 0.0, False
        self._lock = threading.RLock()
        self._closed = threading.Event()
        changing_lines.append(self._clear)
        self._stages = _Stages(self)
        logging.getLogger(STAGES).addHandler(self._stages)
        logging.getLogger(STAGES).setLevel(logging.INFO)
        logging.getLogger(STAGES).propagate = False  # else each is a log line, too
        threading.Thread(target=self._tick, name="swarmnode-line", daemon=True).start()

    @property
    def text(self) -> str:
        """Text without the seconds; empty if nothing is shown."""
        return self._text

    def show(self, text: str, *, at_once: bool = True) -> None:
        """Show `text` in place of the former one, now or at the next tick. An empty text clears the line."""
        with self._lock:
            if text != self._text:
                self._text, self._since_s = text, time.monotonic()
            if at_once or not text:
                self._draw()

    def close(self) -> None:
        """Clear the line for good."""
        with self._lock:
            self.show("")
            self._closed.set()
            logging.getLogger(STAGES).removeHandler(self._stages)
            if self._clear in changing_lines:
                changing_lines.remove(self._clear)

    def _tick(self) -> None:
        while not self._closed.wait(TICK_S):
            with self._lock:
                if self._text and not self._closed.is_set() and changing_lines[-1] == self._clear:
                    self._draw()

    def _draw(self) -> None:
        if not (self._text or self._drawn):
            return
        seconds = int(time.monotonic() - self._since_s)
        text = f"{self._text} {seconds} s" if self._text and seconds else self._text
        with outliving_terminal(), contextlib.suppress(ValueError):  # the stream is closed
            self._stream.write(f"{CLEAR_LINE}{text[: shutil.get_terminal_size().columns - 1]}\r")
            self._stream.flush()
        self._drawn = bool(self._text)

    def _clear(self, again: bool) -> None:
        with self._lock:
            text = self._text
            self._text = ""
            self._draw()
            self._text = text if again and not self._until_output else ""


class _Stages(logging.Handler):
    """Handler that shows each message on a changing line that shows something."""

    def __init__(self, line: ChangingLine) -> None:
        super().__init__()
        self._line = line

    def emit(self, record: logging.LogRecord) -> None:
        if self._line.text:
            self._line.show(f"{one_line(record.getMessage())} …")


class Spinner:
    """Activity of a command, on a changing line. Calling it ends the display early; None shows nothing."""

    def __init__(self, line: ChangingLine | None) -> None:
        self._line = line

    def __call__(self) -> None:
        """End the display."""
        if self._line is not None:
            self._line.close()

    def now(self, what: str) -> None:
        """Show `what` from now on."""
        if self._line is not None:
            self._line.show(f"{one_line(what)} …", at_once=False)


@contextlib.contextmanager
def spinner(what: str, *, quiet: bool = False, until_output: bool = False) -> Iterator[Spinner]:
    """Show that something goes on, and for how long; yield the display, which can be ended early. It shows nothing if standard
    error is no terminal or `quiet` is true. With `until_output` the first other output ends it."""
    shown = Spinner(ChangingLine(sys.stderr, until_output=until_output) if _watched(quiet) else None)
    shown.now(what)
    try:
        yield shown
    finally:
        shown()


@contextlib.contextmanager
def covering_lines() -> Iterator[None]:
    """Hide the changing lines while a display of another kind is on the terminal."""
    make_room(again=True)

    def nothing(_again: bool) -> None:
        pass

    changing_lines.append(nothing)
    try:
        yield
    finally:
        changing_lines.remove(nothing)


@contextlib.contextmanager
def bytes_bar(what: str, *, quiet: bool) -> Iterator[Callable[[int, int], None] | None]:
    """Show a bar of bytes; yield the function `progress(done, total)` that updates it, or None if standard error is no terminal or
    `quiet` is true. The bar appears at the first call."""
    if not _watched(quiet):
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    bars = Progress(*columns, console=Console(stderr=True), transient=True)
    task = bars.add_task(one_line(what), total=None)

    with contextlib.ExitStack() as covering:

        def progress(done: int, total: int) -> None:
            if not bars.live.is_started:
                covering.enter_context(covering_lines())
                covering.callback(bars.stop)
                bars.start()
            bars.update(task, completed=done, total=total)
            if done >= total:  # what follows has its own display
                covering.close()

        yield progress


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
    with covering_lines(), Progress(*columns, console=Console(stderr=True), transient=True) as bars:
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
        return f"Effort({self.elapsed_s:.1f} s of {self._limit_s or math.inf:g} s)"

    def begin(self) -> None:
        """Restart the clock, because the time until now was not spent on searching."""
        self._begun_s = time.monotonic()

    @property
    def elapsed_s(self) -> float:
        """Seconds since the clock started."""
        return time.monotonic() - self._begun_s

    def expired(self) -> bool:
        """Return whether the time limit, less a reserve for printing the result, is reached; always False without a limit. If
        so, remember that the search was cut short."""
        self._cut = self._cut or (
            self._limit_s is not None and self.elapsed_s >= (1 - RESERVE_SHARE) * self._limit_s - RESERVE_S
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


# Events whose text the next one replaces on a terminal.
PASSING = frozenset(("reading", "opening", "waiting", "machine", "loading", "fetching", "moving", "compressing"))
LAST = frozenset(("ready", "draining", "left"))  # events that end the changing line
# Events after which a node is settled for a while: what its owner needs to read stands last then.
SETTLED = frozenset(("ready", "spare", "paused"))


class Teller:
    """Printer of a service's events, called with (event, text for people, **details for scripts). As a context manager, it clears
    the changing line at the end."""

    def __init__(self, as_json: bool) -> None:
        self._as_json = as_json
        self._line = ChangingLine(sys.stdout) if not as_json and sys.stdout.isatty() else None
        self._is_settled = False
        self._held: list[str] = []

    def __enter__(self) -> Teller:
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        if self._line is not None:
            self._line.close()

    def __call__(self, event: str, text: str, **details: Any) -> None:
        if self._as_json:
            print_json({"event": event, **details})
        elif self._line is not None and event in PASSING:
            make_room(again=True)
            self._line.show(one_line(text))
        else:
            if self._line is not None and event in LAST:
                self._line.show("")
            say(text)
            if event in SETTLED:
                self._is_settled = True
                while self._held:
                    say(self._held.pop(0))

    def last(self, event: str, text: str, **details: Any) -> None:
        """Tell an event after the first one of SETTLED, so that its text stands last; to scripts at once."""
        if self._as_json or self._is_settled:
            self(event, text, **details)
        else:
            self._held.append(text)
