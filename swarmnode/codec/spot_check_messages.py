"""Bodies of `/swarmnode/spot-check/1`: what a stage did in the step in force, for its replicas (`protocol/training.md`).

GET_COMMITMENT, COMMITMENT      what it says that it did, signed, before anybody says which of it is looked at
GET_MICROBATCH, MICROBATCH      one microbatch of that
GET_SKETCHES, SKETCHES          what all of them added to the gradients, which is what it has to contribute to their sum
ACCUSATION, END                  who was found false: nobody believes it, who hears of it looks at that peer next
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Annotated

import msgspec
from msgspec import Meta

from swarmnode.codec.audit_messages import Seed
from swarmnode.codec.body import MAX_UNITS, Block, Body, Step, Unit
from swarmnode.codec.frames import FrameKind
from swarmnode.codec.training_fields import (
    MAX_MASK_BYTES,
    MAX_VALUES,
    Index,
    Number,
    Peer,
    RunId,
    Values,
    check_rules,
    check_values,
)

SPOT_CHECK_PROTOCOL = "/swarmnode/spot-check/1"
DIGEST_BYTES = 32
MAX_COMMITMENT_BYTES = 1024
ENTRY_BYTES = 4 + DIGEST_BYTES  # number and first unit (16 bits each, little-endian), and the record's SHA-256
MAX_ENTRIES = 8 * MAX_MASK_BYTES
MAX_RECORDS = 16  # of one SKETCHES
MAX_TILES = 1 << 32

Digest = Annotated[bytes, Meta(min_length=DIGEST_BYTES, max_length=DIGEST_BYTES)]


class Crossing(Body, frozen=True):
    """What crossed one of a stage's boundaries in one direction: its tensors, and the SHA-256 of the payload that they were."""

    values: Values
    digest: Digest


class MicrobatchRecord(Body, frozen=True):
    """What a stage did with one microbatch in units [start, end). `labels`: at the model's end alone. `present`: for each value
    that was sent on, whether a gradient came back. `parameters`: SHA-256 of the sketch of what it added to the gradients of its
    parameters."""

    number: Index
    start: Unit
    end: Unit
    received: Crossing
    labels: Crossing
    sent: Crossing
    present: Annotated[tuple[bool, ...], Meta(max_length=MAX_VALUES)]
    gradients: Crossing
    returned: Crossing
    parameters: Digest
    loss: Number = 0.0

    @property
    def digest(self) -> bytes:
        """That a commitment has of it."""
        return hashlib.sha256(msgspec.msgpack.encode(self)).digest()


class GetCommitment(Body, frozen=True):
    """Asks a stage for what it has counted in a step."""

    run: RunId
    step: Step


class CommitmentReply(Body, frozen=True):
    """The answer: a signed commitment (`protocol/records.md`). The payload has an entry for each microbatch."""

    commitment: Annotated[bytes, Meta(max_length=MAX_COMMITMENT_BYTES)]


class GetMicrobatch(Body, frozen=True):
    """Asks for one microbatch, and for sketches by projections that follow from `seed`."""

    run: RunId
    step: Step
    number: Index
    start: Unit
    seed: Seed


class MicrobatchReply(Body, frozen=True):
    """The answer. The payload: what was received, the labels, the gradients that came back, the sketch of the parameters'
    gradients, then sketches of the floats among what was sent on and returned: of each row SKETCH_VALUES float32."""

    record: MicrobatchRecord

    def check(self) -> None:
        _check_record("MICROBATCH", self.record)


class GetSketches(Body, frozen=True):
    """Asks for what the microbatches of a commitment added to the gradients, from its entry `first` on."""

    run: RunId
    step: Step
    first: Annotated[int, Meta(ge=0, lt=MAX_ENTRIES)]


class BlockTiles(Body, frozen=True):
    """How long the sketch of a block's gradients is."""

    block: Block
    tiles: Annotated[int, Meta(ge=1, lt=MAX_TILES)]


class SketchesReply(Body, frozen=True):
    """The answer: the records of that entry and of some that follow it. The payload: their sketches of the parameters' gradients,
    one after another. `blocks`: all of which something is in there, for who does not hold them."""

    records: Annotated[tuple[MicrobatchRecord, ...], Meta(min_length=1, max_length=MAX_RECORDS)]
    blocks: Annotated[tuple[BlockTiles, ...], Meta(max_length=MAX_UNITS + 1)] = ()

    def check(self) -> None:
        for record in self.records:
            _check_record("SKETCHES", record)


def _check_record(kind: str, record: MicrobatchRecord) -> None:
    for crossing in (record.received, record.labels, record.sent, record.gradients, record.returned):
        check_values(crossing.values)
    rules: Mapping[str, bool] = {
        "units": record.start < record.end,
        "a gradient for each value that it names": sum(record.present) == len(record.gradients.values),
    }
    check_rules(kind, rules)


class Accusation(Body, frozen=True):
    """The sender found this peer false in a step; `commitment` is what the peer signed of it."""

    run: RunId
    peer: Peer
    commitment: Annotated[bytes, Meta(max_length=MAX_COMMITMENT_BYTES)]


SPOT_CHECK_BODIES: dict[FrameKind, type[Body]] = {
    FrameKind.GET_COMMITMENT: GetCommitment,
    FrameKind.COMMITMENT: CommitmentReply,
    FrameKind.GET_MICROBATCH: GetMicrobatch,
    FrameKind.MICROBATCH: MicrobatchReply,
    FrameKind.ACCUSATION: Accusation,
    FrameKind.GET_SKETCHES: GetSketches,
    FrameKind.SKETCHES: SketchesReply,
}
