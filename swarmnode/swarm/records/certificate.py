"""The certificate: a grant of the owner's, and one peer's admission by it, signed with the invite's key.

It is worth something only to the peer that it names: libp2p has authenticated a peer's id before any certificate is read.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated

import msgspec
from msgspec import Meta

from swarmnode.codec.body import MAX_PROOF_BYTES
from swarmnode.codec.decoding import DECODE_ERRORS
from swarmnode.errors import ErrorCode, ProtocolError
from swarmnode.net.interfaces import PeerId
from swarmnode.swarm.records.announcement import MAX_CERTIFICATE_BYTES
from swarmnode.swarm.records.grant import MAX_GRANT_BYTES, MAX_PEER_CHARS, Role, UnixTime, open_grant
from swarmnode.swarm.records.signing_key import SigningKey, is_signed

DOMAIN = b"swarmnode admission 1\n"
MAX_SKEW_S = 60.0  # by which an admission may lie in the future
REMEMBERED = 4096

assert MAX_GRANT_BYTES < MAX_CERTIFICATE_BYTES <= MAX_PROOF_BYTES


class Certificate(msgspec.Struct, array_like=True, frozen=True):
    """`grant` as the owner signed it; `signature` of the invite's key over (swarm, peer, admitted_at)."""

    grant: bytes
    peer: Annotated[str, Meta(min_length=1, max_length=MAX_PEER_CHARS)]
    admitted_at: UnixTime  # in seconds
    signature: bytes


@dataclass(frozen=True)
class Member:
    """What a certificate says, once it has been checked. Times are unix seconds; `expires_at` 0 is never."""

    peer: PeerId
    role: Role
    invite: bytes  # id of the invite that it came by
    admitted_at: int
    expires_at: int
    uses: int  # how many peers may come by that invite; 0 is any number
    group: str
    certificate: bytes

    def __repr__(self) -> str:
        return f"<Member {self.peer[-8:]} {self.role.name} by {self.invite.hex()}>"

    def expired(self, now: float) -> bool:
        """Whether its time is over."""
        return 0 < self.expires_at <= now


_decoder = msgspec.msgpack.Decoder(Certificate)


def admit_peer(grant: bytes, invite: SigningKey, swarm: bytes, peer: PeerId, now: float) -> bytes:
    """The certificate of a peer that holds an invite: its grant and the invite's private key."""
    admitted_at = int(now)
    return msgspec.msgpack.encode(
        Certificate(grant, peer, admitted_at, invite.sign(_admission(swarm, peer, admitted_at)))
    )


@lru_cache(maxsize=REMEMBERED)
def open_certificate(raw: bytes, swarm: bytes, owner: bytes) -> Member:
    """Who a certificate admits to a swarm, its two signatures being right. Raises ProtocolError.

    Whether it has expired or was revoked is for the caller: this says what was signed, and so can be remembered.
    """
    if len(raw) > MAX_CERTIFICATE_BYTES:
        raise ProtocolError(f"a certificate of {len(raw)} bytes", code=ErrorCode.TOO_LARGE)
    try:
        certificate = _decoder.decode(raw)
    except DECODE_ERRORS as error:
        raise ProtocolError(f"bad certificate: {error}") from None
    grant = open_grant(certificate.grant, swarm, owner)
    peer, admitted_at = certificate.peer, certificate.admitted_at
    if grant.peer not in ("", peer):
        raise ProtocolError("an invite that is for another peer", code=ErrorCode.REFUSED, peer=peer)
    if not is_signed(grant.key, _admission(swarm, peer, admitted_at), certificate.signature):
        raise ProtocolError("an admission that the invite's key did not sign", code=ErrorCode.REFUSED, peer=peer)
    return Member(peer, grant.allows, grant.invite_id, admitted_at, grant.expires_at, grant.uses, grant.group, raw)


def _admission(swarm: bytes, peer: PeerId, admitted_at: int) -> bytes:
    return DOMAIN + msgspec.msgpack.encode((swarm, peer, admitted_at))
