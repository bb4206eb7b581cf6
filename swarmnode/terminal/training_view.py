"""Output of a training: a curve on a terminal, a line per step elsewhere, JSON lines for scripts, and the log file.

Text of a tuning's plan, which a user reads before the tuning begins.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swarmnode.client.tuning.tuning_job import PlannedHop, TuningPlan
from swarmnode.counting import counted, format_bytes, layers, ranges
from swarmnode.errors import LocalError, UsageError
from swarmnode.terminal.console import fitted, print_json, say
from swarmnode.terminal.formatting import format_duration, printable
from swarmnode.terminal.progress import covering_lines
from swarmnode.version import missing_package

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.text import Text

    from swarmnode.compute.training.local import StepSummary
    from swarmnode.data.samples import DataSummary
    from swarmnode.swarm.records.run import Run


RECENT_STEPS = 20
MOST_LOSS = 700.0  # whose exponential is a number
REPEAT_WAITING_S = 10.0  # until the same line is printed again

HEIGHT = 10  # lines on a terminal
MAX_WIDTH = 100  # characters
DOTS_WIDE, DOTS_HIGH = 2, 4
_BLANK = 0x2800
_BITS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))  # [column][row from the top]

Sink = Callable[[dict[str, Any]], None]
"""Receiver of each step as JSON"""


def curve_with_notes(
    points: Sequence[tuple[int, float]], end: int, terminal_width: int, *notes: tuple[str, str]
) -> Text:
    """Return the curve of `draw_curve` for a terminal, with pairs of text and style below it."""
    from rich.text import Text

    lines = draw_curve(points, end, width=min(terminal_width, MAX_WIDTH), height=HEIGHT)
    return Text.assemble(("\n".join(lines) + "\n", "cyan"), *((printable(text), style) for text, style in notes))


def draw_curve(points: Sequence[tuple[int, float]], end: int, *, width: int, height: int) -> list[str]:
    """Draw values over the numbers 0 to end - 1, as `height` lines of `width` characters with the scale at the left.

    If several points share a column of dots, their mean is drawn. Values that are not finite are left out.
    """
    finite = [(number, value) for number, value in points if math.isfinite(value)]
    labels = [""] * height  # the largest value at the top, the smallest at the bottom
    if finite:
        labels[-1] = f"{min(value for _, value in finite):.4g}"
        labels[0] = f"{max(value for _, value in finite):.4g}"
    room = max((len(label) for label in labels), default=0) + 1
    columns = max(1, width - room) * DOTS_WIDE
    rows = height * DOTS_HIGH
    cells = [[_BLANK] * (columns // DOTS_WIDE) for _ in range(height)]
    by_column: dict[int, list[float]] = {}
    for number, value in sorted(finite):
        by_column.setdefault(min(columns - 1, number * columns // max(1, end)), []).append(value)
    means = _joined({column: math.fsum(values) / len(values) for column, values in by_column.items()})
    low, high = min(means.values(), default=0.0), max(means.values(), default=0.0)
    before: int | None = None
    for column, value in means.items():
        row = round((high - value) / (high - low) * (rows - 1)) if high > low else rows // 2
        stroke = range(row, row + 1)  # up or down from the row of the column before
        if before is not None and before != row:
            stroke = range(before + 1, row + 1) if before < row else range(row, before)
        for dot in stroke:
            cells[dot // DOTS_HIGH][column // DOTS_WIDE] |= _BITS[column % DOTS_WIDE][dot % DOTS_HIGH]
        before = row
    lines = ("".join(map(chr, line)) for line in cells)
    return [f"{label:>{room - 1}} {line}" for label, line in zip(labels, lines, strict=True)]


def _joined(means: dict[int, float]) -> dict[int, float]:
    """Return the means with values between them, along straight lines."""
    joined = dict(list(means.items())[:1])
    for (left, start), (right, stop) in pairwise(means.items()):
        for column in range(left + 1, right + 1):
            joined[column] = start + (stop - start) * (column - left) / (right - left)
    return joined


class TrainingView:
    """Listener that shows and logs a training. Each function of `sinks` gets each step.

    If the output fails (its reader has gone, a disk is full), the error becomes `failure`, `on_failure` is called, and later output
    is dropped. No error reaches the caller, which may be a peer's link.
    """

    def __init__(self, sinks: tuple[Sink, ...]) -> None:
        self.failure: LocalError | OSError | None = None
        self.on_failure: Callable[[], None] = lambda: None
        self.run: Run | None = None
        self.reports: list[StepSummary] = []
        self.missing: tuple[int, ...] | None = None
        self.why = ""  # reason for waiting
        self.beginning = ""  # shown before the first step
        self._sinks = sinks

    def begun(self, run: Run, data: DataSummary) -> None:
        """Show what the data holds, and that the run begins."""
        self.run = run
        self._tell(notes=[f"Data: {data}", *data.notes])

    def step(self, report: StepSummary) -> None:
        """Log a finished step and show the new state."""
        self.missing = None
        self.reports.append(report)
        self._tell(report)

    def waiting(self, why: str, missing: tuple[int, ...]) -> None:
        """Show that the training waits, and why."""
        self.why, self.missing = why, missing
        self._tell()

    def going_on(self, *notes: str) -> None:
        """Print `notes`, and show that the training no longer waits."""
        self.missing = None
        self._tell(notes=notes)

    def _tell(self, report: StepSummary | None = None, *, notes: Sequence[str] = ()) -> None:
        if self.failure is not None:
            return
        try:
            for note in notes:
                self.print_line(note)
            if report is not None:
                for sink in self._sinks:
                    sink(step_json(report))
            self.show()
        except (LocalError, OSError) as error:
            self.failure = error
            self.on_failure()

    def show(self) -> None:
        """Show the state after a change; the base class shows nothing."""

    def print_line(self, text: str) -> None:
        """Print a line that stays, on standard error if standard output is for scripts."""
        say(text)

    # -- texts

    def status(self) -> str:
        """Return the state of the training in one line."""
        if self.run is None:
            return self.beginning or "reading the data"
        if self.missing is not None:
            return waiting_text(self.why, self.missing)
        if not self.reports:
            return self.beginning or f"step 0 of {self.run.steps}: waiting for the first step"
        last, step_s = self.reports[-1], self.step_s()
        left_s = (self.run.steps - 1 - last.step) * step_s
        held_out = next((one.held_out_loss for one in reversed(self.reports) if one.held_out_loss is not None), None)
        told = "" if held_out is None else f"  held out {held_out:.4f} (perplexity {perplexity(held_out):.4g})"
        return (
            f"step {last.step + 1} of {self.run.steps}  loss {last.loss:.4f}{told}  {self.tokens_per_s():,.0f} {self.unit()}/s  "
            f"{step_s:.2f} s/step  {last.peers} peer{'' if last.peers == 1 else 's'}  {format_duration(left_s)} left"
        )

    def step_s(self) -> float:
        """Return the mean seconds of the last `RECENT_STEPS` steps whose duration is known; 0 if there are none."""
        recent = self._recent()
        return sum(report.step_s for report in recent) / max(1, len(recent))

    def tokens_per_s(self) -> float:
        """Return the tokens per second of the last `RECENT_STEPS` steps whose duration is known; 0 if there are none."""
        recent = self._recent()
        return sum(report.tokens for report in recent) / max(1e-9, sum(report.step_s for report in recent))

    def _recent(self) -> list[StepSummary]:
        return [report for report in self.reports[-RECENT_STEPS:] if report.step_s]

    def unit(self) -> str:
        """Return what `tokens_per_s` counts: tokens or samples."""
        return "tokens" if self.run is not None and self.run.sequence else "samples"


class Lines(TrainingView):
    """View for output that is no terminal: a line after each change. For scripts, JSON: each step, and an event when it waits."""

    def __init__(
        self, sinks: tuple[Sink, ...], *, as_json: bool = False, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(sinks)
        self._as_json = as_json
        self._clock = clock
        self._printed = ""
        self._printed_s = -math.inf

    def print_line(self, text: str) -> None:
        say(text, err=self._as_json)

    def show(self) -> None:
        """Show the state after a change."""
        if self._as_json and self.missing is None:
            return  # a sink prints the steps
        text, now_s = self.status(), self._clock()
        if text != self._printed or now_s - self._printed_s > REPEAT_WAITING_S:
            self._printed, self._printed_s = text, now_s
            if self._as_json:
                print_json({"event": "waiting", "missing": list(self.missing or ()), "why": self.why})
            else:
                say(text)


class Curve(TrainingView):
    """View for a terminal: the loss curve, redrawn as it grows, with the seconds since the state below it changed. Notes stay above
    it."""

    def __init__(self, sinks: tuple[Sink, ...], console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(sinks)
        self._console = console
        self._clock = clock
        self._printed, self._since_s = "", clock()

    def print_line(self, text: str) -> None:
        """Print a line above the curve, which a print past the console would leave to be overwritten."""
        self._console.print(printable(fitted(text)), markup=False, soft_wrap=True)

    def drawn(self) -> RenderableType:
        """Return the curve, if a step has been made, and the state as a line."""
        state = self.status()
        if state != self._printed:
            self._printed, self._since_s = state, self._clock()
        seconds = int(self._clock() - self._since_s)
        state = f"{state}  {seconds} s" if seconds else state
        style = "yellow" if self.missing is not None else "bold"
        if not self.reports:
            from rich.text import Text

            return Text(state, style)
        points = [(report.step, report.loss) for report in self.reports]
        end = self.run.steps if self.run is not None else 1
        return curve_with_notes(points, end, self._console.width, (state, style))


@contextlib.contextmanager
def training_view(*, as_json: bool, log: Path | None, tensorboard: Path | None = None) -> Iterator[TrainingView]:
    """Yield the view that fits standard output. `tensorboard` is a folder for TensorBoard's files. Raises, at its end at the
    latest, LocalError if a file cannot be written, and OSError if standard output cannot."""
    with contextlib.ExitStack() as stack:
        view = _view(stack, as_json=as_json, log=log, tensorboard=tensorboard)
        yield view
        if view.failure is not None:
            raise view.failure


def _view(
    stack: contextlib.ExitStack[bool | None], *, as_json: bool, log: Path | None, tensorboard: Path | None
) -> TrainingView:
    sinks: tuple[Sink, ...] = () if tensorboard is None else (_tensorboard_sink(stack, tensorboard),)
    if log is not None:
        sinks += (_log_sink(stack, log),)
    if as_json:
        return Lines((*sinks, print_json), as_json=True)
    from rich.console import Console

    console = Console(highlight=False)
    if not console.is_terminal:
        return Lines(sinks)
    from rich.live import Live

    stack.enter_context(covering_lines())
    curve = Curve(sinks, console)
    stack.enter_context(Live(console=console, refresh_per_second=4, get_renderable=curve.drawn))
    return curve


def step_json(report: StepSummary) -> dict[str, Any]:
    """Return a step as a JSON object for scripts; with the loss and the perplexity of held-out data if it evaluated, and
    with the load of the busiest expert if the run has losses of routers."""
    held_out = report.held_out_loss
    told = {} if held_out is None else {"held_out_loss": held_out, "perplexity": perplexity(held_out)}
    if report.expert_load:
        told["expert_load"] = round(report.expert_load, 4)
    return {
        "step": report.step,
        "loss": report.loss,
        "step_s": round(report.step_s, 6),
        "expected_s": round(report.expected_s, 6),
        "tokens_per_s": round(report.tokens_per_s, 3),
        "peers": report.peers,
        **told,
    }


def perplexity(loss: float) -> float:
    """Return the perplexity of a mean loss in nats a token; infinite if it is beyond the numbers."""
    return math.exp(loss) if loss < MOST_LOSS else math.inf


def _tensorboard_sink(stack: contextlib.ExitStack[bool | None], folder: Path) -> Sink:
    """Return a sink that writes each number of a step as a scalar. Raises UsageError if TensorBoard is not installed, LocalError if
    the folder cannot be written."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise UsageError(f"{missing_package('tensorboard')}; or use --log instead of --tensorboard") from None
    try:
        writer: Any = SummaryWriter(str(folder))  # type: ignore[no-untyped-call]
    except OSError as error:
        raise LocalError(f"cannot write into {folder}: {error.strerror or error}; choose another folder") from None
    stack.callback(writer.close)

    def write(step: dict[str, Any]) -> None:
        for name, value in step.items():
            if name != "step":
                writer.add_scalar(name, value, step["step"])
        if "held_out_loss" in step:
            writer.flush()

    return write


def waiting_text(why: str, missing: tuple[int, ...]) -> str:
    """Return the line that tells why the training waits."""
    if not missing:
        return "waiting: " + re.sub(r"^step (\d+) waits: ", r"step \1, ", why)
    if len(missing) == 1:
        return f"waiting: no machine holds layer {missing[0]}"
    return f"waiting: no machine holds layers {', '.join(ranges(missing))}"


def _log_sink(stack: contextlib.ExitStack[bool | None], log: Path) -> Sink:
    """Return a sink that appends each step to `log` as a line of JSON. What the file holds stays until step 0 is written. Raises
    LocalError if the file cannot be written."""
    is_first = True

    def unwritable(error: OSError) -> LocalError:
        return LocalError(f"cannot write the log {log}: {error.strerror or error}; choose another file")

    try:
        file = log.open("a", encoding="utf-8")
    except OSError as error:
        raise unwritable(error) from None

    def write(step: dict[str, Any]) -> None:
        nonlocal is_first
        try:
            if is_first and step["step"] == 0:  # else a training that goes on
                file.truncate(0)
            is_first = False
            file.write(json.dumps(step) + "\n")
            file.flush()
        except OSError as error:
            raise unwritable(error) from None

    @stack.callback
    def close() -> None:
        with contextlib.suppress(OSError):  # an error in writing has been reported already
            file.close()

    return write


def plan_lines(plan: TuningPlan) -> list[str]:
    """Return the lines of a plan: recipe, expected time, and what each peer holds and sees."""
    lines = [recipe_line(plan)]
    left = plan.run.steps - plan.step
    if plan.step_s:
        rest = format_duration(plan.step_s * left)
        which = "in all" if not plan.step else f"for the {counted(left, 'step')} left"
        lines.append(f"Expected: {plan.step_s:.2g} s a step, {rest} {which}, if nothing else runs on these machines")
    return lines + [hop_line(one) for one in plan.hops]


def change_lines(before: TuningPlan, plan: TuningPlan) -> list[str]:
    """Return the lines of a plan after a fault or a departure: where it goes on, and the peers that are other ones than before."""
    known = [hop_line(one) for one in before.hops]
    lines = [hop_line(one) for one in plan.hops]
    why = f": {plan.why}" if plan.why else ""
    for one in before.hops:
        why = why.replace(f"peer {one.hop.peer}", one.name)  # as the plan above calls it
    return [f"Going on from step {plan.step}{why}", *(line for line in lines if line not in known)]


def hop_line(hop: PlannedHop) -> str:
    """Return what a peer holds and sees in one line."""
    kept, passing = format_bytes(hop.held.adapter_bytes), format_bytes(hop.held.pass_bytes)
    seen = f"; its owner could see {', '.join(hop.sees)}" if hop.sees else ""
    held = f"{hop.name} holds {layers(hop.hop.start, hop.hop.end)}"
    return f"{held}: {kept} of adapter and optimiser, up to {passing} of passes{seen}"


def recipe_line(plan: TuningPlan) -> str:
    """Return the recipe and the size of a step in one line."""
    recipe, run = plan.recipe, plan.run
    if recipe.method == "prompt":
        what = f"soft prompt of {recipe.prompt_tokens} tokens"
    else:
        targets = recipe.targets if isinstance(recipe.targets, str) else ", ".join(recipe.targets)
        scaled = " with rsLoRA" if recipe.rslora else ""
        what = f"{recipe.method} of rank {recipe.rank} and alpha {recipe.alpha:g}{scaled} on {targets}"
    size = f"{counted(run.batch, 'row')} of {run.sequence} tokens, {run.microbatch} at a time"
    return f"Tuning: {what}; {counted(run.steps, 'step')} of {size}; learning rate {run.learning_rate:g}"
