"""`NAME.guests`, the owner's book: the invites that were given out, without their secrets, and whom the owner revoked.

It is a help: without it, invites that nobody has used yet cannot be listed, nor revoked by a part of their id.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from swarmnode.files import write_private
from swarmnode.net.interfaces import PeerId
from swarmnode.swarm.records.certificate import Grant
from swarmnode.swarm.storage.user_file import VersionedFile, parse_user_file, read_user_file

SUFFIX = ".guests"
FORMAT = 1
MAX_FILE_BYTES = 1 << 24
WHAT = "a guestbook"


class IssuedInvite(msgspec.Struct, frozen=True):
    """One invite. Times are unix seconds; `expires_at` 0 is never, `uses` 0 any number."""

    invite: str  # its id, in hex
    role: str
    issued_at: int
    expires_at: int
    uses: int
    peer: PeerId
    group: str
    note: str = ""

    def told(self) -> dict[str, Any]:
        """Return its terms as people and scripts read them: None is for ever, for any number of peers, and for any peer."""
        return {
            "id": self.invite,
            "role": self.role,
            "expires_at": self.expires_at or None,
            "uses": self.uses or None,
            "peer": self.peer or None,
            "group": self.group,
        }


class _File(VersionedFile):
    guests: list[IssuedInvite] = msgspec.field(default_factory=list)
    revocations: bytes = b""


@dataclass
class IssuedInvites:
    """Read by `open_issued_invites`, written by `save`."""

    path: Path
    guests: list[IssuedInvite] = field(default_factory=list)
    revocations: bytes = b""  # the newest list, as it was signed; empty before the first

    def __repr__(self) -> str:
        return f"<IssuedInvites {self.path.name} of {len(self.guests)} invites>"

    def enter(self, grant: Grant, note: str = "") -> IssuedInvite:
        """Note an invite that is given out."""
        role = grant.allows.name.lower()
        times = (grant.issued_at, grant.expires_at)
        guest = IssuedInvite(grant.invite_id.hex(), role, *times, grant.uses, grant.peer, grant.group, note)
        self.guests.append(guest)
        return guest

    def save(self) -> None:
        """Write it, readable by the owner alone. Raises LocalError."""
        write_private(self.path, msgspec.json.encode(_File(FORMAT, self.guests, self.revocations)))


def issued_invites_path(swarm_file: Path) -> Path:
    """Where the book of a .swarm file lies: beside it."""
    return swarm_file.with_suffix(SUFFIX)


def open_issued_invites(path: Path) -> IssuedInvites:
    """The book in a file; an empty one where there is none. Raises UsageError where it is no book."""
    data = read_user_file(path, max_bytes=MAX_FILE_BYTES, what=WHAT)
    if data is None:
        return IssuedInvites(path)
    content = parse_user_file(data, _File, source=path, what=WHAT)
    return IssuedInvites(path, content.guests, content.revocations)
