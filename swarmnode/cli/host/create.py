"""`swarmnode create`: found a swarm."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from swarmnode.cli.options.founding import (
    ADAPTERS,
    ANNOUNCE,
    found,
    new_beside,
    new_owner,
    new_swarm_file,
    parse_adapters,
)
from swarmnode.cli.options.owner import OWNER_KEY, PASSWORD_FILE
from swarmnode.cli.terminal.bars import bytes_bar
from swarmnode.cli.terminal.console import JSON, fail, print_json, reports_errors, say

if TYPE_CHECKING:
    from swarmnode.roles.creation.model_source import ModelSource
    from swarmnode.swarm.storage.swarmfile import Swarm

MODES = ("serve", "train")
TASKS = ("auto", "generate", "embed", "classify")
PRIORITIES = ("none", "credit")
DOORS = {"embed": "v1/embeddings", "classify": "classify"}


@reports_errors
def create(
    context: typer.Context,
    name: str = typer.Argument(..., metavar="NAME", help="Name of the swarm; NAME.swarm is written."),
    mode: str = typer.Option("serve", "--mode", metavar="serve|train", help="What the swarm does with the model."),
    model: str = typer.Option(
        "",
        "--model",
        metavar="PATH|HUB_ID",
        help="Checkpoint: a folder with config.json and safetensors, a GGUF file, or a hub id (organisation/model, "
        "organisation/model@revision); quantised ones are dequantised.",
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
        help="Any torch module: a function that returns it with an example batch, or an exported program.",
        show_default=False,
    ),
    task: str = typer.Option(
        "auto",
        "--task",
        metavar="auto|generate|embed|classify",
        help="What --model is served for; auto: as its config says.",
    ),
    seed: int = typer.Option(0, "--seed", min=0, max=2**63 - 1, help="Of the random weights of --config."),
    byte_level: bool = typer.Option(False, "--byte-level", help="Bytes are tokens: leave the tokenizer out."),
    units: int = typer.Option(0, "--units", help="About how many units to cut a --module into.", show_default=False),
    adapter: list[str] = ADAPTERS,
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
    announce: list[str] = ANNOUNCE,
    private: bool = typer.Option(
        False, "--private", help="Only those whom you invite belong to it; NAME.owner is your key."
    ),
    public: bool = typer.Option(
        False,
        "--public",
        help="Everybody may join; the swarm is signed with your key, NAME.owner, and you can revoke peers.",
    ),
    priority: str = typer.Option(
        "none", "--priority", metavar="none|credit", help="Whose sessions go first: credit is those who served others."
    ),
    owner_key: Path = OWNER_KEY,
    password_file: Path = PASSWORD_FILE,
    force: bool = typer.Option(False, "--force", help="Overwrite an existing NAME.swarm and NAME-weights."),
    quiet: bool = typer.Option(False, "--quiet", "-q", help="Print the invite alone."),
    as_json: bool = JSON,
) -> None:
    """Found a swarm that serves or trains a model: write NAME.swarm and print an invite.

    Weights that --config or --module bring forth, or that were quantised, are written to NAME-weights, adapters to NAME-adapters.
    Keep NAME.swarm to yourself; hand out the invite.

    Example: swarmnode create friends --model ./llama --listen /ip4/0.0.0.0/tcp/4001 --announce /ip4/203.0.113.7/tcp/4001

    Example: swarmnode create school --mode train --config ./gpt2-small

    Example: swarmnode create poets --model ./llama --adapter verse=./verse-lora --adapter prose=./prose-lora

    Example: swarmnode create friends --private --model ./llama --listen /ip4/0.0.0.0/tcp/4001
    """
    _check_options(context.params)
    from swarmnode.roles.creation.bootstraps import Bootstraps

    path, adapters = new_swarm_file(name, force=force), parse_adapters(adapter)
    bootstraps = Bootstraps(bootstrap, listen, announce).settled()
    owner = new_owner(path, owner_key, password_file, force=force) if private or public else None
    with new_beside(path) as weights:
        model_source = _model_source(context.params, weights)
        swarm = found(
            path,
            model_source,
            bootstraps,
            owner,
            mode=mode,
            private=private,
            quiet=quiet or as_json,
            by_credit=priority == "credit",
            adapters=adapters,
            force=force,
        )
    if as_json:
        _print_json(swarm, path, model_source)
    elif quiet:
        say("" if private else swarm.invite, nl=not private)
    else:
        _tell(swarm, path, model_source, mode)


def _check_options(options: Mapping[str, Any]) -> None:
    """Which options go together."""
    mode, priority = options["mode"], options["priority"]
    model, config, module = options["model"], options["config"], options["module"]
    if mode not in MODES:
        fail(f"--mode {mode}: it is serve or train", 2)
    if priority not in PRIORITIES:
        fail(f"--priority {priority}: it is none or credit", 2)
    if options["private"] and options["public"]:
        fail("a swarm is --private or --public, not both", 2)
    if sum(map(bool, (model, config, module))) != 1:
        fail("give exactly one of --model, --config and --module", 2)
    if mode == "serve" and config:
        fail("a swarm that serves needs trained weights (--model, --module); --config goes with --mode train", 2)
    if options["task"] not in TASKS:
        fail(f"--task {options['task']}: it is one of {', '.join(TASKS)}", 2)
    if options["task"] != "auto" and (mode == "train" or not model):
        fail("--task goes with --model and --mode serve", 2)
    if options["adapter"] and (mode == "train" or not model):
        fail("--adapter goes with --model and --mode serve", 2)
    if options["units"] and not module:
        fail("--units goes with --module; a language model's units are its layers", 2)
    if options["byte_level"] and (module or mode == "serve"):
        fail("--byte-level goes with a language model and --mode train", 2)


def _model_source(options: Mapping[str, Any], weights: Path) -> ModelSource:
    """The model of the swarm; weights that did not exist yet are written into the folder `weights`."""
    from swarmnode.roles.creation.model_source import from_checkpoint, from_config, from_model, from_module

    trains = options["mode"] == "train"
    model, force = options["model"], options["force"]
    if options["config"] is not None:
        byte_level = options["byte_level"]
        return from_config(options["config"], weights, seed=options["seed"], byte_level=byte_level, force=force)
    if options["module"]:
        return from_module(options["module"], weights, units=options["units"] or None, trains=trains, force=force)
    with bytes_bar("Dequantising the weights", quiet=options["quiet"] or options["as_json"]) as progress:
        if not trains:
            task = None if options["task"] == "auto" else options["task"]
            return from_model(model, weights, task=task, force=force, progress=progress)
        return from_checkpoint(model, weights, byte_level=options["byte_level"], force=force, progress=progress)


def _tell(swarm: Swarm, path: Path, model_source: ModelSource, mode: str) -> None:
    """What was written, what to keep, and what to do next."""
    for remark in model_source.remarks:
        say(f"Note: {remark}")
    file = shlex.quote(str(path))
    say(f"Wrote {path}. Next: swarmnode bootstrap {file}, then on each machine: swarmnode run INVITE")
    if swarm.owner:
        key = path.with_suffix(".owner")
        say(f"{key} is the key to the swarm: keep it, and its password; nobody can replace it.")
    if mode == "train":
        say(f"When they run: swarmnode train {file} --data PATH --steps N")
    elif model_source.model.task:
        say(f"When they run: swarmnode serve {file}, and ask /{DOORS[model_source.model.task]}")
    elif model_source.kind == "graph":
        say(f"When they run: swarmnode infer {file} --input FILE.npz")
    say(_reach(swarm))
    if swarm.private:
        say(f"An invite for a friend: swarmnode invite {file}")
    else:
        say(f"Invite:\n{swarm.invite}")


def _reach(swarm: Swarm) -> str:
    """From where the invite leads to the swarm."""
    from swarmnode.net.addressing.addresses import is_public, without_peer

    if not swarm.reaches_others:
        return "This invite works on this machine only; for others, give --listen and --announce addresses."
    addresses = ", ".join(map(without_peer, swarm.bootstraps))
    if any(map(is_public, swarm.bootstraps)):
        return f"The invite leads to {addresses}."
    return f"The invite leads to {addresses}: this network only. For the internet, give --announce your address there."


def _print_json(swarm: Swarm, path: Path, model_source: ModelSource) -> None:
    assert swarm.manifest is not None
    print_json(
        {
            "swarm": swarm.id.hex(),
            "name": swarm.name,
            "file": str(path),
            "membership": swarm.manifest.membership,
            "priority": swarm.manifest.priority or None,
            "owner": swarm.owner.hex(),
            "invite": None if swarm.private else swarm.invite,
            "kind": model_source.kind,
            "mode": swarm.manifest.mode,
            "units": model_source.model.units,
            "bytes": swarm.manifest.total_bytes,
            "weights": str(model_source.folder),
            "adapters": list(swarm.manifest.adapter_names),
            "remarks": list(model_source.remarks),
        }
    )
