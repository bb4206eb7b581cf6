"""Commands `swarmnode models`, `models weights` and `models prune`: the swarms known here, and the weights fetched here."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from swarmnode.counting import format_bytes
from swarmnode.terminal.console import HOME, JSON, command, print_json, say
from swarmnode.terminal.formatting import parse_duration
from swarmnode.terminal.option import argument, option

if TYPE_CHECKING:
    from swarmnode.swarm.storage.swarmfile import Swarm


UNKNOWN = "not seen yet"
GONE = "its file {} is gone or damaged"


class ModelEntry(NamedTuple):
    """Swarm with a name on this machine, and its model; `units` and `size_bytes` are None until this machine has seen the swarm's
    manifest."""

    name: str
    model: str
    mode: str
    task: str
    does: str
    units: int | None
    size_bytes: int | None
    members: str
    last: bool


@command
def models(home: Path = HOME, as_json: bool = JSON) -> None:
    """List the swarms that you know, and their models.

    You know the swarms that you founded or joined, and the public ones.

    Example: swarmnode models
    """
    entries = sorted(_read_entries(home))
    if as_json:
        print_json([model._asdict() for model in entries])
        return
    if not entries:
        say("No swarm has a name here yet. To join one: swarmnode join; to start one: swarmnode host MODEL")
        return
    from swarmnode.codec.sampling import USUAL
    from swarmnode.swarm.records.manifest import GENERATE
    from swarmnode.terminal.tables import new_table, prevent_wrapping, show

    table = new_table("", ("swarm", "model", "does", "layers", "size", "who"), numbers=("layers", "size"), plain=True)
    prevent_wrapping(table, "swarm")
    for one in entries:
        size = "" if one.size_bytes is None else format_bytes(one.size_bytes)
        used = "used last" if one.last else ""
        table.add_row(
            one.name, one.model, one.does, str(one.units or ""), size, ", ".join(filter(None, (one.members, used)))
        )
    show(table)
    if any(one.task == GENERATE for one in entries):
        say("The layers of a model that generates text count its embedding and its head.")
        usual = ", ".join(f"{name.replace('_', '-')} {value}" for name, value in USUAL.items())
        say(f"A model that brings no sampling settings gets {usual} over HTTP, unless the request says otherwise.")


def _read_entries(home: Path) -> Iterator[ModelEntry]:
    from swarmnode.errors import UsageError
    from swarmnode.swarm.storage.remembered import ManifestCache
    from swarmnode.swarm.storage.swarmfile import JoinedSwarms, load_named, public_swarms

    joined, cache = JoinedSwarms(home), ManifestCache(home)
    for name in {*joined.names(), *public_swarms(home)}:
        last = name == joined.last
        try:
            swarm = load_named(name, home)
        except UsageError:  # the founder has moved the file
            yield ModelEntry(name, GONE.format(joined.file_of(name)), "", "", "", None, None, "", last)
            continue
        assert swarm is not None
        raw = cache.get(swarm.id) if swarm.manifest is None else None
        yield _describe(name, swarm if raw is None else swarm.with_manifest(raw), last=last)


def _describe(name: str, swarm: Swarm, *, last: bool) -> ModelEntry:
    from swarmnode.swarm.records.manifest import TRAIN

    members = "yours" if swarm.file is not None else "invited" if swarm.private else "everyone"
    if swarm.manifest is None:
        return ModelEntry(name, UNKNOWN, "", "", "", None, None, members, last)
    model, manifest = swarm.manifest.model, swarm.manifest
    does = "trains" if manifest.mode == TRAIN else manifest.purpose
    return ModelEntry(
        name, model.label, manifest.mode, manifest.task, does, model.units, manifest.total_bytes, members, last
    )


class FetchedWeights(NamedTuple):
    """Fetched weights of one swarm. `swarm` is its name if this machine knows it, else the beginning of its id."""

    swarm: str
    folder: Path
    size_bytes: int
    unused_s: float


@command
def list_weights(home: Path = HOME, as_json: bool = JSON) -> None:
    """List the weights that this machine has fetched.

    Example: swarmnode models weights
    """
    found = _fetched(home)
    if as_json:
        print_json([{**each._asdict(), "folder": str(each.folder)} for each in found])
        return
    if not found:
        say("No weights have been fetched yet.")
        return
    from swarmnode.terminal.tables import new_table, show

    table = new_table("", ("swarm", "GB", "days unused", "folder"), numbers=("GB", "days unused"))
    for each in found:
        table.add_row(each.swarm, f"{each.size_bytes / 1e9:.2f}", f"{each.unused_s / 86_400:.0f}", str(each.folder))
    show(table)


@command
def prune(
    swarm: str = argument("", "Name in `models weights`; default: all.", metavar="[SWARM]"),
    unused: float = option(0.0, "Only weights unused for this long.", text="", metavar="30d", parse=parse_duration),
    home: Path = HOME,
    as_json: bool = JSON,
) -> None:
    """Remove fetched weights. Weights that a node is using stay.

    Example: swarmnode models prune --unused 30d
    """
    from swarmnode.cli.options.swarm import full_name
    from swarmnode.swarm.storage.chunk_folder import evict

    fetched = _fetched(home)
    if swarm:
        names = [each.swarm for each in fetched]
        none = "no weights have been fetched yet"
        swarm = full_name(swarm, names, f"no weights of {swarm!r} are here", none=none)
        fetched = [each for each in fetched if each.swarm == swarm]
    doomed = [each for each in fetched if each.unused_s >= unused]
    freed_bytes = {each.swarm: evict(each.folder) for each in doomed}
    if as_json:
        print_json({"freed_bytes": freed_bytes})
        return
    for name, size_bytes in freed_bytes.items():
        say(f"{name}: {size_bytes / 1e9:.2f} GB freed" if size_bytes else f"{name}: in use, kept")
    if not doomed:
        say("Nothing to remove.")


def _fetched(home: Path) -> list[FetchedWeights]:
    """Return all fetched weights, the largest first."""
    from swarmnode.swarm.storage.chunk_folder import FOLDER, folder_name, last_used, used_bytes
    from swarmnode.swarm.storage.swarmfile import load_all_named

    names = {folder_name(swarm.id): name for name, swarm in load_all_named(home).items()}
    root = home / FOLDER
    folders = [path for path in root.iterdir() if path.is_dir()] if root.is_dir() else []
    found = [
        FetchedWeights(names.get(path.name, path.name), path, used_bytes(path), max(0.0, time.time() - last_used(path)))
        for path in folders
    ]
    return sorted(found, key=lambda each: -each.size_bytes)
