"""The grant: what the owner signs when inviting somebody (`protocol/membership.md`).

A grant names the public key of a fresh pair, whose private half travels in the invite. Who has the invite can thus admit
itself, with the owner offline, and nobody else can.
"""

from __future__ import annotations

import hashlib
from enum import IntEnum
from typing import Annotated

from msgspec import Meta

from swarmnode.swarm.records.signed import OwnerSigned, Signable
from swarmnode.swarm.records.signing_key import PUBLIC_BYTES

VERSION = 1
DOMAIN = b"swarmnode grant 1\n"
SWARM_ID_BYTES = 32
INVITE_ID_BYTES = 8
MAX_GRANT_BYTES = 320
MAX_USES = 1000
MAX_PEER_CHARS = 64
MAX_GROUP_CHARS = 24

SwarmId = Annotated[bytes, Meta(min_length=SWARM_ID_BYTES, max_length=SWARM_ID_BYTES)]
UnixTime = Annotated[int, Meta(ge=0, lt=1 << 40)]


class Role(IntEnum):
    """What a member may do; each may do all that those before it may. An unknown one counts as CLIENT."""

    CLIENT = 0  # ask: generate, fetch weights
    BOOTSTRAP = 1  # be where newcomers look: announce itself, relay, give out manifest and weights
    VOLUNTEER = 2  # compute: hold units, serve sessions, train them
    TRAINER = 3  # lead a training and feed it data


class Grant(Signable, frozen=True):
    """What an invite is good for. Newer versions append fields."""

    version: Annotated[int, Meta(ge=VERSION)]
    swarm: SwarmId
    key: Annotated[bytes, Meta(min_length=PUBLIC_BYTES, max_length=PUBLIC_BYTES)]  # public key of the invite
    role: Annotated[int, Meta(ge=0, le=255)]
    issued_at: UnixTime  # in seconds
    expires_at: UnixTime  # of every membership by it; 0 is never
    uses: Annotated[int, Meta(ge=0, le=MAX_USES)] = 0  # how many peers may use it; 0 is any number
    peer: Annotated[str, Meta(max_length=MAX_PEER_CHARS)] = ""  # the only peer that may use it, where there is one
    group: str = ""  # what the owner vouches for: a region, a club

    @property
    def invite_id(self) -> bytes:
        """8 bytes by which the invite is known in lists."""
        return hashlib.sha256(self.key).digest()[:INVITE_ID_BYTES]

    @property
    def allows(self) -> Role:
        """The role as this version understands it."""
        return Role(self.role) if self.role in Role._value2member_map_ else Role.CLIENT

    def rules(self) -> dict[str, bool]:
        return {
            "times": self.expires_at == 0 or self.issued_at < self.expires_at,
            "peer": self.peer.isascii(),
            "group": len(self.group.encode()) <= MAX_GROUP_CHARS and self.group.isprintable(),
        }


_GRANTS = OwnerSigned("grant", Grant, domain=DOMAIN, max_bytes=MAX_GRANT_BYTES)
sign_grant, open_grant = _GRANTS.sign, _GRANTS.open
