"""Command `swarmnode adapter`: bring adapters into a swarm, list them, and block those of others on this machine."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swarmnode.cli.options.swarm import SWARM, THIS_SWARM, ask, complete_adapters, open_swarm
from swarmnode.counting import format_bytes
from swarmnode.terminal.console import HOME, JSON, Verbosity, command, fail, print_json, print_result, say
from swarmnode.terminal.formatting import parse_duration
from swarmnode.terminal.option import argument, option

if TYPE_CHECKING:
    from swarmnode.client.swarm_client import SwarmClient

DAY_S = 86_400.0
ID_CHARS = 64
ID = argument(..., "Id of the adapter, as `adapter list --json` prints it.", metavar="ID")
SHARES = ("private", "members", "all")


@command
def add(
    *,
    swarm: str = THIS_SWARM,
    folder: Path = argument(..., "Folder that peft saved.", typed=Path, metavar="DIR"),
    name: str = option("", "Name of the adapter; default: that of the folder."),
    share: str = option(
        "private",
        "Peers that may use it: you alone; every member of the swarm; or also the users of their gateways.",
        choices=SHARES,
    ),
    expires: float = option(30 * DAY_S, "It ends after this time, at most 90d.", text="30d", parse=parse_duration),
    home: Path = HOME,
    as_json: bool = JSON,
    logs: Verbosity,
) -> None:
    """Bring an adapter into a swarm that runs already.

    It is checked against the model and copied into your home folder. Machines fetch it from yours when a text asks for it, and drop
    it a day after its last use. They can read its matrices.

    Example: swarmnode adapter add friends ./verse-lora --share members
    """
    logs.begin()
    from swarmnode.swarm.records.adapter_record import MAX_LIFE_S, Share

    if not 0 < expires <= MAX_LIFE_S:
        fail("--expires takes a time of at most 90d", 2)
    chosen = name or folder.resolve().name

    async def bring(client: SwarmClient) -> dict[str, Any]:
        own = await client.adapters.add(folder, name=chosen, share=Share[share.upper()], life_s=expires)
        return {"name": chosen, "id": await client.adapters.id_of(own), "share": share, "rank": own.terms.rank}

    added = ask(swarm, home, bring)
    if as_json:
        print_json(added)
        return
    say(
        f"Added {chosen} ({added['id'][:8]}), of rank {added['rank']}. Use it: swarmnode generate … --adapter {shlex.quote(chosen)}"
    )
    if share != "private":
        say("Others find it while a node of yours runs: swarmnode run")


@command
def list_adapters(*, swarm: str = SWARM, home: Path = HOME, as_json: bool = JSON, logs: Verbosity) -> None:
    """List the adapters that you can use in a swarm.

    Example: swarmnode adapter list friends
    """
    logs.begin()

    adapters = ask(swarm, home, lambda client: client.adapters.listing())
    if as_json:
        print_json(adapters)
        return
    if not adapters:
        say("The swarm has no adapters. Bring one: swarmnode adapter add SWARM DIR")
        return
    from swarmnode.cli.host.members import end
    from swarmnode.terminal.tables import new_table, show

    table = new_table("", ("name", "of", "share", "rank", "size", "until", "id"))
    for one in adapters:
        rank, size = str(one["rank"] or ""), format_bytes(one["bytes"])
        table.add_row(one["name"], one["of"][-8:], one["share"], rank, size, end(one["expires_at"]), one["id"][:8])
    show(table)


@command
def remove(
    *,
    swarm: str = THIS_SWARM,
    name: str = argument(..., "Name of an adapter that you added.", metavar="NAME", autocompletion=complete_adapters),
    home: Path = HOME,
    as_json: bool = JSON,
) -> None:
    """Remove an adapter that you added. Machines that hold its files drop them within a day.

    Example: swarmnode adapter remove friends verse
    """
    from swarmnode.swarm.storage.own_adapters import OwnAdapters

    OwnAdapters(home, open_swarm(swarm, home).id).remove(name)
    told = f"Removed {name}. The list of the swarm drops it within ten minutes, machines that hold it within a day."
    print_result({"removed": name}, told, as_json=as_json)


@command
def block(*, adapter: str = ID, home: Path = HOME, as_json: bool = JSON) -> None:
    """Refuse an adapter on this machine's nodes.

    Its files there are deleted. Running nodes do so within ten seconds.

    To delete the files alone, unblock it afterwards.

    Example: swarmnode adapter block 3f0c…
    """
    from swarmnode.swarm.storage.own_adapters import BlockedAdapters

    BlockedAdapters(home).block(_checked_id(adapter))
    print_result({"blocked": adapter}, f"Blocked {adapter[:8]} on this machine.", as_json=as_json)


@command
def unblock(*, adapter: str = ID, home: Path = HOME, as_json: bool = JSON) -> None:
    """Serve a blocked adapter again on this machine.

    Example: swarmnode adapter unblock 3f0c…
    """
    from swarmnode.swarm.storage.own_adapters import BlockedAdapters

    BlockedAdapters(home).unblock(_checked_id(adapter))
    print_result({"unblocked": adapter}, f"Unblocked {adapter[:8]} on this machine.", as_json=as_json)


def _checked_id(adapter: str) -> str:
    """Return the id in lower case. Ends the command if it is none."""
    lower = adapter.lower()
    if len(lower) != ID_CHARS or set(lower) - set("0123456789abcdef"):
        fail(f"an adapter's id has {ID_CHARS} digits and letters a to f; `swarmnode adapter list --json` prints it", 2)
    return lower
