"""`swarmnode create`: found a swarm."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from swarmnode.cli.console import JSON, fail, print_json, reports_errors, working

if TYPE_CHECKING:
    from swarmnode.roles.material import Material
    from swarmnode.swarm.swarmfile import Swarm

SUFFIX = ".swarm"
MODES = ("serve", "train")


@reports_errors
def create(
    name: str = typer.Argument(..., metavar="NAME", help="Name of the swarm; NAME.swarm is written."),
    mode: str = typer.Option("serve", "--mode", metavar="serve|train", help="What the swarm does with the model."),
    model: str = typer.Option(
        "",
        "--model",
        metavar="PATH|HUB_ID",
        help="Checkpoint: a folder with config.json and safetensors, or a hub id.",
        show_default=False,
    ),
    config: Path = typer.Option(
        None,
        "--config",
        metavar="DIR",
        help="Train from random weights: a folder with a config.json of transformers, and a tokenizer if there is one.",
        show_default=False,
    ),
    module: str = typer.Option(
        "",
        "--module",
        metavar="PACKAGE.MODULE:FUNCTION|FILE.pt2",
        help="Train any torch module: a function that returns it with an example batch, or an exported program.",
        show_default=False,
    ),
    seed: int = typer.Option(0, "--seed", help="Of the random weights of --config."),
    byte_level: bool = typer.Option(False, "--byte-level", help="Bytes are tokens: leave the tokenizer out."),
    units: int = typer.Option(0, "--units", help="About how many units to cut a --module into.", show_default=False),
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
    force: bool = typer.Option(False, "--force", help="Overwrite an existing NAME.swarm and NAME-weights."),
    quiet: bool = typer.Option(False, "--quiet", "-q", help="Print the invite alone."),
    as_json: bool = JSON,
) -> None:
    """Found a swarm that serves or trains a model: write NAME.swarm and print an invite.

    Weights that --config or --module bring forth are written to NAME-weights. Keep NAME.swarm to yourself; hand out the invite.

    Example: swarmnode create friends --model ./llama --listen /ip4/0.0.0.0/tcp/4001 --announce /ip4/203.0.113.7/tcp/4001

    Example: swarmnode create school --mode train --config ./gpt2-small
    """
    path = Path(name).with_name(Path(name).name.removesuffix(SUFFIX) + SUFFIX)
    if path.exists() and not force:
        fail(f"{path} exists already; choose another name, or --force to overwrite it", 2)
    _check_options(mode, model, config, module, units=units, byte_level=byte_level)
    from swarmnode.roles.founder import Bootstraps, check_name, found_swarm, reaches_others
    from swarmnode.roles.material import from_checkpoint, from_config, from_module
    from swarmnode.swarm.swarmfile import save_swarm

    check_name(path.stem)
    weights = path.with_name(f"{path.stem}-weights").absolute()
    if config is not None:
        material = from_config(config, weights, seed=seed, byte_level=byte_level, force=force)
    elif module:
        material = from_module(module, weights, units=units or None, force=force)
    else:
        material = from_checkpoint(model, byte_level=byte_level)
    with working("Hashing the weights", quiet=quiet or as_json) as progress:
        swarm = found_swarm(path.stem, material, Bootstraps(bootstrap, listen, announce), mode=mode, progress=progress)
    save_swarm(swarm, path)
    if as_json:
        _print_json(swarm, path, material)
    elif quiet:
        typer.echo(swarm.invite)
    else:
        for remark in material.remarks:
            typer.echo(f"Note: {remark}")
        typer.echo(f"Wrote {path}. Next: swarmnode bootstrap {path}, then on each machine: swarmnode run INVITE")
        if mode == "train":
            typer.echo(f"When they run: swarmnode train {path} --data PATH --steps N")
        if not reaches_others(swarm):
            typer.echo("This invite works on this machine only; for others, give --listen and --announce addresses.")
        typer.echo(f"Invite:\n{swarm.invite}")


def _check_options(mode: str, model: str, config: Path | None, module: str, *, units: int, byte_level: bool) -> None:
    """Which options go together."""
    if mode not in MODES:
        fail(f"--mode {mode}: it is serve or train", 2)
    if sum(map(bool, (model, config, module))) != 1:
        fail("give exactly one of --model, --config and --module", 2)
    if mode == "serve" and not model:
        fail("a swarm that serves needs trained weights (--model); --config and --module go with --mode train", 2)
    if units and not module:
        fail("--units goes with --module; a language model's units are its layers", 2)
    if byte_level and (module or mode == "serve"):
        fail("--byte-level goes with a language model and --mode train", 2)


def _print_json(swarm: Swarm, path: Path, material: Material) -> None:
    assert swarm.manifest is not None
    print_json(
        {
            "swarm": swarm.id.hex(),
            "name": swarm.name,
            "file": str(path),
            "invite": swarm.invite,
            "kind": material.kind,
            "mode": swarm.manifest.mode,
            "units": material.model.units,
            "bytes": swarm.manifest.total_bytes,
            "weights": str(material.folder),
            "remarks": list(material.remarks),
        }
    )
