"""The invite: one line of text that holds all a newcomer needs (`protocol/invites.md`).

    swarm1 <base32, lower case, no padding, of: checksum (first 4 bytes of the SHA-256 of the rest) || msgpack array>

Base32 rather than base58 or base64: it is in the standard library, survives a change of case and line breaks, and one
double click selects it.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import re

import msgspec

from swarmnode.codec.decoding import DECODE_ERRORS
from swarmnode.errors import UsageError

VERSION = 1
PREFIX = "swarm"
CHECKSUM_BYTES = 4
MAX_INVITE_CHARS = 8192
MAX_BOOTSTRAPS = 16
MAX_ADDRESS_CHARS = 256
MAX_NAME_CHARS = 64
ID_BYTES = 32


class Invite(msgspec.Struct, array_like=True, frozen=True):
    """Swarm id (32 bytes), name, and the multiaddrs (with /p2p/) of peers that are expected to be there."""

    swarm_id: bytes
    name: str
    bootstraps: tuple[str, ...] = ()


_decoder = msgspec.msgpack.Decoder(Invite)


def looks_like_invite(text: str) -> bool:
    """Whether the user meant an invite (perhaps a damaged one) and not the path of a file."""
    text = text.strip().lower()
    return text.startswith(PREFIX) and text[len(PREFIX) : len(PREFIX) + 1].isdigit() and not set(text) & set("./\\")


def encode_invite(invite: Invite) -> str:
    """The line of text to hand out. Raises UsageError where it would be too long to be read back."""
    body = msgspec.msgpack.encode(invite)
    _check(invite)
    data = hashlib.sha256(body).digest()[:CHECKSUM_BYTES] + body
    return f"{PREFIX}{VERSION}{base64.b32encode(data).decode().rstrip('=').lower()}"


def decode_invite(text: str) -> Invite:
    """The invite in a line of text; case and white space do not matter. Raises UsageError with what is wrong."""
    line = "".join(text.split()).lower()
    if len(line) > MAX_INVITE_CHARS:
        raise UsageError(f"this is not an invite: it has {len(line)} characters, over the bound of {MAX_INVITE_CHARS}")
    if not line.startswith(f"{PREFIX}{VERSION}"):
        raise UsageError(_foreign(line))
    body = _checked_body(line[len(f"{PREFIX}{VERSION}") :])
    try:
        invite = _decoder.decode(body)
    except DECODE_ERRORS as error:
        raise UsageError(f"this invite is damaged: {error}") from None
    _check(invite)
    return invite


def _foreign(line: str) -> str:
    version = re.match(rf"{PREFIX}([0-9])", line)
    if version is None:
        return f"this is not an invite: invites begin with {PREFIX}{VERSION}"
    return f"this invite has version {version[1]}, this swarmnode knows {VERSION}: upgrade, or ask for a new invite"


def _checked_body(encoded: str) -> bytes:
    try:
        data = base64.b32decode(encoded.upper() + "=" * (-len(encoded) % 8))
    except (binascii.Error, ValueError):
        raise UsageError("this invite is damaged: a character is missing or wrong; copy it again") from None
    checksum, body = data[:CHECKSUM_BYTES], data[CHECKSUM_BYTES:]
    if hashlib.sha256(body).digest()[:CHECKSUM_BYTES] != checksum:
        raise UsageError("this invite is damaged: checksum does not match; copy it again")
    return body


def _check(invite: Invite) -> None:
    rules = {
        "a swarm id of 32 bytes": len(invite.swarm_id) == ID_BYTES,
        "a printable name": 0 < len(invite.name) <= MAX_NAME_CHARS and invite.name.isprintable(),
        f"at most {MAX_BOOTSTRAPS} bootstrap addresses": len(invite.bootstraps) <= MAX_BOOTSTRAPS,
        "bootstrap addresses that are multiaddrs": all(
            address.startswith("/") and len(address) <= MAX_ADDRESS_CHARS for address in invite.bootstraps
        ),
    }
    for rule, kept in rules.items():
        if not kept:
            raise UsageError(f"this invite is not valid: it needs {rule}")
