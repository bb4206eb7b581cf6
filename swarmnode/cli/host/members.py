"""`swarmnode members`: who belongs to a swarm."""

from __future__ import annotations

import asyncio
import datetime
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swarmnode.cli.options.swarm import SWARM, open_swarm
from swarmnode.cli.terminal.console import HOME, JSON, Verbosity, command, print_json, run_async
from swarmnode.counting import counted

if TYPE_CHECKING:
    from rich.table import Table

SHOWN_CHARS = 8  # of an invite's id
SOON_S = 48 * 3600.0  # an end that is nearer is told to the minute


@command
def members(*, swarm: str = SWARM, home: Path = HOME, as_json: bool = JSON, logs: Verbosity) -> None:
    """Show the members of a swarm, and with the owner's .swarm file the invites that were given out.

    Members who only ask are seen when they came by an invite with --uses; nobody keeps a list of the others.

    Example: swarmnode members friends.swarm
    """
    logs.begin()
    from swarmnode.client.owner_client import OwnerClient
    from swarmnode.swarm.storage.issued_invites import issued_invites_path, open_issued_invites

    loaded = open_swarm(swarm, home)
    guests = open_issued_invites(issued_invites_path(loaded.file)).guests if loaded.file else []

    async def look(_stop: asyncio.Event) -> dict[str, Any]:
        owner_client = await OwnerClient.join(loaded, home)
        try:
            return owner_client.picture(guests)
        finally:
            await owner_client.close()

    picture = run_async(look)
    if as_json:
        print_json(picture)
        return
    from swarmnode.cli.terminal.tables import show

    show(members_table(picture), *([invites_table(picture["invites"])] if picture["invites"] else []))


def members_table(picture: dict[str, Any]) -> Table:
    """One row per member."""
    from swarmnode.cli.terminal.tables import new_table

    count = picture["revocations"]["peers"] + len(picture["revocations"]["invites"])
    seen = f"{counted(len(picture['members']), 'member')} seen, {counted(count, 'revocation')}"
    title = f"{picture['membership']} swarm {picture['name']}: {seen}"
    table = new_table(title, ("peer", "name", "state", "role", "group", "invite", "until"))
    for member in picture["members"]:
        texts = (member.get(field, "") for field in ("name", "state", "role", "group"))
        until = end(member["expires_at"]) if "role" in member else ""
        table.add_row(member["peer"][-8:], *texts, member.get("invite", "")[:SHOWN_CHARS], until)
    return table


def invites_table(invites: list[dict[str, Any]]) -> Table:
    """One row per invite that was given out."""
    from swarmnode.cli.terminal.tables import new_table

    table = new_table("invites given out", ("id", "role", "used", "for", "group", "until", "note"))
    for invite in invites:
        until = "revoked" if invite["revoked"] else end(invite["expires_at"])
        used = f"{invite['used']} of {invite['uses']}" if invite["uses"] else str(invite["used"])
        whom = (invite["peer"] or "anybody")[-8:]
        table.add_row(invite["id"][:SHOWN_CHARS], invite["role"], used, whom, invite["group"], until, invite["note"])
    return table


def end(unix_s: int | None) -> str:
    """When something ends, in the reader's own time."""
    if unix_s is None:
        return "for ever"
    left_s = unix_s - time.time()
    if left_s <= 0:
        return "expired"
    return datetime.datetime.fromtimestamp(unix_s).strftime("%Y-%m-%d %H:%M" if left_s < SOON_S else "%Y-%m-%d")
