"""Command `swarmnode demo`: watch a swarm work on this machine."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import typer

from swarmnode.cli.use.status import status_table
from swarmnode.terminal.console import JSON, Verbosity, command, fail, print_json, run_async, unless_stopped
from swarmnode.terminal.formatting import printable
from swarmnode.terminal.option import option

if TYPE_CHECKING:
    from swarmnode.compute.training.local import StepSummary
    from swarmnode.demo import DemoReport

MIN_STEPS = 10


@command
def demo(
    *,
    steps: int = option(0, "Training steps; default: about half a minute's.", max=100_000, show_default=False),
    as_json: bool = JSON,
    logs: Verbosity,
) -> None:
    """Try a swarm of several nodes on this machine.

    It learns the Zen of Python, loses a node meanwhile, and recites. The exit code is 1 if the demo fails.

    Example: swarmnode demo --json
    """
    logs.begin()
    if 0 < steps < MIN_STEPS or steps < 0:
        fail(f"--steps {steps}: give at least {MIN_STEPS}, because a node is killed half-way", 2)
    from swarmnode.demo import STEPS, Spectators, Story

    async def play(stop: asyncio.Event) -> DemoReport | None:
        story = Story(Spectators() if as_json else _stage(), steps=steps or STEPS)
        return await unless_stopped(story.tell(), stop)

    report = run_async(play)
    if report is None:
        fail("interrupted; everything has been stopped")
    if as_json:
        print_json(report.to_json())
    else:
        _summarise(report)
    if not report.succeeded:
        raise typer.Exit(1)


def _stage() -> Any:
    """Return the display that draws the demonstration on the terminal."""
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    from swarmnode.demo import Spectators
    from swarmnode.terminal.training_view import curve_with_notes

    console = Console(highlight=False)

    class Terminal(Spectators):
        def __init__(self) -> None:
            self._live: Live | None = None
            self._points: list[tuple[int, float]] = []
            self._notice = ""

        def _show(self, picture: Any) -> None:
            if self._live is None:
                self._live = Live(console=console, auto_refresh=False)
                self._live.start()
            self._live.update(picture, refresh=True)

        def scene(self, text: str) -> None:
            if self._live is not None:
                self._live.stop()
                self._live = None
            console.print(Text(f"\n▶ {printable(text)}", "bold cyan"))

        def swarm(self, status: dict[str, Any]) -> None:
            self._show(status_table(status))

        def step(self, report: StepSummary, steps: int) -> None:
            self._points.append((report.step, report.loss))
            told = f"step {report.step + 1} of {steps}  loss {report.loss:.3f}  {report.tokens_per_s:,.0f} tokens/s"
            notes = (f"{told}  {report.peers} peers  ", "bold"), (self._notice, "bold red")
            self._show(curve_with_notes(self._points, steps, console.width, *notes))

        def text(self, piece: str) -> None:
            console.print(printable(piece), end="", markup=False, soft_wrap=True)

        def killed(self, name: str, span: list[int]) -> None:
            self._notice = f"✖ kill -9 {name} (layers {span[0]}:{span[1]})"

    return Terminal()


def _summarise(report: DemoReport) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)
    texts = Table("what the swarm says", "the text that it learnt from", title="\nBy heart", title_justify="left")
    texts.add_row(Text(printable(report.text)), Text(printable(report.original)))
    console.print(texts)
    table = Table(show_header=False, title="\nSummary", title_justify="left")
    verdict = ("identical", "green") if report.identical else ("different", "red")
    loss = f"loss {report.first_loss} to {report.last_loss}"
    for name, value in (
        ("nodes", f"{report.nodes}, spans " + ", ".join(f"{name} {a}:{b}" for name, (a, b) in report.spans.items())),
        (
            "trained",
            f"{report.steps} steps in {report.training_s} s, {report.trained_tokens_per_s:,.0f} tokens/s, {loss}",
        ),
        (
            "killed",
            f"{report.killed} at step {report.killed_at_step}; the longest step after it took {report.stall_s:.2f} s",
        ),
        (
            "recited",
            Text.assemble(
                f"{report.recited} of {len(report.original)} characters right, {report.tokens_per_s} tokens/s; ",
                verdict,
                " to what a single process writes with the exported model",
            ),
        ),
        ("left running", str(report.left_running)),
        ("took", f"{report.seconds} s"),
    ):
        table.add_row(name, value if isinstance(value, Text) else Text(printable(value)))
    console.print(table)
