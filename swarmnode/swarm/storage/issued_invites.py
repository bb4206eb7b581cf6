"""`NAME.guests`, the owner's list of issued invites, without their secrets, and of revocations.

It is only a help: without it, unused invites can neither be listed nor be revoked by a part of their id.
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
    """An issued invite. Times are unix seconds; `expires_at` 0 is never, `uses` 0 any number."""

    invite: str  # id, in hex
    role: str
    issued_at: int
    expires_at: int
    uses: int
    peer: PeerId
    group: str
    note: str = ""

    def told(self) -> dict[str, Any]:
        """Return its terms for people and scripts. None means no expiry, any number of uses, any peer."""
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
    """Issued invites and revocations of one swarm. Read by `open_issued_invites`, written by `save`."""

    path: Path
    guests: list[IssuedInvite] = field(default_factory=list)
    revocations: bytes = b""  # newest revocation list as it was signed; empty before the first

    def __repr__(self) -> str:
        return f"<IssuedInvites {self.path.name} of {len(self.guests)} invites>"

    def enter(self, grant: Grant, note: str = "") -> IssuedInvite:
        """Add a new invite to the list, and return its entry."""
        role = grant.allows.name.lower()
        times = (grant.issued_at, grant.expires_at)
        guest = IssuedInvite(grant.invite_id.hex(), role, *times, grant.uses, grant.peer, grant.group, note)
        self.guests.append(guest)
        return guest

    def save(self) -> None:
        """Write the file, readable by its owner alone. Raises LocalError if it cannot be written."""
        write_private(self.path, msgspec.json.encode(_File(FORMAT, self.guests, self.revocations)))


def issued_invites_path(swarm_file: Path) -> Path:
    """Return the path of the list that belongs to a .swarm file: beside it."""
    return swarm_file.with_suffix(SUFFIX)


def open_issued_invites(path: Path) -> IssuedInvites:
    """Read the list in a file; it is empty if there is no file. Raises UsageError if the file cannot be read or is not such a
    list."""
    data = read_user_file(path, max_bytes=MAX_FILE_BYTES, what=WHAT)
    if data is None:
        return IssuedInvites(path)
    content = parse_user_file(data, _File, source=path, what=WHAT)
    return IssuedInvites(path, content.guests, content.revocations)
