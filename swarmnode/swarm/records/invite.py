"""Invite: one line of text with all that a newcomer needs (`protocol/invites.md`).

    swarm1 <base32, lower case, no padding, of: checksum (first 4 bytes of the SHA-256 of the rest) || msgpack array>

Version 2 is for swarms with an owner. It is a new version, not just more fields: a reader that does not know membership
then says so, instead of being refused by every peer.

Base32, not base58 or base64: it is in the standard library, survives a change of case and line breaks, and a double
click selects it.

Certificate: a grant of the owner, and the admission of one peer by it, signed with the invite's key.

It is valid only for the peer that it names: libp2p has authenticated a peer's id before any certificate is read. The peer's home,
a folder of one person's machine, countersigns: the node and the programs of one home are one user of the invite.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache
from typing import Annotated

import msgspec
from msgspec import Meta

from swarmnode.codec.body import DECODE_ERRORS, MAX_PROOF_BYTES, first_broken
from swarmnode.errors import ErrorCode, ProtocolError, UsageError
from swarmnode.net.identity import SEED_BYTES, SigningKey
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


OWNED_VERSION = 2
PREFIX = "swarm"
CHECKSUM_BYTES = 4
MAX_INVITE_CHARS = 8192
MAX_BOOTSTRAPS = 16
MAX_ADDRESS_CHARS = 256
MAX_NAME_CHARS = 64
ID_BYTES = 32


class Invite(msgspec.Struct, array_like=True, frozen=True):
    """Swarm id (32 bytes), name, and the multiaddrs (with /p2p/) of bootstrap peers."""

    swarm_id: bytes
    name: str
    bootstraps: tuple[str, ...] = ()


class OwnedInvite(Invite, frozen=True):
    """Invite to a swarm with an owner: the owner's public key and signature of the swarm (32 and 64 bytes).

    For a private swarm it may also have a grant and the private key of the invite, which its holder keeps secret.
    Without these two it is an address and admits no peer.
    """

    owner: bytes = b""
    signature: bytes = b""
    private: bool = False
    grant: bytes = b""
    secret: bytes = b""

    def __repr__(self) -> str:
        return f"<OwnedInvite to {self.name} {self.swarm_id.hex()[:12]}{' with a grant' if self.grant else ''}>"

    def opened_grant(self) -> Grant:
        """Open the invite's grant. Raises ProtocolError if it has no valid grant."""
        return open_grant(self.grant, self.swarm_id, self.owner)


SWARM_DOMAIN = b"swarmnode swarm 1\n"
_decoders: dict[int, msgspec.msgpack.Decoder[Invite] | msgspec.msgpack.Decoder[OwnedInvite]] = {
    VERSION: msgspec.msgpack.Decoder(Invite),
    OWNED_VERSION: msgspec.msgpack.Decoder(OwnedInvite),
}


def sign_swarm(swarm_id: bytes, owner: SigningKey) -> bytes:
    """Return the owner's signature of a swarm, whose id is the SHA-256 of its manifest."""
    return owner.sign(SWARM_DOMAIN + swarm_id)


def is_owners(swarm_id: bytes, owner: bytes, signature: bytes) -> bool:
    """Return whether the owner with this public key has signed the swarm's id."""
    return is_signed(owner, SWARM_DOMAIN + swarm_id, signature)


def looks_like_invite(text: str) -> bool:
    """Return whether the user meant an invite (perhaps a damaged one), not the path of a file."""
    text = text.strip().lower()
    return text.startswith(PREFIX) and text[len(PREFIX) : len(PREFIX) + 1].isdigit() and not set(text) & set("./\\")


def encode_invite(invite: Invite) -> str:
    """Return the line of text to hand out. Raises UsageError if the invite is not valid."""
    body = msgspec.msgpack.encode(invite)
    _check(invite)
    version = OWNED_VERSION if isinstance(invite, OwnedInvite) else VERSION
    return f"{PREFIX}{version}{as_text(body)}"


def as_text(body: bytes) -> str:
    """Return a record as base32 text with its checksum, to hand out."""
    data = hashlib.sha256(body).digest()[:CHECKSUM_BYTES] + body
    return base64.b32encode(data).decode().rstrip("=").lower()


def decode_invite(text: str) -> Invite:
    """Decode the invite in a line of text; case and white space do not matter. Raises UsageError if it is damaged or
    not valid."""
    line = "".join(text.split()).lower()
    if len(line) > MAX_INVITE_CHARS:
        raise UsageError(f"this is not an invite: it has {len(line)} characters, over the bound of {MAX_INVITE_CHARS}")
    decoder = next((decoder for version, decoder in _decoders.items() if line.startswith(f"{PREFIX}{version}")), None)
    if decoder is None:
        raise UsageError(_foreign(line))
    body = from_text(line[len(PREFIX) + 1 :], "invite")
    try:
        invite: Invite = decoder.decode(body)
    except DECODE_ERRORS as error:
        raise UsageError(f"this invite is damaged: {error}; copy it again") from None
    _check(invite)
    return invite


def _foreign(line: str) -> str:
    version = re.match(rf"{PREFIX}([0-9])", line)
    if version is None:
        return f"this is not an invite: invites begin with {PREFIX}{VERSION}"
    return f"this invite has version {version[1]}, this swarmnode knows {VERSION} and {OWNED_VERSION}: upgrade, or ask for another"


def from_text(encoded: str, kind: str) -> bytes:
    """Return the record that `as_text` made a text of. Raises UsageError, naming its `kind`, if the text is damaged."""
    try:
        data = base64.b32decode(encoded.upper() + "=" * (-len(encoded) % 8))
    except (binascii.Error, ValueError):
        raise UsageError(f"this {kind} is damaged: a character is missing or wrong; copy it again") from None
    checksum, body = data[:CHECKSUM_BYTES], data[CHECKSUM_BYTES:]
    if hashlib.sha256(body).digest()[:CHECKSUM_BYTES] != checksum:
        raise UsageError(f"this {kind} is damaged: checksum does not match; copy it again")
    return body


def is_plain_address(address: str) -> bool:
    """Return whether the text has the form of a multiaddr and no control characters: errors print the addresses of peers."""
    return address.startswith("/") and address.isprintable() and len(address) <= MAX_ADDRESS_CHARS


def _check(invite: Invite) -> None:
    rules = {
        "a swarm id of 32 bytes": len(invite.swarm_id) == ID_BYTES,
        "a printable name": 0 < len(invite.name) <= MAX_NAME_CHARS and invite.name.isprintable(),
        f"at most {MAX_BOOTSTRAPS} bootstrap addresses": len(invite.bootstraps) <= MAX_BOOTSTRAPS,
        "bootstrap addresses that are multiaddrs": all(map(is_plain_address, invite.bootstraps)),
    }
    if isinstance(invite, OwnedInvite):
        rules |= _owners_rules(invite)
    if (broken := first_broken(rules)) is not None:
        raise UsageError(f"this invite is not valid: it needs {broken}; ask the swarm's owner for a new one")


def _owners_rules(invite: OwnedInvite) -> dict[str, bool]:
    """Return the rules of an invite with an owner, checked here before anything is fetched or loaded."""
    return {
        "an owner's key of 32 bytes": len(invite.owner) == PUBLIC_BYTES,
        "the owner's signature of the swarm": is_owners(invite.swarm_id, invite.owner, invite.signature),
        "a grant of the owner's with its key": not (invite.grant or invite.secret)
        or (invite.private and _grants(invite)),
    }


def _grants(invite: OwnedInvite) -> bool:
    try:
        grant = invite.opened_grant()
    except ProtocolError:
        return False
    return len(invite.secret) == SEED_BYTES and SigningKey(invite.secret).public == grant.key
