"""Command `swarmnode models`: list the models that this machine can ask."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from swarmnode.counting import format_bytes
from swarmnode.terminal.console import HOME, JSON, command, print_json, say

if TYPE_CHECKING:
    from swarmnode.swarm.storage.swarmfile import Swarm

UNKNOWN = "not seen yet"
GONE = "its file {} is gone or damaged"


class KnownModel(NamedTuple):
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
    known = sorted(_known(home))
    if as_json:
        print_json([model._asdict() for model in known])
        return
    if not known:
        say("No swarm has a name here yet. To join one: swarmnode join; to start one: swarmnode host MODEL")
        return
    from swarmnode.codec.sampling import USUAL
    from swarmnode.swarm.records.manifest import GENERATE
    from swarmnode.terminal.tables import keep_whole, new_table, show

    table = new_table("", ("swarm", "model", "does", "layers", "size", "who"), numbers=("layers", "size"), plain=True)
    keep_whole(table, "swarm")
    for one in known:
        size = "" if one.size_bytes is None else format_bytes(one.size_bytes)
        used = "used last" if one.last else ""
        table.add_row(
            one.name, one.model, one.does, str(one.units or ""), size, ", ".join(filter(None, (one.members, used)))
        )
    show(table)
    if any(one.task == GENERATE for one in known):
        usual = ", ".join(f"{name.replace('_', '-')} {value}" for name, value in USUAL.items())
        say(f"A model that brings no sampling settings gets {usual} over HTTP, unless the request says otherwise.")


def _known(home: Path) -> Iterator[KnownModel]:
    from swarmnode.errors import UsageError
    from swarmnode.swarm.storage.remembered import ManifestCache
    from swarmnode.swarm.storage.swarmfile import JoinedSwarms, known_swarms, load_named

    joined, cache = JoinedSwarms(home), ManifestCache(home)
    for name in {*joined.names(), *known_swarms(home)}:
        last = name == joined.last
        try:
            swarm = load_named(name, home)
        except UsageError:  # the founder has moved the file
            yield KnownModel(name, GONE.format(joined.file_of(name)), "", "", "", None, None, "", last)
            continue
        assert swarm is not None
        raw = cache.get(swarm.id) if swarm.manifest is None else None
        yield _describe(name, swarm if raw is None else swarm.with_manifest(raw), last=last)


def _describe(name: str, swarm: Swarm, *, last: bool) -> KnownModel:
    from swarmnode.swarm.records.manifest import TRAIN

    members = "yours" if swarm.file is not None else "invited" if swarm.private else "everyone"
    if swarm.manifest is None:
        return KnownModel(name, UNKNOWN, "", "", "", None, None, members, last)
    model, manifest = swarm.manifest.model, swarm.manifest
    named = model.hub_id or model.family
    does = "trains" if manifest.mode == TRAIN else manifest.purpose
    return KnownModel(name, named, manifest.mode, manifest.task, does, model.units, manifest.total_bytes, members, last)
