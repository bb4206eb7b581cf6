"""`swarmnode create`: found a swarm."""

from __future__ import annotations

from pathlib import Path

import typer

from swarmnode.cli.console import JSON, fail, print_json, reports_errors, working


@reports_errors
def create(
    name: str = typer.Argument(..., metavar="NAME", help="Name of the swarm; NAME.swarm is written."),
    model: str = typer.Option(
        ...,
        "--model",
        metavar="PATH|HUB_ID",
        help="Checkpoint: a folder with config.json and safetensors, or a hub id.",
    ),
    bootstrap: list[str] = typer.Option(
        [],
        "--bootstrap",
        metavar="MADDR",
        help="A bootstrap peer that runs already (multiaddr with /p2p/). Repeatable.",
    ),
    listen: list[str] = typer.Option(
        [],
        "--listen",
        metavar="MADDR",
        help="Where `swarmnode bootstrap` will listen; default: a free port on loopback.",
    ),
    announce: list[str] = typer.Option(
        [], "--announce", metavar="MADDR", help="Address under which others reach it, where that differs from --listen."
    ),
    force: bool = typer.Option(False, "--force", help="Overwrite an existing NAME.swarm."),
    quiet: bool = typer.Option(False, "--quiet", "-q", help="Print the invite alone."),
    as_json: bool = JSON,
) -> None:
    """Found a swarm on a checkpoint: write NAME.swarm and print an invite.

    Keep NAME.swarm to yourself; hand out the invite.

    Example: swarmnode create friends --model ./llama --listen /ip4/0.0.0.0/tcp/4001 --announce /ip4/203.0.113.7/tcp/4001
    """
    path = Path(name).with_name(Path(name).name.removesuffix(".swarm") + ".swarm")
    if path.exists() and not force:
        fail(f"{path} exists already; choose another name, or --force to overwrite it", 2)
    from swarmnode.roles.founder import Bootstraps, found_swarm, reaches_others
    from swarmnode.swarm.swarmfile import save_swarm

    with working("Hashing the checkpoint", quiet=quiet or as_json) as progress:
        swarm = found_swarm(path.stem, model, Bootstraps(bootstrap, listen, announce), progress=progress)
    save_swarm(swarm, path)
    if as_json:
        assert swarm.manifest is not None
        units, size = swarm.manifest.model.units, swarm.manifest.total_bytes
        print_json(
            {
                "swarm": swarm.id.hex(),
                "name": swarm.name,
                "file": str(path),
                "invite": swarm.invite,
                "units": units,
                "bytes": size,
            }
        )
    elif quiet:
        typer.echo(swarm.invite)
    else:
        typer.echo(f"Wrote {path}. Next: swarmnode bootstrap {path}, then on each machine: swarmnode run INVITE")
        if not reaches_others(swarm):
            typer.echo("This invite works on this machine only; for others, give --listen and --announce addresses.")
        typer.echo(f"Invite:\n{swarm.invite}")
