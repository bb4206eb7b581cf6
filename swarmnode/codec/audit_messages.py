"""Bodies of `/swarmnode/audit/1`: a hop's statement about its inputs and outputs in a session (`protocol/frames.md`).

GET_STATEMENT, STATEMENT    the question and its answer; ERROR NO_SESSION from a peer that does not know the session

Bodies of `/swarmnode/spot-check/1`: a stage's work in the step in force, for its replicas to check (`protocol/training.md`).

GET_COMMITMENT, COMMITMENT      the stage's signed list of its work, before it knows what will be checked.
GET_MICROBATCH, MICROBATCH      one microbatch of the list.
GET_SKETCHES, SKETCHES          all its additions to the gradients, which are its contribution to their sum; to a hop beside it
                                only the record of one microbatch, with the digests of all that it received, sent and returned.
ACCUSATION, END                 a peer found false: the receiver does not believe it, but checks that peer next.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Mapping
from typing import Annotated, Union

import msgspec
from msgspec import Meta

from swarmnode.codec.body import MAX_POSITIONS, MAX_UNITS, Block, Body, Position, SessionId, Step, Unit
from swarmnode.codec.frames import FrameKind
from swarmnode.codec.training_messages import (
    MAX_MASK_BYTES,
    MAX_VALUES,
    Index,
    LeaseNumber,
    Number,
    Peer,
    RunId,
    Values,
    check_rules,
    check_values,
)
from swarmnode.errors import ProtocolError

AUDIT_PROTOCOL = "/swarmnode/audit/1"
SKETCH_VALUES = 32
SKETCH_BYTES = 4 * SKETCH_VALUES  # per position: float32, little-endian
POSITION_DIGEST_BYTES = 16  # per position, instead of a sketch
SEED_BYTES = 16
MAX_SKETCHED = 512  # positions in one question
MAX_STATEMENT_BYTES = 1024

Seed = Annotated[bytes, Meta(min_length=SEED_BYTES, max_length=SEED_BYTES)]
_ENTRY = struct.Struct("<II")


class GetStatement(Body, frozen=True):
    """Question to a hop of a session for sketches of positions [first, first + count), by projections that follow from `seed`.

    The statement is about the first `length` positions of the session (0: all). Later ones may hold guesses behind the text's end.
    With `digests` a peer that states a class of equal bits sends digests of the positions in place of sketches.
    """

    session: SessionId
    seed: Seed
    first: Position
    count: Annotated[int, Meta(ge=1, le=MAX_SKETCHED)]
    length: Position = 0
    digests: bool = False

    def check(self) -> None:
        if self.first + self.count > MAX_POSITIONS:
            raise ProtocolError("a GET_STATEMENT ends beyond the last position")


class StatementReply(Body, frozen=True):
    """Answer to GET_STATEMENT: a signed statement (`protocol/records.md`).

    The payload holds sketches of the hop's inputs (not if they are token ids), then of its outputs (not if the hop is the last):
    SKETCH_VALUES float32 values per position, or POSITION_DIGEST_BYTES if digests were asked for and it states a class.
    """

    statement: Annotated[bytes, Meta(max_length=MAX_STATEMENT_BYTES)]


def running_digest(entries: Iterable[tuple[int, int, Union[bytes, bytearray, memoryview]]]) -> bytes:
    """Return the digest of the data on one edge of a session, from (start, count, payload) of its INPUT frames in order.

    It begins as 32 zero bytes; each frame makes it the SHA-256 of itself, start, count and the SHA-256 of the payload.
    """
    digest = bytes(32)
    for start, count, payload in entries:
        digest = hashlib.sha256(digest + _ENTRY.pack(start, count) + hashlib.sha256(payload).digest()).digest()
    return digest


AUDIT_BODIES: dict[FrameKind, type[Body]] = {
    FrameKind.GET_STATEMENT: GetStatement,
    FrameKind.STATEMENT: StatementReply,
}


SPOT_CHECK_PROTOCOL = "/swarmnode/spot-check/1"
DIGEST_BYTES = 32
MAX_COMMITMENT_BYTES = 1024
ENTRY_BYTES = 4 + DIGEST_BYTES  # number and first unit (16 bits each, little-endian), and the record's SHA-256
MAX_ENTRIES = 8 * MAX_MASK_BYTES
MAX_RECORDS = 16  # in one SKETCHES
MAX_TILES = 1 << 32

Digest = Annotated[bytes, Meta(min_length=DIGEST_BYTES, max_length=DIGEST_BYTES)]


class Crossing(Body, frozen=True):
    """Tensors that crossed one of a stage's boundaries in one direction: their descriptors, and the SHA-256 of their payload."""

    values: Values
    digest: Digest


class MicrobatchRecord(Body, frozen=True):
    """A stage's work on one microbatch in layers [start, end).

    `labels` are given at the model's end only. `present` says for each sent value whether a gradient came back. `parameters` is the
    SHA-256 of the sketch of the microbatch's part of the parameters' gradients.
    """

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
        """SHA-256 of the record; a stage's signed commitment covers it."""
        return hashlib.sha256(msgspec.msgpack.encode(self)).digest()


class GetCommitment(Body, frozen=True):
    """Question to a stage for its commitment to the microbatches counted in a step."""

    run: RunId
    step: Step


class CommitmentReply(Body, frozen=True):
    """Answer to GET_COMMITMENT: a signed commitment (`protocol/records.md`). The payload has an entry for each microbatch."""

    commitment: Annotated[bytes, Meta(max_length=MAX_COMMITMENT_BYTES)]


class GetMicrobatch(Body, frozen=True):
    """Question for one microbatch, and for sketches by projections that follow from `seed`."""

    run: RunId
    step: Step
    number: Index
    start: Unit
    seed: Seed


class MicrobatchReply(Body, frozen=True):
    """Answer to GET_MICROBATCH.

    The payload: the received values, the labels, the gradients that came back, the sketch of the parameters' gradients, then
    sketches of the floats among the sent and returned values: SKETCH_VALUES float32 values per row.
    """

    record: MicrobatchRecord

    def check(self) -> None:
        _check_record("MICROBATCH", self.record)


class GetSketches(Body, frozen=True):
    """Question for the additions to the gradients by the microbatches of a commitment, from its entry `first` on."""

    run: RunId
    step: Step
    first: Annotated[int, Meta(ge=0, lt=MAX_ENTRIES)]


class BlockTiles(Body, frozen=True):
    """Number of tiles in the sketch of the gradients of the block `block`."""

    block: Block
    tiles: Annotated[int, Meta(ge=1, lt=MAX_TILES)]


class SketchesReply(Body, frozen=True):
    """Answer to GET_SKETCHES: the records of entry `first` and of some that follow it.

    The payload: their sketches of the parameters' gradients, one after another. `blocks` lists all blocks in the sketches, for a
    receiver that does not hold them. `lease`: the lease of the first record.
    """

    records: Annotated[tuple[MicrobatchRecord, ...], Meta(min_length=1, max_length=MAX_RECORDS)]
    blocks: Annotated[tuple[BlockTiles, ...], Meta(max_length=MAX_UNITS + 1)] = ()
    lease: LeaseNumber = 0

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
    """Report that the sender found this peer false in a step; `commitment` is the peer's signed one."""

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
