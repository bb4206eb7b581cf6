"""Examination: a microbatch of another stage is fetched after the stage has committed to it, recomputed here and compared."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from random import Random

import torch
from torch import Tensor

from swarmnode.codec.audit_messages import (
    SEED_BYTES,
    SKETCH_BYTES,
    SKETCH_VALUES,
    CommitmentReply,
    GetCommitment,
    GetMicrobatch,
    GetSketches,
    MicrobatchRecord,
    MicrobatchReply,
    SketchesReply,
)
from swarmnode.codec.body import SHARED
from swarmnode.codec.tensors import Codec, TensorInfo, payload_bytes
from swarmnode.codec.training_messages import check_rules
from swarmnode.compress.codecs import as_decoded, decode_values
from swarmnode.compute.serving.sketch import (
    deviations,
    is_sketched,
    read_sketch,
    read_sketches,
    rows_sketched,
    sketches,
)
from swarmnode.compute.training.device_learners import DeviceLearners
from swarmnode.compute.training.recomputation import (
    LARGEST_TILE,
    LEAST,
    BlockSketches,
    ContributionSketch,
    Recomputation,
    additions_apart,
    recompute,
    step_seed,
    tile_count,
)
from swarmnode.compute.training.saved_activations import Gradients
from swarmnode.errors import ProtocolError
from swarmnode.links.switchboard import Switchboard
from swarmnode.net.interfaces import Buffer, PeerId
from swarmnode.peer.questions import ask_one
from swarmnode.plan.audits import Calibration, Judgement, Tolerance, judge_states
from swarmnode.swarm.records.statement import open_commitment
from swarmnode.tolerances import CONTRIBUTED, LOSS, SMALLEST, SUMS_ROUND
from swarmnode.training.spot_checks.step_records import Committer, Place, StoredMicrobatch, read_entries
from swarmnode.training.worker.admission import is_of_its_size

Shapes = tuple[tuple[int, tuple[int, ...]], ...]
"""Dtype and shape of each value."""


class FalseWork(ProtocolError):
    """Data of a stage that differ from those it signed, or from those that follow from its inputs."""


@dataclass(frozen=True)
class ShownMicrobatch:
    """Microbatch as a stage shows it."""

    record: MicrobatchRecord
    received: bytes
    labels: bytes
    gradients: bytes
    parameters_S: Tensor
    sent: Sequence[Tensor]  # sketch_TK of each value
    returned: Sequence[Tensor]


@dataclass(eq=False)
class Examination:
    """An examination of the work of `peer` in the learner's current step. `usual`: shapes of the inputs at each first unit here.
    `dice` draws numbers that the peer must not foresee."""

    board: Switchboard
    peer: PeerId
    committer: Committer
    learner: DeviceLearners
    usual: Mapping[int, Shapes]
    dice: Random

    def __post_init__(self) -> None:
        self.commitment = b""  # as signed
        self._entries: dict[Place, bytes] = {}
        self._added = BlockSketches()  # sizes of the additions of all microbatches
        self._step = self.learner.step
        self._seed = self.dice.randbytes(SEED_BYTES)

    def __repr__(self) -> str:
        return f"<Examination of {self.peer[-8:]} at step {self._step}>"

    async def fetch(self) -> ShownMicrobatch | None:
        """Fetch a random microbatch of those that the peer committed to. Returns None if none of them is within our units, or if it
        has unusual shapes. Raises FalseWork, PeerError, NetworkDown, and ValueError if the list of entries is malformed."""
        segment = self.learner.segment
        entries = await self._commitment()
        self._entries = entries
        able = [place for place in entries if segment.start <= place[1] < segment.end]
        if not able:
            return None
        number, start = self.dice.choice(able)
        question = GetMicrobatch(self.learner.run.id, self._step, number, start, self._seed)
        reply, payload = await ask_one(self.board, self.peer, question, MicrobatchReply)
        record = reply.record
        self._check_committed(record, (number, start), entries[number, start])
        return self._read(record, payload) if record.end <= segment.end and self._is_usual(record) else None

    async def _commitment(self) -> dict[tuple[int, int], bytes]:
        reply, payload = await ask_one(
            self.board, self.peer, GetCommitment(self.learner.run.id, self._step), CommitmentReply
        )
        said = open_commitment(reply.commitment, self.committer.swarm, self.committer.verify)
        asked = (self.peer, self.learner.run.id, self._step, hashlib.sha256(payload).digest())
        if (said.peer, said.run, said.step, said.entries) != asked:
            raise FalseWork("the commitment is not to the requested step", peer=self.peer)
        self.commitment = reply.commitment
        return read_entries(payload, said.count)

    def _check_committed(self, record: MicrobatchRecord, place: Place, digest: bytes) -> None:
        """Raise FalseWork if a record is not of this place and digest, which the peer's commitment has."""
        if (record.number, record.start) != place or record.digest != digest:
            raise FalseWork("the microbatch differs from the commitment", peer=self.peer)

    async def fetch_exchanged(self, place: Place, lease: int) -> MicrobatchRecord | None:
        """Fetch the record of a microbatch that the peer exchanged with this stage under a lease, as it committed to it. Returns
        None if its record is of another attempt, or it does not say. Raises as `fetch`."""
        entries = await self._commitment()
        question = GetSketches(self.learner.run.id, self._step, list(entries).index(place))
        reply, _ = await ask_one(self.board, self.peer, question, SketchesReply)
        record = reply.records[0]
        self._check_committed(record, place, entries[place])
        return record if reply.lease == lease else None

    async def fetch_sums(self, counts: Mapping[int, int]) -> BlockSketches:
        """Fetch the sketches of all microbatches that the peer committed to, and return their sums. Call it after `fetch`.

        `counts`: number of microbatches that the peer contributes, by block. Raises ProtocolError if it shows another
        number; FalseWork, PeerError, NetworkDown.
        """
        sums = BlockSketches()
        shown: Counter[int] = Counter()
        due = list(self._entries.items())
        while due:
            question = GetSketches(self.learner.run.id, self._step, len(self._entries) - len(due))
            reply, payload = await ask_one(self.board, self.peer, question, SketchesReply)
            tiles, view = self._tiles(reply), memoryview(payload)
            for record, (place, digest) in zip(reply.records, due, strict=False):
                self._check_committed(record, place, digest)
                view = self._add_up(record, tiles, view, sums)
                shown.update(range(record.start, record.end))
            if len(view) or len(reply.records) > len(due):
                raise ProtocolError("it sent sketches that were not requested", peer=self.peer)
            due = due[len(reply.records) :]
        if any(shown[block] != count for block, count in counts.items()):
            raise ProtocolError("it contributed other microbatches than it committed to", peer=self.peer)
        return sums

    def _tiles(self, reply: SketchesReply) -> dict[int, int]:
        """Return the number of tiles of each block's sketch, for our blocks and those that the peer names. Raises
        ProtocolError if they contradict."""
        segment, told = self.learner.segment, {one.block: one.tiles for one in reply.blocks}
        own = {
            block: tile_count(sum(parameter.numel() for parameter in parameters))
            for block, parameters in self.learner.parameters(segment.start, segment.end).items()
        }
        if any(own.get(block, count) != count for block, count in told.items()):
            raise ProtocolError("its sketches are of another model", peer=self.peer)
        return told | own

    def _add_up(
        self, record: MicrobatchRecord, tiles: Mapping[int, int], view: memoryview, sums: BlockSketches
    ) -> memoryview:
        """Add the microbatch's sketch at the beginning of `view` to the sums of its blocks. Returns the rest of `view`. Raises
        FalseWork if it is not the signed sketch, ProtocolError if a block is unknown."""
        is_end = record.start == 0 or record.end == self.learner.segment.units
        blocks = [SHARED] * (is_end and SHARED in tiles) + list(range(record.start, record.end))
        if not tiles.keys() >= set(blocks):
            raise ProtocolError("its sketches are of unknown layers", peer=self.peer)
        counts = {block: tiles[block] for block in blocks}
        sketch, rest = view[: 4 * sum(counts.values())], view[4 * sum(counts.values()) :]
        if hashlib.sha256(sketch).digest() != record.parameters:
            raise FalseWork("the payload differs from its signed digest", peer=self.peer)
        for block, part_S in zip(counts, read_sketch(sketch).split(list(counts.values())), strict=True):
            sums.add(block, part_S)
            self._added.add(block, part_S.abs())
        return rest

    def _read(self, record: MicrobatchRecord, payload: Buffer) -> ShownMicrobatch:
        """Split an answer into its parts. Raises FalseWork if a part differs from its signed digest, ProtocolError if it is
        too short."""
        sizes = [
            sum(map(payload_bytes, crossing.values)) for crossing in (record.received, record.labels, record.gradients)
        ]
        rows = [rows_sketched(crossing.values) for crossing in (record.sent, record.returned)]
        sketched = [SKETCH_BYTES * sum(counts) for counts in rows]
        rest = len(payload) - sum(sizes) - sum(sketched)
        check_rules("MICROBATCH", {"a payload as long as its descriptors say": rest >= 0})
        received, labels, gradients, parameters, *crossed = parts = pieces(payload, [*sizes, rest, *sketched])
        signed = (record.received.digest, record.labels.digest, record.gradients.digest, record.parameters)
        if signed != tuple(hashlib.sha256(part).digest() for part in parts[:4]) or rest % 4:
            raise FalseWork("the payload differs from its signed digest", peer=self.peer)
        sent, returned = (
            read_sketches(part, sum(counts)).split(counts) for part, counts in zip(crossed, rows, strict=True)
        )
        return ShownMicrobatch(record, received, labels, gradients, read_sketch(parameters), sent, returned)

    def _is_usual(self, record: MicrobatchRecord) -> bool:
        """Return whether the shapes are usual: the shown microbatch must not exhaust our memory, and its stage may have
        been sent unwanted data."""
        given, run = (record.received.values, record.labels.values), self.learner.run
        known = self.usual.get(record.start)
        fits = all(is_of_its_size(values, run) for values in given if values)
        return fits and (shapes_of((*given[0], *given[1])) == known if known is not None else run.sequence > 0)

    def compare(self, shown: ShownMicrobatch, calibration: Calibration) -> Judgement | None:
        """Recompute the microbatch and judge it. Returns None if the learner's step is over or there is nothing to compare. Must
        run on the executor. Raises FalseWork if the loss or the shape of the sketch is wrong."""
        record, learner = shown.record, self.learner
        if learner.step != self._step:
            return None
        device, seed = learner.segment.device, step_seed(learner.run.id, self._step)
        values = decode_values(record.received.values, shown.received, device)
        labels = decode_values(record.labels.values, shown.labels, device)
        again = recompute(
            learner, record.number, record.start, record.end, values, labels, self._gradients(shown), seed
        )
        if record.end == learner.segment.units and not math.isclose(float(again.outputs[0]), record.loss, rel_tol=LOSS):
            raise FalseWork(f"a loss of {record.loss}, but {float(again.outputs[0])} is computed here", peer=self.peer)
        judgements = self._judgements(shown, again, calibration)
        return max(judgements, key=lambda judgement: (judgement.false, judgement.worst), default=None)

    def _gradients(self, shown: ShownMicrobatch) -> Gradients:
        record = shown.record
        values = decode_values(record.gradients.values, shown.gradients, self.learner.segment.device)
        flowing = iter(values)
        return tuple(next(flowing) if present else None for present in record.present)

    def _judgements(
        self, shown: ShownMicrobatch, again: Recomputation, calibration: Calibration
    ) -> Iterator[Judgement]:
        """Yield the judgements of the outputs, the returned gradients, and the additions to the parameters' gradients. Raises
        FalseWork if the sketch has another shape than ours, or tokens that were passed on are others."""
        record, units = shown.record, shown.record.end - shown.record.start
        number_format = "bfloat16" if self.learner.run.autocast else "float32"
        outputs = () if record.end == self.learner.segment.units else again.outputs
        returned = [gradient for gradient in again.gradients if gradient is not None] if record.returned.values else ()
        for values, crossing, theirs in (
            (outputs, record.sent, shown.sent),
            (returned, record.returned, shown.returned),
        ):
            codec = Codec(max((info.codec for info in crossing.values), default=Codec.NONE))
            if codec == Codec.TOPK and self.learner.run.compression.feedback:
                continue  # it contains the residuals of other microbatches
            told = [value for value in as_decoded(values, crossing.values) if is_sketched(value)]
            apart: list[float] = []
            for value, ours_TK, theirs_TK in zip(told, sketches(told, self._seed), theirs, strict=True):
                if value.is_floating_point():
                    apart += deviations(ours_TK, theirs_TK, least=LEAST)
                elif not torch.equal(ours_TK, theirs_TK):  # sums of whole numbers have no rounding
                    raise FalseWork("the tokens that it passed on are not those that it got", peer=self.peer)
            tolerance = calibration.tolerance(number_format, codec, units=units, deviations=apart)
            judgement = judge_states(apart, tolerance)
            if not judgement.false:
                calibration.record(self.peer, number_format, codec, apart, units=units)
            yield judgement
        if shown.parameters_S.shape != again.sketch_S.shape:
            raise FalseWork("the sketch is of other parameters", peer=self.peer)
        added_S = torch.cat([self._added[block] for block in sorted(self.learner.parameters(record.start, record.end))])
        apart = additions_apart(shown.parameters_S, again.sketch_S, added_S)
        tolerance = calibration.tolerance(number_format, Codec.NONE, units=units, deviations=apart)
        yield judge_states(apart, replace(tolerance, deviation=SUMS_ROUND * tolerance.deviation))


def differ(own: StoredMicrobatch, theirs: MicrobatchRecord) -> bool:
    """Return whether a neighbour's record names other data on the edge between the two stages than arrived and left here."""
    ours = own.record()
    if theirs.end == ours.start:
        edge = ((theirs.sent, ours.received), (theirs.gradients, ours.returned))
    else:
        edge = ((theirs.received, ours.sent), (theirs.returned, ours.gradients))
    return any((one.values, one.digest) != (other.values, other.digest) for one, other in edge)


def judge_contribution(
    watched: ContributionSketch, sums: Mapping[int, Tensor], codec: Codec = Codec.NONE
) -> Judgement | None:
    """Judge a stage's contribution, in this codec, by the sketches of all microbatches that it committed to.

    Returns None if no tile arrived whole that the codec can tell from zero. Both are sums of the same numbers: an honest
    stage's differ by rounding only.
    """
    tolerated = CONTRIBUTED[codec]
    least = SMALLEST.get(codec, 0.0) * math.sqrt(SKETCH_VALUES * LARGEST_TILE)
    apart = watched.deviations(sums, longer_than=least / tolerated)
    return judge_states(apart, Tolerance(tolerated, beyond=0.0, other_tokens=0.0)) if apart else None


def shapes_of(values: Sequence[TensorInfo]) -> Shapes:
    """Return the shapes, whatever the codec."""
    return tuple((info.dtype, info.shape) for info in values)


def pieces(payload: Buffer, sizes: Sequence[int]) -> list[bytes]:
    """Cut a payload into pieces of these sizes, one after another."""
    return [bytes(payload[end - size : end]) for size, end in zip(sizes, accumulate(sizes), strict=True)]
