"""The commitment: what a stage says that it did in a step of a training, signed with its own key (`protocol/records.md`).

It binds the stage to every microbatch before it hears which one is computed once more, and can be shown to others.
"""

from __future__ import annotations

import msgspec

from swarmnode.codec.body import MAX_PEER_CHARS, MAX_STEP
from swarmnode.codec.spot_check_messages import DIGEST_BYTES, MAX_COMMITMENT_BYTES, MAX_ENTRIES
from swarmnode.codec.training_fields import RUN_ID_BYTES
from swarmnode.net.interfaces import PeerId
from swarmnode.swarm.records.signed import PeerSigned, Sign, Verify

DOMAIN = b"swarmnode commitment 1\n"


class Commitment(msgspec.Struct, array_like=True, frozen=True):
    """Of `count` microbatches of a step; `entries` is the SHA-256 of all their entries (`codec/spot_check_messages.py`)."""

    swarm: bytes
    peer: PeerId
    run: bytes
    step: int
    count: int
    entries: bytes

    def __repr__(self) -> str:
        return f"<Commitment of {self.peer[-8:]} to {self.count} microbatches of step {self.step}>"


def _rules(commitment: Commitment) -> dict[str, bool]:
    """What each field must keep to, and whether it does."""
    return {
        "peer": 0 < len(commitment.peer) <= MAX_PEER_CHARS,
        "run": len(commitment.run) == RUN_ID_BYTES,
        "step": 0 <= commitment.step <= MAX_STEP,
        "count": 0 <= commitment.count <= MAX_ENTRIES,
        "entries": len(commitment.entries) == DIGEST_BYTES,
    }


_KIND = PeerSigned("commitment", Commitment, domain=DOMAIN, rules=_rules, author=lambda commitment: commitment.peer)


def sign_commitment(commitment: Commitment, sign: Sign) -> bytes:
    """The bytes that bind its author."""
    return msgspec.msgpack.encode(_KIND.sign(commitment, sign))


def open_commitment(raw: bytes, swarm: bytes, verify: Verify) -> Commitment:
    """The commitment in these bytes. Raises ProtocolError where it is not its peer's, or not of this swarm."""
    return _KIND.open(_KIND.read(raw, MAX_COMMITMENT_BYTES), swarm, verify)
