"""The commitment: what a stage says that it did in a step of a training, signed with its own key (`protocol/records.md`).

It binds the stage to every microbatch before it hears which one is computed once more, and can be shown to others.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from swarmnode.codec.body import Step
from swarmnode.codec.spot_check_messages import MAX_COMMITMENT_BYTES, MAX_ENTRIES, Digest
from swarmnode.codec.training_fields import Peer, RunId
from swarmnode.swarm.records.signed import PeerSigned, Signable

DOMAIN = b"swarmnode commitment 1\n"


class Commitment(Signable, frozen=True):
    """Of `count` microbatches of a step; `entries` is the SHA-256 of all their entries (`codec/spot_check_messages.py`)."""

    swarm: bytes
    peer: Peer
    run: RunId
    step: Step
    count: Annotated[int, Meta(ge=0, le=MAX_ENTRIES)]
    entries: Digest

    def __repr__(self) -> str:
        return f"<Commitment of {self.peer[-8:]} to {self.count} microbatches of step {self.step}>"


_KIND = PeerSigned("commitment", Commitment, domain=DOMAIN, max_bytes=MAX_COMMITMENT_BYTES, author="peer")
sign_commitment, open_commitment = _KIND.sign, _KIND.open
