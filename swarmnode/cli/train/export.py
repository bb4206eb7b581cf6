"""Command `swarmnode export`: write the model that a swarm has trained as a checkpoint."""

from __future__ import annotations

import asyncio
from pathlib import Path

from swarmnode.cli.options.asking import patience_option
from swarmnode.cli.options.swarm import THIS_SWARM, open_swarm
from swarmnode.counting import counted
from swarmnode.terminal.console import (
    HOME,
    JSON,
    Verbosity,
    command,
    fail,
    joined,
    print_json,
    run_async,
    say,
    unless_stopped,
)
from swarmnode.terminal.option import argument, option
from swarmnode.terminal.progress import bytes_bar, spinner


@command
def export(
    *,
    swarm: str = THIS_SWARM,
    out: Path = argument(..., "Folder to write; it appears when it is complete.", typed=Path, metavar="OUT"),
    force: bool = option(False, "Replace a checkpoint in OUT."),
    average: bool = option(
        True,
        "Write the average of the weights if the training keeps one (--ema), or those of the last step.",
        "--average/--last",
    ),
    patience: float = patience_option(30.0, "How long to wait for machines that hold all layers."),
    home: Path = HOME,
    as_json: bool = JSON,
    logs: Verbosity,
) -> None:
    """Write the newest step of a training as a checkpoint.

    This works during training, too. Load a language model with transformers' from_pretrained, a module with load_state_dict.

    Example: swarmnode export school.swarm ./trained
    """
    logs.begin()
    from swarmnode.swarm.storage.small_files import check_free

    target = out.absolute()
    check_free(target, force=force)
    known = open_swarm(swarm, home)
    from swarmnode.client.training.client import TrainingClient

    unconfirmed: list[str] = []

    async def fetch(stop: asyncio.Event) -> int | None:
        with spinner(f"Joining {known.name}", quiet=as_json) as joining:
            client = await joined(TrainingClient.join(known, home, patience_s=patience), stop)
            joining.now("Asking for the newest step")
            async with client:
                with bytes_bar("Fetching the trained weights", quiet=as_json) as progress:
                    exporting = client.export(
                        target,
                        force=force,
                        patience_s=patience,
                        average=average,
                        progress=progress,
                        on_unconfirmed=unconfirmed.extend,
                    )
                    return await unless_stopped(exporting, stop)

    step = run_async(fetch)
    if step is None:
        fail("interrupted; nothing was written: run the command again")
    if as_json:
        print_json({"out": str(out), "step": step, "unconfirmed": unconfirmed})
    else:
        say(f"Wrote the model after {counted(step, 'step')} to {out}")
        if unconfirmed:
            say(
                f"Only one machine had the state of these parts, or another has a different one: {', '.join(unconfirmed)}"
            )
