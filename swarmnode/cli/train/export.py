"""`swarmnode export`: what a swarm has trained, as a checkpoint."""

from __future__ import annotations

import asyncio
from pathlib import Path

import typer

from swarmnode.cli.options.asking import patience_option
from swarmnode.cli.options.swarm import THIS_SWARM, open_swarm
from swarmnode.cli.terminal.bars import bytes_bar
from swarmnode.cli.terminal.console import (
    HOME,
    JSON,
    VERBOSE,
    default_home,
    fail,
    print_json,
    reports_errors,
    run_async,
    say,
    set_up_logging,
    unless_stopped,
)
from swarmnode.counting import counted


@reports_errors
def export(
    swarm: str = THIS_SWARM,
    out: Path = typer.Argument(..., metavar="OUT", help="Folder to write; it appears when all of it is there."),
    force: bool = typer.Option(False, "--force", help="Replace a checkpoint that is in OUT."),
    patience: float = patience_option(30.0, "How long to wait for peers that hold all units."),
    home: Path = HOME,
    as_json: bool = JSON,
    verbose: bool = VERBOSE,
) -> None:
    """Write the newest step that a training swarm has of all units as a checkpoint, also while it trains.

    A language model is read by transformers' from_pretrained, a module by load_state_dict.

    Example: swarmnode export school.swarm ./trained
    """
    set_up_logging(verbose)
    from swarmnode.swarm.storage.new_folder import check_free

    target = out.absolute()
    check_free(target, force=force)
    known = open_swarm(swarm, default_home(home))
    from swarmnode.training.client import TrainingClient

    async def fetch(stop: asyncio.Event) -> int | None:
        client = await TrainingClient.join(known, default_home(home), patience_s=patience)
        try:
            with bytes_bar("Fetching the trained weights", quiet=as_json) as progress:
                exporting = client.export(target, force=force, patience_s=patience, progress=progress)
                return await unless_stopped(exporting, stop)
        finally:
            await client.close()

    step = run_async(fetch)
    if step is None:
        fail("interrupted; nothing was written")
    if as_json:
        print_json({"out": str(out), "step": step})
    else:
        say(f"Wrote the model after {counted(step, 'step')} to {out}")
