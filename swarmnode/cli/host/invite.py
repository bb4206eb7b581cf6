"""`swarmnode invite`: a line of text that makes somebody a member."""

from __future__ import annotations

from dataclasses import dataclass

from swarmnode.cli.options.option import of_same_names, option
from swarmnode.cli.options.owner import OwnerOptions
from swarmnode.cli.options.swarm import SWARM_FILE, swarm_file
from swarmnode.cli.terminal.console import JSON, command, print_json, say
from swarmnode.cli.terminal.durations import parse_life

ROLES = ("volunteer", "client", "trainer", "bootstrap")


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
    from swarmnode.roles.membership.owner import InviteTerms, issue_invite
    from swarmnode.swarm.records.grant import Role
    from swarmnode.swarm.storage.issued_invites import issued_invites_path, open_issued_invites
    from swarmnode.swarm.storage.swarmfile import load_swarm

    granted = of_same_names(InviteTerms, terms, role=Role[terms.role.upper()])
    file = swarm_file(swarm)
    loaded = load_swarm(file)
    book = open_issued_invites(issued_invites_path(file))
    line, guest = issue_invite(loaded, owner.key_of(file), granted, book)
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
