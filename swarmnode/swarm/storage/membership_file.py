"""What a peer remembers of a membership between runs: its certificate, the newest revocation list, who used limited invites."""

from __future__ import annotations

import logging
from pathlib import Path

import msgspec

from swarmnode.errors import ProtocolError
from swarmnode.swarm.records.membership import Membership
from swarmnode.swarm.storage.kept_file import read_kept, try_to_keep

log = logging.getLogger(__name__)

MAX_FILE_BYTES = 1 << 22


class _Content(msgspec.Struct):
    """JSON; bytes are base64."""

    certificate: bytes = b""
    revocations: bytes = b""
    uses: tuple[bytes, ...] = ()  # certificates


class MembershipFile:
    """One file for each swarm and peer. A damaged one is an empty one: peers bring the list again."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._content = read_kept(path, _Content, max_bytes=MAX_FILE_BYTES) or _Content()

    def __repr__(self) -> str:
        return f"<MembershipFile {self.path.name}>"

    @property
    def certificate(self) -> bytes:
        """The one of the last run, empty where there is none: who comes again is no new user of its invite."""
        return self._content.certificate

    def load(self, membership: Membership, now: float) -> None:
        """Let the membership know what is in the file. What the owner did not sign is passed over."""
        try:
            if self._content.revocations:
                membership.take_list(self._content.revocations)
            for certificate in self._content.uses:
                membership.note_use(certificate, now)
        except ProtocolError as error:
            log.warning("%s cannot be used: %s", self.path, error)

    def save(self, membership: Membership) -> None:
        """Write what is new. A full disk costs only what is remembered between runs."""
        uses = tuple(use.member.certificate for use in membership.uses)
        content = _Content(membership.certificate, membership.revocations_bytes, uses)
        if content != self._content and try_to_keep(self.path, content, "what is known of members is"):
            self._content = content
