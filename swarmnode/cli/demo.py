"""`swarmnode demo`: see a swarm work, on this machine."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import typer

from swarmnode.cli.console import JSON, fail, print_json, reports_errors, run_async, set_up_logging, unless_stopped
from swarmnode.cli.status import status_table

if TYPE_CHECKING:
    from swarmnode.demo.story import DemoReport


@reports_errors
def demo(
    as_json: bool = JSON,
    verbose: bool = typer.Option(False, "--verbose", "-v", help="Log what happens."),
) -> None:
    """Start a swarm on this machine, generate with it, kill a node in the middle, and check that the text is the same.

    Example: swarmnode demo --json
    """
    set_up_logging(verbose)
    from swarmnode.demo.story import Audience, Story

    async def play(stop: asyncio.Event) -> DemoReport | None:
        return await unless_stopped(Story(Audience() if as_json else _stage()).tell(), stop)

    report = run_async(play)
    if report is None:
        fail("interrupted; everything is stopped")
    if as_json:
        print_json(report.to_json())
    else:
        _summarise(report)
    if not report.succeeded:
        raise typer.Exit(1)


def _stage() -> Any:
    """An audience that draws on the terminal."""
    from rich.console import Console
    from rich.live import Live

    from swarmnode.demo.story import Audience

    console = Console(highlight=False)

    class Terminal(Audience):
        def __init__(self) -> None:
            self._live: Live | None = None

        def scene(self, text: str) -> None:
            if self._live is not None:
                self._live.stop()
                self._live = None
            console.print(f"\n[bold cyan]▶ {text}[/]")

        def swarm(self, status: dict[str, Any]) -> None:
            if self._live is None:
                self._live = Live(console=console, auto_refresh=False)
                self._live.start()
            self._live.update(status_table(status), refresh=True)

        def text(self, piece: str) -> None:
            console.print(piece, end="", markup=False, soft_wrap=True)

        def killed(self, name: str, span: list[int]) -> None:
            console.print(f" [bold red]✖ kill -9 {name} (units {span[0]}:{span[1]})[/] ", end="")

    return Terminal()


def _summarise(report: DemoReport) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(show_header=False, title="\nSummary", title_justify="left")
    verdict = "[green]identical[/]" if report.identical else "[red]different[/]"
    for name, value in (
        ("nodes", f"{report.nodes}, spans " + ", ".join(f"{name} {a}:{b}" for name, (a, b) in report.spans.items())),
        ("tokens", f"{report.tokens} at {report.tokens_per_s} tokens/s, the first after {report.first_token_s} s"),
        ("killed", f"{report.killed}: {report.reroutes} reroute, longest wait for a token {report.stall_s} s"),
        ("text", f"{verdict} to what a single process writes"),
        ("left running", str(report.left_running)),
        ("took", f"{report.seconds} s"),
    ):
        table.add_row(name, value)
    Console(highlight=False).print(table)
