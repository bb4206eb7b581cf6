"""The revocation list: whom the owner admits no longer. Signed, numbered, complete: a newer one replaces an older one."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import msgspec

from swarmnode.codec.decoding import DECODE_ERRORS
from swarmnode.errors import ErrorCode, ProtocolError, UsageError
from swarmnode.net.interfaces import PeerId
from swarmnode.swarm.grant import INVITE_ID_BYTES, SWARM_ID_BYTES
from swarmnode.swarm.signing_key import SigningKey, is_signed

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


class _Signed(msgspec.Struct, array_like=True, frozen=True):
    body: bytes
    signature: bytes


_list_decoder = msgspec.msgpack.Decoder(RevocationList)
_signed_decoder = msgspec.msgpack.Decoder(_Signed)


def nobody(swarm: bytes) -> RevocationList:
    """The list before anybody was revoked; it has number 0 and is never sent."""
    return RevocationList(VERSION, swarm, 0, 0)


def revoked_digest(peer: PeerId) -> bytes:
    """16 bytes that stand for a peer on a list."""
    return hashlib.sha256(peer.encode()).digest()[:PEER_DIGEST_BYTES]


def sign_list(revocations: RevocationList, owner: SigningKey) -> bytes:
    """The list as it is spread."""
    body = msgspec.msgpack.encode(revocations)
    raw = msgspec.msgpack.encode(_Signed(body, owner.sign(DOMAIN + body)))
    assert len(raw) <= MAX_LIST_BYTES, "the bounds on its entries see to that"
    return raw


def open_list(raw: bytes, swarm: bytes, owner: bytes) -> RevocationList:
    """The list in these bytes, if this owner signed it for this swarm. Raises ProtocolError."""
    if len(raw) > MAX_LIST_BYTES:
        raise ProtocolError(f"a revocation list of {len(raw)} bytes", code=ErrorCode.TOO_LARGE)
    try:
        signed = _signed_decoder.decode(raw)
        revocations = _list_decoder.decode(signed.body)
    except DECODE_ERRORS as error:
        raise ProtocolError(f"bad revocation list: {error}") from None
    broken = _broken_rule(revocations)
    if broken is not None:
        raise ProtocolError(f"bad revocation list: {broken}")
    if revocations.swarm != swarm:
        raise ProtocolError("a revocation list of another swarm", code=ErrorCode.WRONG_SWARM)
    if not is_signed(owner, DOMAIN + signed.body, signed.signature):
        raise ProtocolError("a revocation list that the owner did not sign", code=ErrorCode.REFUSED)
    return revocations


def _broken_rule(revocations: RevocationList) -> str | None:
    """The first rule that the list breaks, or None."""
    rules = {
        "version": revocations.version >= VERSION,
        "swarm": len(revocations.swarm) == SWARM_ID_BYTES,
        "number": 0 < revocations.number < 1 << 32,
        "time": 0 <= revocations.issued_at < 1 << 40,
        "peers": len(revocations.peers) <= MAX_PEERS
        and all(len(digest) == PEER_DIGEST_BYTES for digest in revocations.peers),
        "invites": len(revocations.invites) <= MAX_INVITES
        and all(len(invite) == INVITE_ID_BYTES for invite in revocations.invites),
    }
    return next((rule for rule, kept in rules.items() if not kept), None)
