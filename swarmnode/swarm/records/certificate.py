"""Certificate: a grant of the owner, and the admission of one peer by it, signed with the invite's key.

It is valid only for the peer that it names: libp2p has authenticated a peer's id before any certificate is read. The peer's home,
a folder of one person's machine, countersigns: the node and the programs of one home are one user of the invite.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache
from typing import Annotated

import msgspec
from msgspec import Meta

from swarmnode.codec.body import DECODE_ERRORS, MAX_PROOF_BYTES
from swarmnode.errors import ErrorCode, ProtocolError
from swarmnode.net.identity import SigningKey
from swarmnode.net.interfaces import PeerId
from swarmnode.swarm.records.announcement import MAX_CERTIFICATE_BYTES
from swarmnode.swarm.records.signed import PUBLIC_BYTES, SIGNATURE_BYTES, OwnerSigned, Signable, is_signed

DOMAIN = b"swarmnode admission 1\n"
HOME_DOMAIN = b"swarmnode home 1\n"
MAX_SKEW_S = 60.0  # an admission may lie this far in the future
REMEMBERED = 4096
VERSION = 1
GRANT_DOMAIN = b"swarmnode grant 1\n"
SWARM_ID_BYTES = 32
INVITE_ID_BYTES = 8
MAX_GRANT_BYTES = 320
MAX_USES = 1000
MAX_PEER_CHARS = 64
MAX_GROUP_CHARS = 24

SwarmId = Annotated[bytes, Meta(min_length=SWARM_ID_BYTES, max_length=SWARM_ID_BYTES)]
UnixTime = Annotated[int, Meta(ge=0, lt=1 << 40)]


class Role(IntEnum):
    """Role of a member; each role includes the roles before it. An unknown role counts as CLIENT."""

    CLIENT = 0  # may ask: generate, fetch weights
    BOOTSTRAP = 1  # may announce itself to newcomers, relay, give out manifest and weights
    VOLUNTEER = 2  # may compute: hold units, serve sessions, train units
    TRAINER = 3  # may lead a training and feed it data


class Grant(Signable, frozen=True):
    """Rights that an invite gives. Newer versions append fields."""

    version: Annotated[int, Meta(ge=VERSION)]
    swarm: SwarmId
    key: Annotated[bytes, Meta(min_length=PUBLIC_BYTES, max_length=PUBLIC_BYTES)]  # public key of the invite
    role: Annotated[int, Meta(ge=0, le=255)]
    issued_at: UnixTime  # in seconds
    expires_at: UnixTime  # end of every membership by it; 0 is never
    uses: Annotated[int, Meta(ge=0, le=MAX_USES)] = 0  # number of homes that may use it; 0 is any number
    peer: Annotated[str, Meta(max_length=MAX_PEER_CHARS)] = ""  # the only peer that may use it; empty is any peer
    group: str = ""  # the owner's word on its users: a region, a club

    @property
    def invite_id(self) -> bytes:
        """Id of the invite, 8 bytes, as lists of invites name it."""
        return hashlib.sha256(self.key).digest()[:INVITE_ID_BYTES]

    @property
    def allows(self) -> Role:
        """Role as this version understands it; CLIENT if it is unknown."""
        return Role(self.role) if self.role in Role._value2member_map_ else Role.CLIENT

    def rules(self) -> dict[str, bool]:
        return {
            "times": self.expires_at == 0 or self.issued_at < self.expires_at,
            "peer": self.peer.isascii(),
            "group": len(self.group.encode()) <= MAX_GROUP_CHARS and self.group.isprintable(),
        }


_GRANTS = OwnerSigned("grant", Grant, domain=GRANT_DOMAIN, max_bytes=MAX_GRANT_BYTES)
sign_grant, open_grant = _GRANTS.sign, _GRANTS.open


assert MAX_GRANT_BYTES < MAX_CERTIFICATE_BYTES <= MAX_PROOF_BYTES


class Certificate(msgspec.Struct, array_like=True, frozen=True):
    """Grant as the owner signed it, the signature of the invite's key over (swarm, peer, admitted_at), and that of the peer's home
    over (swarm, invite, peer, admitted_at). A certificate without `home` is of an older version."""

    grant: bytes
    peer: Annotated[str, Meta(min_length=1, max_length=MAX_PEER_CHARS)]
    admitted_at: UnixTime  # in seconds
    signature: bytes
    home: Annotated[bytes, Meta(max_length=PUBLIC_BYTES)] = b""  # public key of the peer's home
    home_signature: Annotated[bytes, Meta(max_length=SIGNATURE_BYTES)] = b""


@dataclass(frozen=True)
class Member:
    """Content of a verified certificate. Times are unix seconds; `expires_at` 0 is never."""

    peer: PeerId
    role: Role
    invite: bytes  # id of the member's invite
    admitted_at: int
    expires_at: int
    uses: int  # number of homes that may use that invite; 0 is any number
    group: str
    home: bytes  # public key; empty if the peer named none
    certificate: bytes

    def __repr__(self) -> str:
        return f"<Member {self.peer[-8:]} {self.role.name} by {self.invite.hex()}>"

    @property
    def user(self) -> bytes:
        """User of the invite, as its uses are counted: the peer's home, or the peer alone if it named none."""
        return self.home or self.peer.encode()

    def expired(self, now: float) -> bool:
        """Return whether the membership has ended at unix time `now`."""
        return 0 < self.expires_at <= now


_decoder = msgspec.msgpack.Decoder(Certificate)


def admit_peer(
    grant: bytes, invite: SigningKey, swarm: bytes, peer: PeerId, now: float, *, home: SigningKey | None = None
) -> bytes:
    """Make the certificate of a peer that holds an invite: its grant and the invite's private key. `home` is the key of the peer's
    home; it is left out if the certificate would be too long with it, as by a grant of a newer version."""
    admitted_at = int(now)
    bare = Certificate(grant, peer, admitted_at, invite.sign(_admission(swarm, peer, admitted_at)))
    if home is not None:
        signature = home.sign(_residence(swarm, invite.public, peer, admitted_at))
        raw = msgspec.msgpack.encode(msgspec.structs.replace(bare, home=home.public, home_signature=signature))
        if len(raw) <= MAX_CERTIFICATE_BYTES:
            return raw
    return msgspec.msgpack.encode(bare)


@lru_cache(maxsize=REMEMBERED)
def open_certificate(raw: bytes, swarm: bytes, owner: bytes) -> Member:
    """Return the member that a certificate admits to a swarm, if its two signatures are right.

    Expiry and revocation are left to the caller: the signed content does not change, so the result is cached. Raises
    ProtocolError if the certificate is invalid, is for another peer, or is not signed by the owner, the invite's key
    and the home that it names.
    """
    if len(raw) > MAX_CERTIFICATE_BYTES:
        raise ProtocolError(f"the certificate has {len(raw)} bytes, more than allowed", code=ErrorCode.TOO_LARGE)
    try:
        certificate = _decoder.decode(raw)
    except DECODE_ERRORS as error:
        raise ProtocolError(f"bad certificate: {error}") from None
    grant = open_grant(certificate.grant, swarm, owner)
    peer, admitted_at = certificate.peer, certificate.admitted_at
    if grant.peer not in ("", peer):
        raise ProtocolError("its invite is for another peer", code=ErrorCode.REFUSED, peer=peer)
    if not is_signed(grant.key, _admission(swarm, peer, admitted_at), certificate.signature):
        raise ProtocolError("the invite's key did not sign this admission", code=ErrorCode.REFUSED, peer=peer)
    home = certificate.home
    if home and not is_signed(home, _residence(swarm, grant.key, peer, admitted_at), certificate.home_signature):
        raise ProtocolError("the home that it names did not sign this admission", code=ErrorCode.REFUSED, peer=peer)
    terms = (grant.expires_at, grant.uses, grant.group)
    return Member(peer, grant.allows, grant.invite_id, admitted_at, *terms, home, raw)


def _admission(swarm: bytes, peer: PeerId, admitted_at: int) -> bytes:
    return DOMAIN + msgspec.msgpack.encode((swarm, peer, admitted_at))


def _residence(swarm: bytes, invite: bytes, peer: PeerId, admitted_at: int) -> bytes:
    return HOME_DOMAIN + msgspec.msgpack.encode((swarm, invite, peer, admitted_at))
