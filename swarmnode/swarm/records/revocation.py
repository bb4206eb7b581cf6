"""The revocation list: whom the owner admits no longer. Signed, numbered, complete: a newer one replaces an older one."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import msgspec

from swarmnode.errors import UsageError
from swarmnode.net.interfaces import PeerId
from swarmnode.swarm.records.grant import INVITE_ID_BYTES, SWARM_ID_BYTES
from swarmnode.swarm.records.signed import OwnerSigned
from swarmnode.swarm.records.signing_key import SigningKey

VERSION = 1
DOMAIN = b"swarmnode revocations 1\n"
PEER_DIGEST_BYTES = 16  # of the SHA-256 of the peer's id: nobody can make another id that is taken for it
MAX_PEERS = 160
MAX_INVITES = 96
MAX_LIST_BYTES = 4096  # what the table takes as one value


class RevocationList(msgspec.Struct, array_like=True, frozen=True):
    """Newer versions append fields."""

    version: int
    swarm: bytes
    number: int  # grows with every list of this swarm
    issued_at: int  # unix time, seconds
    peers: tuple[bytes, ...] = ()  # digests
    invites: tuple[bytes, ...] = ()  # ids

    def __repr__(self) -> str:
        return f"<RevocationList #{self.number}, {len(self.peers)} peers, {len(self.invites)} invites>"

    def covers(self, peer: PeerId, invite: bytes = b"") -> bool:
        """Whether a peer, or the invite that it came by, is on the list."""
        return invite in self.invites or revoked_digest(peer) in self.peers

    def extended(self, now: float, *, peers: Iterable[PeerId] = (), invites: Iterable[bytes] = ()) -> RevocationList:
        """The next list, with these on it too. Raises UsageError where it would be too long."""
        digests = dict.fromkeys([*self.peers, *map(revoked_digest, peers)])
        ids = dict.fromkeys([*self.invites, *invites])
        if len(digests) > MAX_PEERS or len(ids) > MAX_INVITES:
            raise UsageError(
                f"a revocation list holds {MAX_PEERS} peers and {MAX_INVITES} invites at most, and this one is full: "
                "found the swarm anew and invite those who shall stay"
            )
        return msgspec.structs.replace(
            self, number=self.number + 1, issued_at=int(now), peers=tuple(digests), invites=tuple(ids)
        )


def nobody(swarm: bytes) -> RevocationList:
    """The list before anybody was revoked; it has number 0 and is never sent."""
    return RevocationList(VERSION, swarm, 0, 0)


def revoked_digest(peer: PeerId) -> bytes:
    """16 bytes that stand for a peer on a list."""
    return hashlib.sha256(peer.encode()).digest()[:PEER_DIGEST_BYTES]


def sign_list(revocations: RevocationList, owner: SigningKey) -> bytes:
    """The list as it is spread. Raises ValueError where it breaks a rule of its own, which is a bug of the caller."""
    return _LISTS.sign(revocations, owner)


def open_list(raw: bytes, swarm: bytes, owner: bytes) -> RevocationList:
    """The list in these bytes, if this owner signed it for this swarm. Raises ProtocolError."""
    return _LISTS.open(raw, swarm, owner)


def _rules(revocations: RevocationList) -> dict[str, bool]:
    return {
        "version": revocations.version >= VERSION,
        "swarm": len(revocations.swarm) == SWARM_ID_BYTES,
        "number": 0 < revocations.number < 1 << 32,
        "time": 0 <= revocations.issued_at < 1 << 40,
        "peers": len(revocations.peers) <= MAX_PEERS
        and all(len(digest) == PEER_DIGEST_BYTES for digest in revocations.peers),
        "invites": len(revocations.invites) <= MAX_INVITES
        and all(len(invite) == INVITE_ID_BYTES for invite in revocations.invites),
    }


_LISTS = OwnerSigned("revocation list", RevocationList, domain=DOMAIN, max_bytes=MAX_LIST_BYTES, rules=_rules)
