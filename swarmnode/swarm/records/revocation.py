"""Revocation list: the peers, homes and invites that the owner no longer admits. Signed, numbered, complete: a newer list
replaces an older."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Annotated

import msgspec
from msgspec import Meta

from swarmnode.errors import UsageError
from swarmnode.net.interfaces import PeerId
from swarmnode.swarm.records.certificate import INVITE_ID_BYTES, SwarmId, UnixTime
from swarmnode.swarm.records.signed import OwnerSigned, Signable

VERSION = 1
DOMAIN = b"swarmnode revocations 1\n"
PEER_DIGEST_BYTES = (
    16  # of the SHA-256 of the peer's id or the home's key: long enough that no other can be found for it
)
MAX_PEERS = 160
MAX_INVITES = 96
MAX_LIST_BYTES = 4096  # the DHT takes no longer values

RevokedDigest = Annotated[bytes, Meta(min_length=PEER_DIGEST_BYTES, max_length=PEER_DIGEST_BYTES)]
InviteId = Annotated[bytes, Meta(min_length=INVITE_ID_BYTES, max_length=INVITE_ID_BYTES)]


class RevocationList(Signable, frozen=True):
    """Revoked peers, homes and invites of one swarm; homes stand among the peers. Newer versions append fields."""

    version: Annotated[int, Meta(ge=VERSION)]
    swarm: SwarmId
    number: Annotated[int, Meta(gt=0, lt=1 << 32)]  # grows with every list of this swarm
    issued_at: UnixTime  # in seconds
    peers: Annotated[tuple[RevokedDigest, ...], Meta(max_length=MAX_PEERS)] = ()
    invites: Annotated[tuple[InviteId, ...], Meta(max_length=MAX_INVITES)] = ()

    def __repr__(self) -> str:
        return f"<RevocationList #{self.number}, {len(self.peers)} peers, {len(self.invites)} invites>"

    def covers(self, peer: PeerId, invite: bytes = b"", home: bytes = b"") -> bool:
        """Return whether a peer is on the list, by its own id, its invite or its home's public key; these may be empty."""
        return (
            revoked_digest(peer) in self.peers
            or invite in self.invites
            or (bool(home) and home_digest(home) in self.peers)
        )

    def extended(
        self,
        now: float,
        *,
        peers: Iterable[PeerId] = (),
        invites: Iterable[bytes] = (),
        homes: Iterable[bytes] = (),
    ) -> RevocationList:
        """Return the next list, with these peers, invites and homes (public keys) added. Raises UsageError if it would be too
        long."""
        digests = dict.fromkeys([*self.peers, *map(revoked_digest, peers), *map(home_digest, homes)])
        ids = dict.fromkeys([*self.invites, *invites])
        if len(digests) > MAX_PEERS or len(ids) > MAX_INVITES:
            raise UsageError(
                f"a revocation list holds {MAX_PEERS} peers and {MAX_INVITES} invites at most, and this one is full: "
                "found a new swarm and invite the members who shall stay"
            )
        return msgspec.structs.replace(
            self, number=self.number + 1, issued_at=int(now), peers=tuple(digests), invites=tuple(ids)
        )


def nobody(swarm: bytes) -> RevocationList:
    """Return the list before the first revocation. It has number 0 and is never sent."""
    return RevocationList(VERSION, swarm, 0, 0)


def revoked_digest(peer: PeerId) -> bytes:
    """Return 16 bytes that stand for a peer on a list."""
    return hashlib.sha256(peer.encode()).digest()[:PEER_DIGEST_BYTES]


def home_digest(home: bytes) -> bytes:
    """Return 16 bytes that stand for a home with this public key on a list."""
    return hashlib.sha256(home).digest()[:PEER_DIGEST_BYTES]


_LISTS = OwnerSigned("revocation list", RevocationList, domain=DOMAIN, max_bytes=MAX_LIST_BYTES)
sign_list, open_list = _LISTS.sign, _LISTS.open
