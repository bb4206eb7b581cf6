"""Invite: one line of text with all that a newcomer needs (`protocol/invites.md`).

    swarm1 <base32, lower case, no padding, of: checksum (first 4 bytes of the SHA-256 of the rest) || msgpack array>

Version 2 is for swarms with an owner. It is a new version, not just more fields: a reader that does not know membership
then says so, instead of being refused by every peer.

Base32, not base58 or base64: it is in the standard library, survives a change of case and line breaks, and a double
click selects it.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import re

import msgspec

from swarmnode.codec.body import DECODE_ERRORS, first_broken
from swarmnode.errors import ProtocolError, UsageError
from swarmnode.net.identity import SEED_BYTES, SigningKey
from swarmnode.swarm.records.certificate import Grant, open_grant
from swarmnode.swarm.records.signed import PUBLIC_BYTES, is_signed

VERSION = 1
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
