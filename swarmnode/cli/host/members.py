"""Commands `swarmnode members`, `invite` and `revoke`: show, admit and exclude members of a swarm."""

from __future__ import annotations

import asyncio
import datetime
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swarmnode.cli.options.option import argument, of_same_names, option
from swarmnode.cli.options.owner import OwnerOptions
from swarmnode.cli.options.swarm import SWARM, SWARM_FILE, open_swarm, swarm_file
from swarmnode.cli.terminal.console import HOME, JSON, Verbosity, command, print_json, run_async, say
from swarmnode.cli.terminal.formatting import parse_life
from swarmnode.counting import counted

if TYPE_CHECKING:
    from rich.table import Table

SHOWN_CHARS = 8  # of an invite's id
SOON_S = 48 * 3600.0  # a nearer end is shown to the minute
ROLES = ("volunteer", "client", "trainer", "bootstrap")


@command
def revoke(
    *,
    swarm: str = SWARM_FILE,
    who: str = argument(
        ..., "A machine's id, the id's end or its name; or an invite or its id's beginning.", metavar="PEER|INVITE"
    ),
    owner: OwnerOptions,
    home: Path = HOME,
    as_json: bool = JSON,
    logs: Verbosity,
) -> None:
    """End a membership. Within a minute, all members cut their links to the machine and refuse it, even if you go offline.

    A revoked machine can come back under another id while its invite has uses left: revoke the invite too.

    Example: swarmnode revoke friends.swarm 5TqWZRpY
    """
    logs.begin()
    from swarmnode.client.owner_client import OwnerClient, end_membership, find_member
    from swarmnode.errors import NetworkDown
    from swarmnode.membership.owner import find_invite
    from swarmnode.swarm.storage.issued_invites import issued_invites_path, open_issued_invites
    from swarmnode.swarm.storage.swarmfile import load_swarm

    file = swarm_file(swarm, home)
    loaded = load_swarm(file)
    book = open_issued_invites(issued_invites_path(file))
    key = owner.key_of(file)
    invite = find_invite(who, loaded, book)

    async def carry_out(_stop: asyncio.Event) -> tuple[str | None, int]:
        try:
            owner_client = await OwnerClient.join(loaded, home)
        except NetworkDown:
            owner_client = None
        try:
            peer = None if invite else find_member(who, loaded, book, owner_client)
            return peer, await end_membership(loaded, key, book, owner_client, peer=peer, invite=invite)
        finally:
            if owner_client is not None:
                await owner_client.close()

    peer, told = run_async(carry_out)
    if as_json:
        print_json({"peer": peer, "invite": invite.hex() if invite else None, "told": told})
    elif told:
        say(
            f"Revoked {peer or 'invite ' + (invite or b'').hex()}: {counted(told, 'machine')} got the news and will pass it on."
        )
    else:
        say(f"Revoked and saved in {book.path}; no machine is online. To spread it, run a node with {swarm}.")


@dataclass(frozen=True)
class InviteOptions:
    """Options of an invite. Each except `role` is the field of InviteTerms with the same name."""

    peer: str = option("", "Only for this machine; run `swarmnode id` there to get its id.", metavar="ID")
    role: str = option("volunteer", "What the member may do: lend, use, train, or be a bootstrap peer.", choices=ROLES)
    life_s: float | None = option(
        "365d", "When memberships by the invite end: 12h, 7d, 4w or never.", "--expires", metavar="7d", parse=parse_life
    )
    uses: int = option(0, "How many machines can use the invite; default: any number.", metavar="N")
    group: str = option(
        "", "Group that you vouch for, as a region or a club; clients can restrict routes to it.", metavar="NAME"
    )
    note: str = option("", "Note for your own list; not in the invite.")


@command
def invite(
    *,
    swarm: str = SWARM_FILE,
    terms: InviteOptions,
    qr: bool = option(False, "Also show the invite as a QR code."),
    owner: OwnerOptions,
    home: Path = HOME,
    as_json: bool = JSON,
) -> None:
    """Print an invite to a private swarm. Anyone with the invite can join, by `swarmnode run INVITE`, even while you are offline.

    Example: swarmnode invite friends.swarm --role volunteer --uses 3 --expires 30d
    """
    from swarmnode.membership.owner import InviteTerms, issue_invite
    from swarmnode.swarm.records.certificate import Role
    from swarmnode.swarm.storage.issued_invites import issued_invites_path, open_issued_invites
    from swarmnode.swarm.storage.swarmfile import load_swarm

    granted = of_same_names(InviteTerms, terms, role=Role[terms.role.upper()])
    file = swarm_file(swarm, home)
    loaded = load_swarm(file)
    book = open_issued_invites(issued_invites_path(file))
    line, guest = issue_invite(loaded, owner.key_of(file), granted, book)
    if as_json:
        print_json({"invite": line, **guest.told(), "uses": guest.uses, "group": guest.group or None})
        return
    say(line)
    if qr:
        say(qr_code(line))


def qr_code(line: str) -> str:
    """Return the invite as a QR code of half blocks. Raises UsageError if the line is too long for a QR code."""
    from swarmnode.errors import UsageError
    from swarmnode.membership.owner import InviteQr

    try:
        return InviteQr(line).terminal()
    except ValueError:
        raise UsageError(
            f"an invite of {len(line)} characters is too long for a QR code: hand out the line above"
        ) from None


@command
def members(*, swarm: str = SWARM, home: Path = HOME, as_json: bool = JSON, logs: Verbosity) -> None:
    """Show the members of a swarm.

    With the owner's .swarm file, it also shows the issued invites. Members who only use the swarm appear if they joined by an
    invite with --uses; the others are recorded nowhere.

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
    """Return a table with one row per member."""
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
    """Return a table with one row per invite that was issued."""
    from swarmnode.cli.terminal.tables import new_table

    table = new_table("issued invites", ("id", "role", "used", "for", "group", "until", "note"))
    for invite in invites:
        until = "revoked" if invite["revoked"] else end(invite["expires_at"])
        used = f"{invite['used']} of {invite['uses']}" if invite["uses"] else str(invite["used"])
        whom = (invite["peer"] or "anyone")[-8:]
        table.add_row(invite["id"][:SHOWN_CHARS], invite["role"], used, whom, invite["group"], until, invite["note"])
    return table


def end(unix_s: int | None) -> str:
    """Return a time in the reader's own time zone, as text: "for ever" for None, "expired" if it has passed."""
    if unix_s is None:
        return "for ever"
    left_s = unix_s - time.time()
    if left_s <= 0:
        return "expired"
    return datetime.datetime.fromtimestamp(unix_s).strftime("%Y-%m-%d %H:%M" if left_s < SOON_S else "%Y-%m-%d")
