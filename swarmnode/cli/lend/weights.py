"""Commands `swarmnode models weights` and `models prune`: list and remove the weights that this machine has fetched."""

from __future__ import annotations

import time
from pathlib import Path
from typing import NamedTuple

from swarmnode.terminal.console import HOME, JSON, command, fail, print_json, say
from swarmnode.terminal.formatting import parse_duration
from swarmnode.terminal.option import argument, option


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
    from swarmnode.swarm.storage.chunk_folder import evict
    from swarmnode.swarm.storage.swarmfile import find_name, name_advice

    fetched = _fetched(home)
    if swarm:
        names = [each.swarm for each in fetched]
        swarm = find_name(swarm, names) or fail(
            f"no weights of {swarm!r} are here; {name_advice(swarm, names, none='no weights have been fetched yet')}", 2
        )
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
    from swarmnode.swarm.storage.chunk_folder import FOLDER, last_used, used_bytes

    names, root = _names(home), home / FOLDER
    folders = [path for path in root.iterdir() if path.is_dir()] if root.is_dir() else []
    found = [
        FetchedWeights(names.get(path.name, path.name), path, used_bytes(path), max(0.0, time.time() - last_used(path)))
        for path in folders
    ]
    return sorted(found, key=lambda each: -each.size_bytes)


def _names(home: Path) -> dict[str, str]:
    """Return the names of the joined and founded swarms, by their folders' names."""
    from swarmnode.swarm.storage.chunk_folder import folder_name
    from swarmnode.swarm.storage.swarmfile import load_all_named

    return {folder_name(swarm.id): name for name, swarm in load_all_named(home).items()}
