"""Step records: a stage's records of the microbatches of the current step, its commitment to them, and the server that
shows both. Replicas see all; the hops beside the stage see the records of what they exchanged with it.

Records are payloads as they arrived and left, in host memory, counted in the ledger. If there is no room, a microbatch is
not kept and training goes on: only the check is lost.
"""

from __future__ import annotations

import asyncio
import hashlib
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import msgspec
from torch import Tensor

from swarmnode.codec.audit_messages import (
    MAX_RECORDS,
    SPOT_CHECK_PROTOCOL,
    Accusation,
    BlockTiles,
    CommitmentReply,
    Crossing,
    GetCommitment,
    GetMicrobatch,
    GetSketches,
    MicrobatchRecord,
    MicrobatchReply,
    SketchesReply,
)
from swarmnode.codec.frames import MAX_BODY_BYTES
from swarmnode.codec.messages import End, Error
from swarmnode.codec.tensors import TensorInfo
from swarmnode.codec.training_messages import Backward, Forward
from swarmnode.compress.codecs import Encoded, decode_values, payload_of
from swarmnode.compute.serving.sketch import sketch_bytes, sketches
from swarmnode.compute.training.learner import Learner
from swarmnode.compute.training.recomputation import BlockSketches, gradient_sketch, step_seed
from swarmnode.errors import ErrorCode
from swarmnode.ledger import Account, Full, MemoryLedger, Reservation
from swarmnode.net.addressing.addresses import Claimant
from swarmnode.net.interfaces import Buffer, PeerId
from swarmnode.peer.questions import Answer, LocalPeer, QuestionServer
from swarmnode.plan.view import Span
from swarmnode.swarm.records.signed import Sign, Verify
from swarmnode.swarm.records.statement import Commitment, sign_commitment
from swarmnode.training.worker.admission import ReceivedLabels

Question = GetCommitment | GetMicrobatch | GetSketches | Accusation
RECORDS_BYTES = MAX_BODY_BYTES // 2  # in one answer
MAX_KEPT_BYTES = 1 << 30  # of a step
_PLACE = struct.Struct("<HH")

Place = tuple[int, int]
"""Number of a microbatch and first unit: a stage counts each such pair once."""


@dataclass
class StoredMicrobatch:
    """The data that one microbatch brought and produced at a stage."""

    body: Forward
    received: Buffer
    memory: Reservation
    labels_values: tuple[TensorInfo, ...] = ()  # at the model's end
    labels_payload: Buffer = b""
    sent: Encoded = ((), [])
    answer: Backward | None = None
    gradients: Buffer = b""
    returned: Encoded = ((), [])
    loss: float = 0.0
    parameters: bytes = b""  # sketch_S of its additions to the gradients, float32, little-endian
    _grown: BlockSketches = field(default_factory=BlockSketches, repr=False)  # of its additions
    _record: MicrobatchRecord | None = field(default=None, repr=False)

    @property
    def place(self) -> Place:
        """The microbatch's number and the first unit here."""
        return self.body.number, self.body.route[self.body.hop].start

    @property
    def neighbours(self) -> dict[PeerId, Place]:
        """The hops before and behind this one on the microbatch's route, each with its place."""
        route, hop = self.body.route, self.body.hop
        around = (route[near] for near in (hop - 1, hop + 1) if 0 <= near < len(route))
        return {near.peer: (self.body.number, near.start) for near in around if near.peer != route[hop].peer}

    @property
    def tiles(self) -> dict[int, int]:
        """Number of tiles in the sketch of its additions, by block."""
        return {block: len(sketch_S) for block, sketch_S in self._grown.items()}

    @property
    def size_bytes(self) -> int:
        """Bytes of all kept data."""
        payloads = (
            self.received,
            self.labels_payload,
            self.gradients,
            self.parameters,
            *self.sent[1],
            *self.returned[1],
        )
        return sum(memoryview(payload).nbytes for payload in payloads)

    def record(self) -> MicrobatchRecord:
        """Return the record that replicas are shown. The first call hashes all payloads."""
        if self._record is None:
            body, answer = self.body, self.answer
            hop = body.route[body.hop]
            self._record = MicrobatchRecord(
                body.number,
                hop.start,
                hop.end,
                Crossing(body.values, _digest([self.received])),
                Crossing(self.labels_values, _digest([self.labels_payload])),
                Crossing(self.sent[0], _digest(self.sent[1])),
                () if answer is None else answer.present,
                Crossing(() if answer is None else answer.values, _digest([self.gradients])),
                Crossing(self.returned[0], _digest(self.returned[1])),
                _digest([self.parameters]),
                self.loss,
            )
        return self._record

    @contextmanager
    def counting(self, learner: Learner, units: Span) -> Iterator[None]:
        """Sketch the gradients that a pass adds to the sums of `units`; used as a context around the pass, on the executor."""
        before = self._sketches(learner, units)
        yield
        for block, sketch_S in self._sketches(learner, units).items():
            self._grown.add(block, sketch_S - before[block])

    def finish(self) -> None:
        """Join the sketches after all units have counted the microbatch."""
        self.parameters = sketch_bytes(self._grown.joined())

    def _sketches(self, learner: Learner, units: Span) -> dict[int, Tensor]:
        """Return sketch_S of the sums, by block."""
        seed = step_seed(self.body.run, self.body.step)
        sums = learner.accumulators(units.start, units.end)
        return {block: gradient_sketch(sums_N, seed) for block, sums_N in sums.items()}


class StepRecords:
    """The records of one stage."""

    def __init__(self, ledger: MemoryLedger) -> None:
        self._ledger = ledger
        self._stored: dict[Place, StoredMicrobatch] = {}
        self._step: tuple[bytes, int] = (b"", 0)  # run and step

    @property
    def size_bytes(self) -> int:
        """Bytes of all kept records."""
        return sum(kept.memory.size_bytes for kept in self._stored.values())

    def open(self, body: Forward, payload: Buffer, labels: ReceivedLabels | None) -> StoredMicrobatch | None:
        """Open a record for an arriving microbatch; None if there is no room for its inputs."""
        told = ((), b"") if labels is None else (labels.body.values, labels.payload)
        size_bytes = len(payload) + len(told[1])
        if self.size_bytes + size_bytes > MAX_KEPT_BYTES:
            return None
        try:
            return StoredMicrobatch(body, payload, self._ledger.reserve(Account.MESSAGES, size_bytes), *told)
        except Full:
            return None

    def close(self, stored: StoredMicrobatch) -> None:
        """Keep the record of a microbatch that is over if it was counted and there is room; else free its memory."""
        if not (stored.parameters and self._store(stored)):
            stored.memory.release()

    def _store(self, stored: StoredMicrobatch) -> bool:
        step = stored.body.run, stored.body.step
        if step != self._step:
            self.clear()
            self._step = step
        try:
            stored.memory.resize(stored.size_bytes)
        except Full:
            return False
        if self.size_bytes + stored.size_bytes > MAX_KEPT_BYTES or stored.place in self._stored:
            return False
        self._stored[stored.place] = stored
        return True

    def of(self, run: bytes, step: int) -> dict[Place, StoredMicrobatch]:
        """Return the records of a step in the order of their places; empty if another step is kept."""
        return dict(sorted(self._stored.items())) if (run, step) == self._step else {}

    def clear(self) -> None:
        """Forget all records: the step is over, or counted again."""
        for kept in self._stored.values():
            kept.memory.release()
        self._stored.clear()


def entries_of(records: Iterable[MicrobatchRecord]) -> bytes:
    """Return the bytes that a commitment binds: place and digest of each record."""
    return b"".join(_PLACE.pack(record.number, record.start) + record.digest for record in records)


def read_entries(entries: Buffer, count: int) -> dict[Place, bytes]:
    """Return the digests by place. Raises ValueError if there are not `count` entries, or a place is listed twice."""
    size = _PLACE.size + hashlib.sha256().digest_size
    data = bytes(entries)
    if len(data) != count * size:
        raise ValueError(f"{len(data)} bytes of {count} entries")
    found = {_PLACE.unpack_from(data, at): data[at + _PLACE.size : at + size] for at in range(0, len(data), size)}
    if len(found) != count:
        raise ValueError("a microbatch is listed twice")
    return found


def _digest(payloads: Sequence[Buffer]) -> bytes:
    digest = hashlib.sha256()
    for payload in payloads:
        digest.update(payload)
    return digest.digest()


@dataclass(frozen=True)
class Committer:
    """The signer of commitments, its swarm, and the functions that sign and verify."""

    peer: PeerId
    swarm: bytes
    sign: Sign
    verify: Verify


def check_server(
    peer: LocalPeer,
    committer: Committer,
    records: StepRecords,
    may_ask: Callable[[PeerId], bool],
    on_accusation: Callable[[PeerId, Accusation], None],
) -> QuestionServer:
    """Create the server that shows these records to replicas and takes accusations. Only peers that `may_ask` are shown
    training data; a hop beside this one is shown the commitment, and the records of microbatches that it exchanged."""

    async def answer(asker: Claimant, question: Question) -> Answer:
        is_replica = may_ask(asker.peer)
        if isinstance(question, Accusation):
            if is_replica:
                on_accusation(asker.peer, question)
            return Answer(End() if is_replica else Error(ErrorCode.REFUSED))
        stored = list(records.of(question.run, question.step).values())
        exchanged = {one.place for one in stored if asker.peer in one.neighbours}
        if not is_replica and (isinstance(question, GetMicrobatch) or not exchanged):
            return Answer(Error(ErrorCode.REFUSED))
        tell: Callable[[list[StoredMicrobatch]], Answer] = _sketches if is_replica else _exchanged
        if isinstance(question, GetMicrobatch):
            stored = [one for one in stored if one.place == (question.number, question.start)]
            tell = partial(_microbatch, question.seed)
        elif isinstance(question, GetCommitment):
            tell = partial(_commit, committer, question)
        else:
            stored = stored[question.first :]
            stored = stored if is_replica or (stored and stored[0].place in exchanged) else []
        return await asyncio.to_thread(tell, stored) if stored else Answer(Error(ErrorCode.NOT_FOUND))

    return QuestionServer(peer, SPOT_CHECK_PROTOCOL, Question, answer)


def _commit(committer: Committer, question: GetCommitment, stored: list[StoredMicrobatch]) -> Answer:
    entries = entries_of(one.record() for one in stored)
    digest = hashlib.sha256(entries).digest()
    said = Commitment(committer.swarm, committer.peer, question.run, question.step, len(stored), digest)
    return Answer(CommitmentReply(sign_commitment(said, committer.sign)), (entries,))


def _microbatch(seed: bytes, stored: list[StoredMicrobatch]) -> Answer:
    (microbatch,) = stored
    record = microbatch.record()
    edges = ((record.sent.values, microbatch.sent[1]), (record.returned.values, microbatch.returned[1]))
    crossed = [
        sketch_bytes(sketch_TK)
        for infos, payload in edges
        for sketch_TK in sketches(decode_values(infos, payload_of(payload), "cpu"), seed)
    ]
    return Answer(
        MicrobatchReply(record),
        (microbatch.received, microbatch.labels_payload, microbatch.gradients, microbatch.parameters, *crossed),
    )


def _exchanged(stored: list[StoredMicrobatch]) -> Answer:
    """Answer a hop beside this one with a record alone."""
    return Answer(SketchesReply((stored[0].record(),), lease=stored[0].body.lease))


def _sketches(stored: list[StoredMicrobatch]) -> Answer:
    """Answer with the sketches of the first records, as many as fit into one answer."""
    told: list[StoredMicrobatch] = []
    size_bytes = 0
    for one in stored[:MAX_RECORDS]:
        size_bytes += len(msgspec.msgpack.encode(one.record()))
        if told and size_bytes > RECORDS_BYTES:
            break
        told.append(one)
    tiles = {block: count for one in told for block, count in one.tiles.items()}
    blocks = tuple(BlockTiles(*one) for one in sorted(tiles.items()))
    reply = SketchesReply(tuple(one.record() for one in told), blocks, stored[0].body.lease)
    return Answer(reply, [one.parameters for one in told])
