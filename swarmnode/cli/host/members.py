"""Commands `swarmnode members`, `invite` and `revoke`: show, admit and exclude members of a swarm."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swarmnode.cli.options.founding import OwnerOptions
from swarmnode.cli.options.swarm import SWARM, SWARM_FILE, open_swarm, swarm_file
from swarmnode.counting import counted
from swarmnode.terminal.console import HOME, JSON, Verbosity, command, print_json, run_async, say
from swarmnode.terminal.formatting import parse_life
from swarmnode.terminal.option import argument, of_same_names, option

if TYPE_CHECKING:
    from rich.table import Table

    from swarmnode.client.owner_client import OwnerClient
    from swarmnode.swarm.storage.swarmfile import Swarm

SHOWN_CHARS = 8  # of an invite's id
SOON_S = 48 * 3600.0  # a nearer end is shown to the minute
ROLES = ("volunteer", "client", "bootstrap", "trainer")
USES = 1


@command
def revoke(
    *,
    swarm: str = SWARM_FILE,
    who: str = argument(
        ...,
        "A member: its name, the note of its invite, or a machine's id or the id's end; or an invite or its id's beginning.",
        metavar="MEMBER|INVITE",
    ),
    owner: OwnerOptions,
    home: Path = HOME,
    as_json: bool = JSON,
    logs: Verbosity,
) -> None:
    """End a membership, or an invite and all memberships by it.

    Within a minute, all members that are online cut their links to the machine and refuse it, even if you go offline. If the
    member's invite was for one machine, the invite ends too; if it has uses left for others, the person can come back by it.

    Example: swarmnode revoke friends.swarm Carol
    """
    logs.begin()
    from swarmnode.client.owner_client import OwnersView, Revocation, end_membership
    from swarmnode.membership.owner import find_invite
    from swarmnode.swarm.storage.owner_files import open_issued_invites
    from swarmnode.swarm.storage.swarmfile import load_swarm

    file = swarm_file(swarm, home)
    loaded = load_swarm(file)
    book = open_issued_invites(file)
    find_invite(who, loaded, book)  # an invite to another swarm is refused before anything is asked
    key = owner.key_of(file)

    async def carry_out(_stop: asyncio.Event) -> tuple[Revocation, int]:
        async with _owner_if_online(loaded, home) as client:
            ended = (await OwnersView.read(loaded, book, client)).find(who)
            return ended, await end_membership(loaded, key, book, client, ended)

    ended, told = run_async(carry_out)
    if as_json:
        print_json({**ended.to_json(), "told": told})
    elif told:
        say(f"Revoked {ended.name}: {counted(told, 'machine')} heard of it and will tell the others.")
    else:
        say(
            f"Revoked {ended.name} and saved it in {book.path}; no machine is online. To spread it, run a node with {swarm}."
        )


@contextlib.asynccontextmanager
async def _owner_if_online(swarm: Swarm, home: Path) -> AsyncIterator[OwnerClient | None]:
    """Join the swarm as its owner for as long as the context lasts; yields None if no machine answers."""
    from swarmnode.client.owner_client import OwnerClient
    from swarmnode.errors import NetworkDown

    try:
        client = await OwnerClient.join(swarm, home)
    except NetworkDown:
        yield None
        return
    try:
        yield client
    finally:
        await client.close()


@dataclass(frozen=True)
class InviteOptions:
    """Options of an invite. Each except `role` is the field of InviteTerms with the same name."""

    peer: str = option("", "Only for this machine; run `swarmnode doctor --id` there to get its id.", metavar="ID")
    role: str = option(
        "volunteer",
        "What the member may do: use the swarm, lend to it, or be a bootstrap peer; in a swarm that trains, also feed it.",
        choices=ROLES,
    )
    life_s: float | None = option(
        "365d", "When memberships by the invite end: 12h, 7d, 4w or never.", "--expires", metavar="7d", parse=parse_life
    )
    uses: int = option(USES, "How many machines can use the invite, for all they do; 0: any number.", metavar="N")
    group: str = option(
        "", "Group that you vouch for, as a region or a club; clients can restrict routes to it.", metavar="NAME"
    )
    note: str = option("", "Whom the invite is for: `members` shows it, `revoke` takes it; not in the invite.")


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
    """Print an invite to a private swarm. Anyone with the invite can join, by `swarmnode join`, even while you are offline.

    Example: swarmnode invite friends.swarm --note Carol --expires 30d
    """
    from swarmnode.membership.owner import InviteTerms, issue_invite
    from swarmnode.swarm.records.invite import Role
    from swarmnode.swarm.storage.owner_files import open_issued_invites
    from swarmnode.swarm.storage.swarmfile import load_swarm

    granted = of_same_names(InviteTerms, terms, role=Role[terms.role.upper()])
    file = swarm_file(swarm, home)
    loaded = load_swarm(file)
    book = open_issued_invites(file)
    line, guest = issue_invite(loaded, owner.key_of(file), granted, book)
    if as_json:
        print_json({"invite": line, **guest.terms(), "uses": guest.uses, "group": guest.group or None})
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

    With the owner's .swarm file, it shows every member that was ever seen, also those that are offline, and the issued invites. A
    member that only uses the swarm is seen if its invite has a number of uses, or while it speaks with a machine of yours.

    Example: swarmnode members friends.swarm
    """
    logs.begin()
    from swarmnode.client.owner_client import OwnersView
    from swarmnode.errors import NetworkDown
    from swarmnode.swarm.storage.owner_files import open_issued_invites

    loaded = open_swarm(swarm, home)
    book = open_issued_invites(loaded.file) if loaded.file else None

    async def read_view(_stop: asyncio.Event) -> OwnersView:
        async with _owner_if_online(loaded, home) as client:
            if client is None and (book is None or not book.guests):
                raise NetworkDown(f"no machine of {loaded.name} is online, and there is no book of its members here")
            return await OwnersView.read(loaded, book, client)

    view = run_async(read_view)
    picture = view.to_json()
    if as_json:
        print_json(picture)
        return
    from swarmnode.terminal.tables import show

    show(members_table(picture), *([invites_table(picture["invites"])] if picture["invites"] else []))


def members_table(picture: dict[str, Any]) -> Table:
    """Return a table with one row per member."""
    from rich.text import Text

    from swarmnode.terminal.tables import new_table, prevent_wrapping

    count = picture["revocations"]["peers"] + len(picture["revocations"]["invites"])
    title = f"{picture['membership']} swarm {picture['name']}: {counted(len(picture['members']), 'member')}"
    title += f", {counted(count, 'revocation')}" + ("" if picture["online"] else "; no machine is online")
    grouped = any(member["group"] for member in picture["members"])
    columns = ("member", "state", "role", *(["group"] if grouped else []), "ids", "invite", "until")
    table = new_table(title, columns, plain=True)
    prevent_wrapping(table, "role", "ids", "invite", "until")  # `revoke` takes an id
    for member in picture["members"]:
        label, name = member["label"], member["name"]
        online = member["state"] if member["state"] != "offline" else f"seen {ago(member['seen_at'])}"
        state = f"revoked, {online}" if member["revoked"] else online
        until = end(member["expires_at"]) if member["invite"] else ""
        ids = Text("\n".join(peer["peer"][-SHOWN_CHARS:] for peer in member["peers"]))
        group = [member["group"]] if grouped else []
        texts = (member["role"], *group, ids, member["invite"][:SHOWN_CHARS], until)
        table.add_row(f"{label} ({name})" if name not in ("", label) else label, state, *texts)
    return table


def invites_table(invites: list[dict[str, Any]]) -> Table:
    """Return a table with one row per invite that was issued."""
    from swarmnode.terminal.tables import new_table, prevent_wrapping

    columns = ("id", "role", "used", "for", "group", "until", "note")
    table = new_table("issued invites", columns, plain=True)
    prevent_wrapping(table, "id", "for", "until")
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


def ago(unix_s: int) -> str:
    """Return how long ago a time was, as text: "just now", "5 min ago", "3 h ago", or the day."""
    past_s = time.time() - unix_s
    if past_s < 60:
        return "just now"
    if past_s < 3600:
        return f"{past_s // 60:.0f} min ago"
    if past_s < SOON_S:
        return f"{past_s // 3600:.0f} h ago"
    return datetime.datetime.fromtimestamp(unix_s).strftime("%Y-%m-%d")
