"""`swarmnode invite`: a line of text that makes somebody a member."""

from __future__ import annotations

from pathlib import Path

import typer

from swarmnode.cli.options.owner import OWNER_KEY, PASSWORD_FILE, owner_key_of
from swarmnode.cli.options.swarm import SWARM_FILE, swarm_file
from swarmnode.cli.terminal.console import JSON, fail, print_json, reports_errors, say

DEFAULT_LIFE = "365d"
ROLES = ("volunteer", "client", "trainer", "bootstrap")


@reports_errors
def invite(
    swarm: str = SWARM_FILE,
    peer: str = typer.Option("", "--peer", metavar="ID", help="For this peer alone; `swarmnode id` prints it there."),
    role: str = typer.Option(
        "volunteer",
        "--role",
        metavar="|".join(ROLES),
        help="What the member may do: lend, ask, train, be a bootstrap peer.",
    ),
    expires: str = typer.Option(
        DEFAULT_LIFE, "--expires", metavar="7d", help="When the memberships by it end: 12h, 7d, 4w, or never."
    ),
    uses: int = typer.Option(0, "--uses", metavar="N", help="How many peers may use it; default: any number."),
    group: str = typer.Option(
        "",
        "--group",
        metavar="NAME",
        help="What you vouch for: a region or a club, to which clients may restrict routes.",
    ),
    note: str = typer.Option("", "--note", help="For your own book; not in the invite."),
    qr: bool = typer.Option(False, "--qr", help="Show it as a QR code, too."),
    owner_key: Path = OWNER_KEY,
    password_file: Path = PASSWORD_FILE,
    as_json: bool = JSON,
) -> None:
    """Print an invite to a private swarm. Who has it joins with `swarmnode run INVITE`, while you may be offline.

    Example: swarmnode invite friends.swarm --role volunteer --uses 3 --expires 30d
    """
    if role not in ROLES:
        fail(f"--role {role}: it is one of {', '.join(ROLES)}", 2)
    from swarmnode.cli.terminal.durations import parse_duration
    from swarmnode.roles.membership.owner import InviteTerms, issue_invite
    from swarmnode.swarm.records.grant import Role
    from swarmnode.swarm.storage.issued_invites import issued_invites_path, open_issued_invites
    from swarmnode.swarm.storage.swarmfile import load_swarm

    life_s = None if expires == "never" else parse_duration(expires)
    terms = InviteTerms(Role[role.upper()], life_s, uses, peer, group, note)
    file = swarm_file(swarm)
    loaded = load_swarm(file)
    book = open_issued_invites(issued_invites_path(file))
    line, guest = issue_invite(loaded, owner_key_of(file, owner_key, password_file), terms, book)
    if as_json:
        fields = {"id": guest.invite, "role": guest.role, "expires_at": guest.expires_at or None, "uses": guest.uses}
        print_json({"invite": line, **fields, "peer": guest.peer or None, "group": guest.group or None})
        return
    say(line)
    if qr:
        say(qr_code(line))


def qr_code(line: str) -> str:
    """The invite as a QR code of half blocks. Raises UsageError where it is too long for one."""
    from swarmnode.errors import UsageError
    from swarmnode.roles.membership.invite_qr import InviteQr

    try:
        return InviteQr(line).terminal()
    except ValueError:
        raise UsageError(f"an invite of {len(line)} characters fits into no QR code: hand out the line above") from None
