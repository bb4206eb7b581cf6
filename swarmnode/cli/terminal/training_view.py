"""How a training looks: a curve on a terminal, a line per step elsewhere, JSON lines for scripts, and the log."""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from swarmnode.cli.terminal.console import print_json, ranges, say
from swarmnode.cli.terminal.curve import curve_with_notes
from swarmnode.cli.terminal.durations import format_duration
from swarmnode.errors import LocalError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from swarmnode.compute.training.local import StepSummary
    from swarmnode.swarm.records.run import Run

RECENT_STEPS = 20
REPEAT_WAITING_S = 10.0  # a line that says the same again

Sink = Callable[[dict[str, Any]], None]
"""Takes each step as JSON."""


class TrainingView:
    """A `Listener` that shows and logs. `sinks` get each step.

    Where something cannot be told (its reader has gone, a disk is full), that is its `failure`, `on_failure` is called, and nothing
    more is told: who brings the news, a link to a peer perhaps, does not suffer for it.
    """

    def __init__(self, sinks: tuple[Sink, ...]) -> None:
        self.failure: LocalError | OSError | None = None
        self.on_failure: Callable[[], None] = lambda: None
        self.run: Run | None = None
        self.reports: list[StepSummary] = []
        self.missing: tuple[int, ...] | None = None
        self.why = ""  # it stands still
        self._sinks = sinks

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {len(self.reports)} steps>"

    def begun(self, run: Run) -> None:
        """See `Listener`."""
        self.run = run
        self._tell()

    def step(self, report: StepSummary) -> None:
        """See `Listener`."""
        self.missing = None
        self.reports.append(report)
        self._tell(report)

    def waiting(self, why: str, missing: tuple[int, ...]) -> None:
        """See `Listener`."""
        self.why, self.missing = why, missing
        self._tell()

    def _tell(self, report: StepSummary | None = None) -> None:
        if self.failure is not None:
            return
        try:
            if report is not None:
                for sink in self._sinks:
                    sink(step_json(report))
            self.show()
        except (LocalError, OSError) as error:
            self.failure = error
            self.on_failure()

    def show(self) -> None:
        """Something changed."""

    # -- what there is to tell

    def status(self) -> str:
        """The state in one line."""
        if self.run is None:
            return "reading the data"
        if self.missing is not None:
            return waiting_text(self.why, self.missing)
        if not self.reports:
            return f"step 0 of {self.run.steps}: waiting for the first one"
        last, step_s = self.reports[-1], self.step_s()
        left_s = (self.run.steps - 1 - last.step) * step_s
        return (
            f"step {last.step + 1} of {self.run.steps}  loss {last.loss:.4f}  {last.tokens_per_s:,.0f} {self.unit()}/s  "
            f"{step_s:.2f} s/step  {last.peers} peer{'' if last.peers == 1 else 's'}  {format_duration(left_s)} left"
        )

    def step_s(self) -> float:
        """Mean of the last steps."""
        recent = self.reports[-RECENT_STEPS:]
        return sum(report.step_s for report in recent) / max(1, len(recent))

    def unit(self) -> str:
        """What `tokens_per_s` counts."""
        return "tokens" if self.run is not None and self.run.sequence else "samples"


class Lines(TrainingView):
    """For output that is no terminal: a line whenever something changed. For scripts, steps and an event where it waits."""

    def __init__(
        self, sinks: tuple[Sink, ...], *, as_json: bool = False, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(sinks)
        self._as_json = as_json
        self._clock = clock
        self._told = ""
        self._told_s = -math.inf

    def show(self) -> None:
        """See `TrainingView`."""
        if self._as_json and self.missing is None:
            return  # steps are told by a sink
        text, now_s = self.status(), self._clock()
        if text != self._told or now_s - self._told_s > REPEAT_WAITING_S:
            self._told, self._told_s = text, now_s
            if self._as_json:
                print_json({"event": "waiting", "missing": list(self.missing or ()), "why": self.why})
            else:
                say(text)


class Curve(TrainingView):
    """On a terminal: the loss curve, redrawn as it grows."""

    def __init__(self, sinks: tuple[Sink, ...], update: Callable[[RenderableType], None], width: int) -> None:
        super().__init__(sinks)
        self._update = update
        self._width = width

    def show(self) -> None:
        """See `TrainingView`."""
        points = [(report.step, report.loss) for report in self.reports]
        end = self.run.steps if self.run is not None else 1
        style = "yellow" if self.missing is not None else "bold"
        self._update(curve_with_notes(points, end, self._width, (self.status(), style)))


@contextlib.contextmanager
def training_view(*, as_json: bool, log: Path | None) -> Iterator[TrainingView]:
    """The view that fits standard output. Raises, at its end too, LocalError where the log cannot be written, and OSError where
    standard output cannot."""
    with contextlib.ExitStack() as stack:
        view = _view(stack, as_json=as_json, log=log)
        yield view
        if view.failure is not None:
            raise view.failure


def _view(stack: contextlib.ExitStack[bool | None], *, as_json: bool, log: Path | None) -> TrainingView:
    sinks: tuple[Sink, ...] = ()
    if log is not None:
        file = _open(log)
        stack.callback(_close, file)
        sinks += (_log_sink(file, log),)
    if as_json:
        return Lines((*sinks, print_json), as_json=True)
    from rich.console import Console

    console = Console(highlight=False)
    if not console.is_terminal:
        return Lines(sinks)
    from rich.live import Live

    live = stack.enter_context(Live(console=console, refresh_per_second=8))
    return Curve(sinks, live.update, console.width)


def step_json(report: StepSummary) -> dict[str, Any]:
    """A step as scripts read it."""
    return {
        "step": report.step,
        "loss": report.loss,
        "step_s": round(report.step_s, 6),
        "expected_s": round(report.expected_s, 6),
        "tokens_per_s": round(report.tokens_per_s, 3),
        "peers": report.peers,
    }


def waiting_text(why: str, missing: tuple[int, ...]) -> str:
    """Why nothing goes on."""
    if not missing:
        return f"waiting: {why}"
    if len(missing) == 1:
        return f"waiting: unit {missing[0]} has nobody"
    return f"waiting: units {', '.join(ranges(missing))} have nobody"


def _open(log: Path) -> IO[str]:
    try:
        return log.open("w", encoding="utf-8")
    except OSError as error:
        raise LocalError(f"cannot write the log {log}: {error.strerror or error}") from None


def _close(file: IO[str]) -> None:
    """What could not be written was told when it was."""
    with contextlib.suppress(OSError):
        file.close()


def _log_sink(file: IO[str], log: Path) -> Sink:
    def write(step: dict[str, Any]) -> None:
        try:
            file.write(json.dumps(step) + "\n")
            file.flush()
        except OSError as error:
            raise LocalError(f"cannot write the log {log}: {error.strerror or error}") from None

    return write
