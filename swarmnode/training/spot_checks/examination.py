"""Examination: one microbatch of another stage, asked for after its commitment, computed once more here and compared."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from random import Random

from torch import Tensor

from swarmnode.codec.audit_messages import SEED_BYTES, SKETCH_BYTES, SKETCH_VALUES
from swarmnode.codec.body import SHARED
from swarmnode.codec.spot_check_messages import (
    CommitmentReply,
    GetCommitment,
    GetMicrobatch,
    GetSketches,
    MicrobatchRecord,
    MicrobatchReply,
    SketchesReply,
)
from swarmnode.codec.tensors import Codec, TensorInfo, payload_bytes
from swarmnode.codec.training_fields import check_rules
from swarmnode.compress.codecs import decode, decode_values, encode
from swarmnode.compress.topk import keep_largest
from swarmnode.compute.serving.sketch import deviations, read_sketch, read_sketches, rows_sketched, sketches
from swarmnode.compute.training.device_learners import DeviceLearners
from swarmnode.compute.training.gradient_sketch import (
    LARGEST_TILE,
    LEAST,
    BlockSketches,
    ContributionSketch,
    in_rows,
    step_seed,
    tile_count,
)
from swarmnode.compute.training.recomputation import Recomputation, recompute
from swarmnode.compute.training.saved_activations import Gradients
from swarmnode.errors import ProtocolError
from swarmnode.net.interfaces import Buffer, PeerId
from swarmnode.net.links.switchboard import Switchboard
from swarmnode.peer.questions import ask_one
from swarmnode.plan.audits.judgement import CONTRIBUTED, SMALLEST, Calibration, Judgement, Tolerance, judge_states
from swarmnode.swarm.records.statement import open_commitment
from swarmnode.training.spot_checks.step_records import Committer, Place, read_entries
from swarmnode.training.worker.admission import is_of_its_size

SUMS_ROUND = 4.0  # times more: what a microbatch added is the difference of two sums
LOSS = 0.02  # of itself

Shapes = tuple[tuple[int, tuple[int, ...]], ...]
"""Of values: dtype and shape of each."""


class FalseWork(ProtocolError):
    """A stage shows something else than it signed, or than follows from it."""


@dataclass(frozen=True)
class ShownMicrobatch:
    """What a stage shows of one microbatch."""

    record: MicrobatchRecord
    received: bytes
    labels: bytes
    gradients: bytes
    parameters_S: Tensor
    sent: Sequence[Tensor]  # sketch_TK of each
    returned: Sequence[Tensor]


@dataclass(eq=False)
class Examination:
    """Examination of the work of `peer` in the step that the learner is at. `usual`: what comes in at each first unit here; `dice`
    draws what the peer must not foresee."""

    board: Switchboard
    peer: PeerId
    committer: Committer
    learner: DeviceLearners
    usual: Mapping[int, Shapes]
    dice: Random

    def __post_init__(self) -> None:
        self.commitment = b""  # as it was signed
        self._entries: dict[Place, bytes] = {}
        self._step = self.learner.step
        self._seed = self.dice.randbytes(SEED_BYTES)

    def __repr__(self) -> str:
        return f"<Examination of {self.peer[-8:]} at step {self._step}>"

    async def fetch(self) -> ShownMicrobatch | None:
        """One microbatch of those that it committed to, drawn now; None where it has none of our units, or one unlike all that came
        here. Raises FalseWork, PeerError, NetworkDown."""
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
        if (record.number, record.start) != (number, start) or record.digest != entries[number, start]:
            raise FalseWork("a microbatch is not what was committed to", peer=self.peer)
        return self._read(record, payload) if record.end <= segment.end and self._is_usual(record) else None

    async def _commitment(self) -> dict[tuple[int, int], bytes]:
        reply, payload = await ask_one(
            self.board, self.peer, GetCommitment(self.learner.run.id, self._step), CommitmentReply
        )
        said = open_commitment(reply.commitment, self.committer.swarm, self.committer.verify)
        asked = (self.peer, self.learner.run.id, self._step, hashlib.sha256(payload).digest())
        if (said.peer, said.run, said.step, said.entries) != asked:
            raise FalseWork("a commitment to something else than was asked", peer=self.peer)
        self.commitment = reply.commitment
        return read_entries(payload, said.count)

    async def fetch_sums(self, counts: Mapping[int, int]) -> BlockSketches:
        """Fetch the sums of the sketches of all that the peer has committed to, after `fetch`. `counts`: by block, of how many
        microbatches it contributes the gradients. Raises ProtocolError if it shows fewer; FalseWork, PeerError, NetworkDown."""
        sums = BlockSketches()
        shown: Counter[int] = Counter()
        due = list(self._entries.items())
        while due:
            question = GetSketches(self.learner.run.id, self._step, len(self._entries) - len(due))
            reply, payload = await ask_one(self.board, self.peer, question, SketchesReply)
            tiles, view = self._tiles(reply), memoryview(payload)
            for record, (place, digest) in zip(reply.records, due, strict=False):
                if (record.number, record.start) != place or record.digest != digest:
                    raise FalseWork("a microbatch is not what was committed to", peer=self.peer)
                view = self._add_up(record, tiles, view, sums)
                shown.update(range(record.start, record.end))
            if len(view) or len(reply.records) > len(due):
                raise ProtocolError("sketches that nobody asked for", peer=self.peer)
            due = due[len(reply.records) :]
        if any(shown[block] != count for block, count in counts.items()):
            raise ProtocolError("not all that is contributed was committed to", peer=self.peer)
        return sums

    def _tiles(self, reply: SketchesReply) -> dict[int, int]:
        """How long the sketch of each block is: of those that are held here, and of those that the peer tells of."""
        segment, told = self.learner.segment, {one.block: one.tiles for one in reply.blocks}
        own = {
            block: tile_count(sum(parameter.numel() for parameter in parameters))
            for block, parameters in self.learner.parameters(segment.start, segment.end).items()
        }
        if any(own.get(block, count) != count for block, count in told.items()):
            raise ProtocolError("sketches of another model", peer=self.peer)
        return told | own

    def _add_up(
        self, record: MicrobatchRecord, tiles: Mapping[int, int], view: memoryview, sums: BlockSketches
    ) -> memoryview:
        """Add a microbatch's sketch, with which `view` begins, to those of its blocks; what comes behind it."""
        is_end = record.start == 0 or record.end == self.learner.segment.units
        blocks = [SHARED] * (is_end and SHARED in tiles) + list(range(record.start, record.end))
        if not tiles.keys() >= set(blocks):
            raise ProtocolError("sketches of units of which nothing is known", peer=self.peer)
        counts = {block: tiles[block] for block in blocks}
        sketch, rest = view[: 4 * sum(counts.values())], view[4 * sum(counts.values()) :]
        if hashlib.sha256(sketch).digest() != record.parameters:
            raise FalseWork("a payload that its author did not sign", peer=self.peer)
        for block, part_S in zip(counts, read_sketch(sketch).split(list(counts.values())), strict=True):
            sums.add(block, part_S)
        return rest

    def _read(self, record: MicrobatchRecord, payload: Buffer) -> ShownMicrobatch:
        """The parts of an answer, each of which has to be what was signed."""
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
            raise FalseWork("a payload that its author did not sign", peer=self.peer)
        sent, returned = (
            read_sketches(part, sum(counts)).split(counts) for part, counts in zip(crossed, rows, strict=True)
        )
        return ShownMicrobatch(record, received, labels, gradients, read_sketch(parameters), sent, returned)

    def _is_usual(self, record: MicrobatchRecord) -> bool:
        """Who shows it decides nothing about our memory; and it may have been sent what it did not ask for."""
        values, run = (*record.received.values, *record.labels.values), self.learner.run
        known = self.usual.get(record.start)
        return is_of_its_size(values, run) and (shapes_of(values) == known if known is not None else run.sequence > 0)

    def compare(self, shown: ShownMicrobatch, calibration: Calibration) -> Judgement | None:
        """On the executor, while the step lasts: None where it is over. Raises FalseWork where no computing is needed to see it."""
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
            raise FalseWork(f"a loss of {record.loss}, which is {float(again.outputs[0])}", peer=self.peer)
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
        """Of what was sent on, of what was returned, and of what was added to the parameters' gradients."""
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
                continue  # it holds what was left out of others, too
            ours = sketches(as_sent(values, crossing.values), self._seed)
            pairs = zip(ours, theirs, strict=True)
            apart = [deviation for pair in pairs for deviation in deviations(*pair, least=LEAST)]
            tolerance = calibration.tolerance(number_format, codec, units=units, deviations=apart)
            judgement = judge_states(apart, tolerance)
            if not judgement.false:
                calibration.note(self.peer, number_format, codec, apart, units=units)
            yield judgement
        if shown.parameters_S.shape != again.sketch_S.shape:
            raise FalseWork("a sketch of other parameters", peer=self.peer)
        apart = deviations(in_rows(shown.parameters_S), in_rows(again.sketch_S), least=LEAST)
        tolerance = calibration.tolerance(number_format, Codec.NONE, units=units, deviations=apart)
        yield judge_states(apart, replace(tolerance, deviation=SUMS_ROUND * tolerance.deviation))


def judge_contribution(
    watched: ContributionSketch, sums: Mapping[int, Tensor], codec: Codec = Codec.NONE
) -> Judgement | None:
    """Judge what a stage contributed, in this codec, by the sketches of all that it committed to; None if no tile of it came whole
    that the codec can tell from nothing. They are sums of the same numbers: nothing honest lies between but rounding."""
    tolerated = CONTRIBUTED[codec]
    least = SMALLEST.get(codec, 0.0) * math.sqrt(SKETCH_VALUES * LARGEST_TILE)
    apart = watched.deviations(sums, longer_than=least / tolerated)
    return judge_states(apart, Tolerance(tolerated, beyond=0.0, other_tokens=0.0)) if apart else None


def as_sent(values: Sequence[Tensor], infos: Sequence[TensorInfo]) -> list[Tensor]:
    """Return our float values as another stage's would have arrived. Raises ProtocolError if they are not alike in number and
    shape."""
    if [tuple(value.shape) for value in values] != [info.shape for info in infos]:
        raise ProtocolError("what was sent has other shapes than what is computed from it")
    pairs = zip(values, infos, strict=True)
    return [_as_decoded(value, info) for value, info in pairs if value.is_floating_point()]


def _as_decoded(value: Tensor, info: TensorInfo) -> Tensor:
    if info.codec == Codec.TOPK:  # whose encoder goes by a sample, and would take a few more or less the second time
        return keep_largest(value.reshape(-1), info.param).view(value.shape)
    return decode(*encode(value, Codec(info.codec)))


def shapes_of(values: Sequence[TensorInfo]) -> Shapes:
    """However they travel."""
    return tuple((info.dtype, info.shape) for info in values)


def pieces(payload: Buffer, sizes: Sequence[int]) -> list[bytes]:
    """Cut a payload into pieces of these sizes, one after another."""
    return [bytes(payload[end - size : end]) for size, end in zip(sizes, accumulate(sizes), strict=True)]
