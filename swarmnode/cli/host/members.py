"""`swarmnode members`, `invite` and `revoke`: who belongs to a swarm, and who shall."""

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
SOON_S = 48 * 3600.0  # an end that is nearer is told to the minute
ROLES = ("volunteer", "client", "trainer", "bootstrap")


@command
def revoke(
    *,
    swarm: str = SWARM_FILE,
    who: str = argument(
        ..., "A peer's id, its end or its name, or an invite or the beginning of its id.", metavar="PEER|INVITE"
    ),
    owner: OwnerOptions,
    home: Path = HOME,
    as_json: bool = JSON,
    logs: Verbosity,
) -> None:
    """End a membership: within a minute nobody speaks with the peer any more, and its links are cut, though you go offline.

    A peer that is revoked may come back as another one while its invite has uses left: revoke the invite too.

    Example: swarmnode revoke friends.swarm 5TqWZRpY
    """
    logs.begin()
    from swarmnode.client.owner_client import OwnerClient, end_membership, find_member
    from swarmnode.errors import NetworkDown
    from swarmnode.membership.owner import find_invite
    from swarmnode.swarm.storage.issued_invites import issued_invites_path, open_issued_invites
    from swarmnode.swarm.storage.swarmfile import load_swarm

    file = swarm_file(swarm)
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
            f"Revoked {peer or 'invite ' + (invite or b'').hex()}: {counted(told, 'peer')} heard it, and others will from them."
        )
    else:
        say(f"Revoked, and kept in {book.path}; nobody is online. It spreads when a node of yours runs with {swarm}.")


@dataclass(frozen=True)
class InviteOptions:
    """Options of an invite. Each but `role` is the field of InviteTerms of its name."""

    peer: str = option("", "For this peer alone; `swarmnode id` prints it there.", metavar="ID")
    role: str = option("volunteer", "What the member may do: lend, ask, train, be a bootstrap peer.", choices=ROLES)
    life_s: float | None = option(
        "365d", "When the memberships by it end: 12h, 7d, 4w, or never.", "--expires", metavar="7d", parse=parse_life
    )
    uses: int = option(0, "How many peers may use it; default: any number.", metavar="N")
    group: str = option(
        "", "What you vouch for: a region or a club, to which clients may restrict routes.", metavar="NAME"
    )
    note: str = option("", "For your own book; not in the invite.")


@command
def invite(
    *,
    swarm: str = SWARM_FILE,
    terms: InviteOptions,
    qr: bool = option(False, "Show it as a QR code, too."),
    owner: OwnerOptions,
    as_json: bool = JSON,
) -> None:
    """Print an invite to a private swarm. Who has it joins with `swarmnode run INVITE`, while you may be offline.

    Example: swarmnode invite friends.swarm --role volunteer --uses 3 --expires 30d
    """
    from swarmnode.membership.owner import InviteTerms, issue_invite
    from swarmnode.swarm.records.certificate import Role
    from swarmnode.swarm.storage.issued_invites import issued_invites_path, open_issued_invites
    from swarmnode.swarm.storage.swarmfile import load_swarm

    granted = of_same_names(InviteTerms, terms, role=Role[terms.role.upper()])
    file = swarm_file(swarm)
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
    """The invite as a QR code of half blocks. Raises UsageError where it is too long for one."""
    from swarmnode.errors import UsageError
    from swarmnode.membership.owner import InviteQr

    try:
        return InviteQr(line).terminal()
    except ValueError:
        raise UsageError(f"an invite of {len(line)} characters fits into no QR code: hand out the line above") from None


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
