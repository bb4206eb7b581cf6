"""The grant: what the owner signs when inviting somebody (`protocol/membership.md`).

A grant names the public key of a fresh pair, whose private half travels in the invite. Who has the invite can thus admit
itself, with the owner offline, and nobody else can.
"""

from __future__ import annotations

import hashlib
from enum import IntEnum

import msgspec

from swarmnode.net.interfaces import PeerId
from swarmnode.swarm.records.signed import OwnerSigned
from swarmnode.swarm.records.signing_key import PUBLIC_BYTES, SigningKey

VERSION = 1
DOMAIN = b"swarmnode grant 1\n"
SWARM_ID_BYTES = 32
INVITE_ID_BYTES = 8
MAX_GRANT_BYTES = 320
MAX_USES = 1000
MAX_PEER_CHARS = 64
MAX_GROUP_CHARS = 24


class Role(IntEnum):
    """What a member may do; each may do all that those before it may. An unknown one counts as CLIENT."""

    CLIENT = 0  # ask: generate, fetch weights
    BOOTSTRAP = 1  # be where newcomers look: announce itself, relay, give out manifest and weights
    VOLUNTEER = 2  # compute: hold units, serve sessions, train them
    TRAINER = 3  # lead a training and feed it data


class Grant(msgspec.Struct, array_like=True, frozen=True):
    """What an invite is good for. Newer versions append fields."""

    version: int
    swarm: bytes
    key: bytes  # public key of the invite
    role: int
    issued_at: int  # unix time, seconds
    expires_at: int  # of every membership by it; 0 is never
    uses: int = 0  # how many peers may use it; 0 is any number
    peer: PeerId = ""  # the only peer that may use it, where there is one
    group: str = ""  # what the owner vouches for: a region, a club

    @property
    def invite_id(self) -> bytes:
        """8 bytes by which the invite is known in lists."""
        return hashlib.sha256(self.key).digest()[:INVITE_ID_BYTES]

    @property
    def allows(self) -> Role:
        """The role as this version understands it."""
        return Role(self.role) if self.role in Role._value2member_map_ else Role.CLIENT


def sign_grant(grant: Grant, owner: SigningKey) -> bytes:
    """The signed grant. Raises ValueError where it breaks a rule of its own, which is a bug of the caller."""
    return _GRANTS.sign(grant, owner)


def open_grant(raw: bytes, swarm: bytes, owner: bytes) -> Grant:
    """The grant in these bytes, if this owner signed it for this swarm. Raises ProtocolError."""
    return _GRANTS.open(raw, swarm, owner)


def _rules(grant: Grant) -> dict[str, bool]:
    return {
        "version": grant.version >= VERSION,
        "swarm": len(grant.swarm) == SWARM_ID_BYTES,
        "key": len(grant.key) == PUBLIC_BYTES,
        "role": 0 <= grant.role <= 255,
        "times": 0 <= grant.issued_at < 1 << 40
        and (grant.expires_at == 0 or grant.issued_at < grant.expires_at < 1 << 40),
        "uses": 0 <= grant.uses <= MAX_USES,
        "peer": len(grant.peer) <= MAX_PEER_CHARS and grant.peer.isascii(),
        "group": len(grant.group.encode()) <= MAX_GROUP_CHARS and grant.group.isprintable(),
    }


_GRANTS = OwnerSigned("grant", Grant, domain=DOMAIN, max_bytes=MAX_GRANT_BYTES, rules=_rules)
