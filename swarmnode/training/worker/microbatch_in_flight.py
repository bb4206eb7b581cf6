"""Microbatch in flight: the life of one microbatch at one hop, the queue of those that a stage has admitted (of the current step
and of the next one), and the meter of a training stage.

Values come in, pass the layers, and go to the next hop; gradients come back and go to the sender. One conversation with the
sender and one with the next hop carry them. If either ends, in whatever way, the microbatch ends.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeVar

import msgspec
from torch import Tensor

from swarmnode.codec.body import MAX_ROUTE_HOPS, Body
from swarmnode.codec.frames import Frame
from swarmnode.codec.messages import End, Error, Fault
from swarmnode.codec.tensors import Codec, TensorInfo, gradients_fit
from swarmnode.codec.training_messages import LARGEST_LOSS, Backward, Forward
from swarmnode.compress.codecs import LARGEST_IN_FP16, Encoded
from swarmnode.compute.executor import ByPiece, drain
from swarmnode.compute.stopwatch import BACKWARD_WORK, FORWARD_WORK
from swarmnode.compute.training.saved_activations import (
    LARGEST_SENT,
    LARGEST_SUM,
    Gradients,
    has_nan,
    is_finite,
    is_within,
)
from swarmnode.compute.training.segment import Values, moved
from swarmnode.errors import ErrorCode, NotFinite, PeerError, PeerLost, ProtocolError, SwarmnodeError, refusal
from swarmnode.links.switchboard import Channel, Switchboard
from swarmnode.measuring.meters import BACKWARD, FORWARD, TRAIN, StageMeter
from swarmnode.metrics import table
from swarmnode.metrics.metric import Histogram, Reading, Readings
from swarmnode.net.interfaces import Buffer, PeerId
from swarmnode.peer.completed_work import CompletedWork
from swarmnode.plan.view import Span
from swarmnode.serving.passage import URGENCY, MicrobatchPassage, ending, read_from, read_gradients
from swarmnode.training.coordinator.link_times import CLEANUP
from swarmnode.training.spot_checks.spot_checks import SpotChecks
from swarmnode.training.spot_checks.step_records import StoredMicrobatch
from swarmnode.training.worker.activation_compressor import ActivationCompressor
from swarmnode.training.worker.admission import LabelQueue, ReceivedLabels
from swarmnode.training.worker.memory import MAX_IN_FLIGHT
from swarmnode.training.worker.stage_state import StageState
from swarmnode.training.worker.training_parts import TrainingPart, TrainingParts

log = logging.getLogger(__name__)

T = TypeVar("T")

LONGEST_S = 3600.0  # upper bound of a lease's time
WORK = {FORWARD: FORWARD_WORK, BACKWARD: BACKWARD_WORK}


def not_finite(what: str, unit: int) -> NotFinite:
    """Return the error for numbers at layer `unit` that are NaN, infinite or too large to be sent on."""
    return NotFinite(
        f"{what} layer {unit} is NaN, infinite or huge; lower --lr or --clip, or check the data", unit=unit
    )


class TrainingMeter(StageMeter):
    """Meter of a training stage. Each pass is of one microbatch; tokens are samples times positions."""

    def __init__(self, span: Span) -> None:
        super().__init__(span, TRAIN)
        self.averaging = Histogram()  # seconds
        self.not_finite = 0

    def readings(self) -> Readings:
        """Yield the metrics of the passes, the averagings and the findings of NaN."""
        yield from super().readings()
        yield Reading(table.AVERAGING_SECONDS, self.averaging, (self.label,))
        yield Reading(table.NOT_FINITE, self.not_finite, (self.label,))


class MicrobatchStage(Protocol):
    """Interface to `TrainingStage` (`training_stage.py`): the members that a microbatch uses."""

    switchboard: Switchboard
    compressor: ActivationCompressor
    meter: TrainingMeter
    completed: CompletedWork
    parts: TrainingParts
    state: StageState
    labels: LabelQueue
    spot_checks: SpotChecks

    def lost_counts(self) -> None:
        """Handle a broken backward pass: all that its device had counted is lost."""

    def blame(self, error: NotFinite | ProtocolError, lease: int) -> None:
        """Report to the coordinator that a layer met NaN in a microbatch, or that the peer of a ProtocolError sent false values."""

    def ended(self, microbatch: MicrobatchInFlight) -> None:
        """Free the resources of a microbatch that has ended, in whatever way."""


def place_of(body: Forward) -> int:
    """Return a number for a lease at one hop, unique since a peer may be on a route more than once."""
    return body.lease * MAX_ROUTE_HOPS + body.hop


def patience_s(body: Forward) -> float:
    """Return the longest time in seconds that a hop keeps a microbatch."""
    return min(LONGEST_S, CLEANUP * body.within_s) if body.within_s else LONGEST_S


class MicrobatchInFlight(MicrobatchPassage[tuple[TrainingPart, Span]]):
    """Microbatch at one hop, whose parts come with the layers that it passes in each. `run` handles it from start to end; `end`
    stops it early. `body` has its numbers and route."""

    def __init__(self, stage: MicrobatchStage, channel: Channel, body: Forward, payload: bytes | bytearray) -> None:
        self.body = body
        self._stage = stage
        self.parts = stage.parts.passed(body, place_of(body))
        self.ends_here = body.hop + 1 == len(body.route)
        self._channel = channel
        self._payload: bytes | bytearray = payload
        self._labels: ReceivedLabels | None = None  # at the last hop
        self._expert_load = 0.0
        self._loss = 0.0
        self._present: tuple[bool, ...] = ()  # which values have a gradient for the sender
        self._sent: tuple[TensorInfo, ...] = ()  # descriptors of the values for the next hop
        self._turned = False  # the backward pass has begun
        self._spoils_sums = False  # the sums of gradients hold too large numbers since
        self.stored: StoredMicrobatch | None = None  # for replicas that check this node
        self._next: Channel | None = None
        self._answer: asyncio.Future[tuple[Backward, Buffer]] | None = None
        self.ended = False  # whether it is over
        self._timer = asyncio.get_running_loop().call_later(patience_s(body), self._give_up)
        channel.on_frame = self._receive_from_sender
        channel.on_lost = lambda _error: self.end()

    def __repr__(self) -> str:
        body = self.body
        return f"<MicrobatchInFlight {body.number} of step {body.step}, lease {body.lease}, hop {body.hop}>"

    @property
    def held_bytes(self) -> int:
        """Bytes of the payload that is not computed yet."""
        return len(self._payload)

    async def run(self) -> None:
        """Compute forward, wait for the gradients, compute backward, and answer the sender; any failure is reported to the
        sender."""
        try:
            if self.ends_here and not self.ended:
                self._labels = await self._stage.labels.labels_of(self.body.lease, self.body.within_s)
            bench = self._stage.parts.shared_executor
            if self.parts[0][0].executor is not self.parts[-1][0].executor or self.parts[-1][0].executor is not bench:
                await self._stage.state.updated()  # the update runs on the first device's thread
            infos, payload = await self.cross()
            if not self.ended:
                answer = Backward(self._loss, self._present, infos, self.body.run, self._expert_load)
                hop, run = self.body.route[self.body.hop], self._stage.state.run
                if run is not None:
                    self._stage.completed.record(self.body.seal, (hop.end - hop.start) * run.positions, run.positions)
                if self._channel.open:
                    self._channel.send(answer, payload=payload)
                    self._channel.close()
        except SwarmnodeError as error:
            if isinstance(error, NotFinite) or (isinstance(error, ProtocolError) and error.peer):
                # of malformed values, too: coordinators of each version wait for a claim then
                error.code = ErrorCode.NOT_FINITE
                self._stage.blame(error, self.body.lease)
            self._fail(error)
            if self._spoils_sums:
                self._stage.lost_counts()
        except asyncio.CancelledError:
            self.end()
            raise
        except Exception as error:
            log.exception("%r failed", self)
            self._fail(ProtocolError("a microbatch failed here", code=ErrorCode.INTERNAL))
            if self._turned and isinstance(error, RuntimeError):  # such as out of memory
                self._stage.lost_counts()
        finally:
            self.end()

    def end(self) -> None:
        """End the microbatch: close its conversations and stop its computing. Safe to call twice."""
        if self.ended:
            return
        self.ended = True
        self._timer.cancel()
        self._channel.close()
        if self._next is not None:
            self._next.close()
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(PeerLost("the microbatch was given up"))
        self._stage.ended(self)

    def _give_up(self) -> None:
        """End a microbatch whose lease expired long ago without being called back."""
        self._fail(PeerLost("the microbatch took too long", peer=self.body.route[-1].peer))
        self.end()

    async def compute(self, phase: str, part: tuple[TrainingPart, Span], work: ByPiece[T]) -> T:
        """Do `work` on the part's device and return its result. On the last device of the last hop a forward work does the
        backward pass, too. Raises PeerLost if the microbatch has ended meanwhile."""
        device, run = part[0], self._stage.state.run
        executor, size = device.executor, 0 if run is None else run.positions
        came_s = executor.clock()

        def compute() -> T:
            with device.learner.lock:
                if self.ended:
                    raise PeerLost("the microbatch was given up")
                return drain(work)

        owner = f"lease {self.body.lease}"
        result = await executor.call(URGENCY[phase], compute, kind=phase, owner=owner, size=size)
        self._stage.meter.record_hop(phase, executor.clock() - came_s)
        return result

    # works, on the thread of the part's device

    def forward(self, part: tuple[TrainingPart, Span], values: Values | None) -> ByPiece[Values]:
        """Compute a part's outputs from `values`, or, for the first part, from the payload, which is then freed. Raises
        ProtocolError, which names the sender, if a peer or the trainer sent NaN or malformed values, NotFinite if a layer
        produced NaN."""
        (device, units), body = part, self.body
        labels: Values = ()
        yield from ()
        if values is None:
            if body.hop:  # the trainer's link is not measured
                compressor, sender = self._stage.compressor, self._channel
                compressor.arrived(body.values, sender.peer, FORWARD, sender.received_bps)
            values = read_from(body.sender, body.values, self._payload, device.segment.device, bounded=body.hop > 0)
            checks, learner = self._stage.spot_checks, self._stage.state.learner
            self.stored = checks.remember(learner, body, self._payload, self._labels)
            self._payload = b""
        values = moved(values, device.segment.device)
        if self._labels is not None and part is self.parts[-1]:
            came, self._labels = self._labels, None
            labels = read_from(body.feeder, came.body.values, came.payload, device.segment.device, bounded=False)
        try:
            with self._timing(FORWARD, part):
                return device.learner.forward(place_of(body), body.number, units.start, units.end, values, labels)
        except NotFinite:
            if has_nan(values if units.start == 0 else ()) or not is_finite(labels):
                raise ProtocolError("inputs or labels with NaN", code=ErrorCode.NOT_FINITE, peer=body.feeder) from None
            raise

    def leave(self, part: tuple[TrainingPart, Span], values: Values | None) -> ByPiece[Encoded]:
        """Compute the last part's outputs, and encode them for the next peer of the route."""
        outputs = yield from self.forward(part, values)
        peer = self.body.route[self.body.hop + 1].peer
        encoded = self._encode(outputs, peer, FORWARD, self._stage.switchboard.bandwidth_bps(peer))
        self._sent = encoded[0]
        if self.stored is not None:
            self.stored.sent = encoded
        return encoded

    def finish(self, part: tuple[TrainingPart, Span], values: Values | None) -> ByPiece[Any]:
        """Compute the loss and, from it, the gradients: the part is at the end of the model."""
        (loss,) = yield from self.forward(part, values)
        self._expert_load = part[0].segment.expert_load
        gradients = yield from self.backward(part, ())
        self._loss = self._stage.state.losses[self.body.number] = float(loss)
        if self.stored is not None:
            self.stored.loss = self._loss
        return gradients

    def turn(self, part: tuple[TrainingPart, Span], answer: tuple[Backward, Buffer]) -> ByPiece[Any]:
        """Compute the backward pass from the gradients that the next hop returned. Raises ProtocolError, which names that hop, if
        they are malformed or out of reason."""
        (body, payload), peer, next_hop = answer, self.body.route[self.body.hop + 1].peer, self._next
        self._loss, self._expert_load = body.loss, body.expert_load
        if self.stored is not None:
            self.stored.answer, self.stored.gradients = body, payload
        if next_hop is not None:
            self._stage.compressor.arrived(body.values, peer, BACKWARD, next_hop.received_bps)
        if not gradients_fit(body.values, body.present, self._sent) or not abs(body.loss) <= LARGEST_LOSS:
            raise ProtocolError("a loss of no reason, or gradients of other shapes than the values", peer=peer)
        gradients = read_gradients(peer, body.present, body.values, payload, part[0].segment.device)
        return (yield from self.backward(part, gradients))

    def backward(self, part: tuple[TrainingPart, Span], gradients: Gradients) -> ByPiece[Any]:
        """Compute the gradients of a part's inputs. Those of the first part's are encoded for the sender; a trainer gets none,
        since it has no use for them. Raises NotFinite."""
        (device, units), stored, self._turned = part, self.stored, True
        yield from ()
        counting = nullcontext() if stored is None else stored.counting(device.learner, units)
        with self._timing(BACKWARD, part), counting:
            inputs = device.learner.backward(place_of(self.body), gradients)
        largest = LARGEST_IN_FP16 if device.learner.run.averaging.codec == Codec.FP16 else LARGEST_SUM
        if not is_within(list(device.learner.accumulators(*units).values()), largest / 2):
            self._spoils_sums = True
            raise not_finite("the sum of gradients of", units.start)
        if part is not self.parts[0]:
            return inputs
        if self.body.hop == 0:
            inputs = tuple(None for _ in inputs)
        self._present = tuple(gradient is not None for gradient in inputs)
        flowing = [gradient for gradient in inputs if gradient is not None]
        returned = self._encode(flowing, self._channel.peer, BACKWARD, self._channel.bandwidth_bps)
        if stored is not None:
            stored.returned = returned
            stored.finish()
        return returned

    def _timing(self, phase: str, part: tuple[TrainingPart, Span]) -> AbstractContextManager[None]:
        """Return a context that times a pass and meters it. Only the first part counts the microbatch."""
        (device, units), stage, came = part, self._stage, int(part is self.parts[0])
        assert stage.state.run is not None
        tokens, trains = stage.state.run.positions, self.body.number < stage.state.run.microbatches
        unit_tokens = units.units * tokens

        def timed(pass_s: float) -> None:
            if trains:  # there and back; held-out data only go there
                device.unit_time.record(units.units, pass_s)
            note = partial(stage.meter.record_pass, phase, pass_s, microbatches=came, unit_tokens=unit_tokens)
            device.executor.post(partial(note, tokens=tokens * came))

        return device.stopwatch.timing(timed, WORK[phase] * unit_tokens)

    def _encode(self, values: Sequence[Tensor], peer: PeerId, direction: str, bandwidth_bps: float | None) -> Encoded:
        """Encode values for `peer`. Raises NotFinite if they are such that the peer would take them for a breach of the protocol:
        another hop may have made them large."""
        if not is_within(values, LARGEST_SENT):
            forward = direction == FORWARD
            raise not_finite("what leaves", self.parts[-1][1].end - 1 if forward else self.parts[0][1].start)
        compressor, run = self._stage.compressor, self._stage.state.run
        assert run is not None
        compressor.adopt(run.compression)
        infos, payloads = compressor.encode(values, peer, direction, bandwidth_bps)
        raw_bytes, encoded_bytes = sum(value.nbytes for value in values), sum(map(len, payloads))
        codec = compressor.choices[peer, direction].codec
        self._stage.meter.record_tensors(codec, direction, raw_bytes=raw_bytes, encoded_bytes=encoded_bytes)
        return infos, payloads

    # -- conversations

    async def send_on(self, encoded: Encoded) -> tuple[Backward, Buffer]:
        """Send the outputs to the next hop, and return its answer. Raises the error that it reports, or PeerLost."""
        body = self.body
        hop = body.route[body.hop + 1]
        channel = await self._stage.switchboard.call(hop.peer, self._receive_from_next, self._lose_next)
        if self.ended:
            channel.close()
            raise PeerLost("the microbatch was given up")
        self._next = channel
        self._answer = asyncio.get_running_loop().create_future()
        onward = msgspec.structs.replace(body, hop=body.hop + 1, values=encoded[0])
        channel.send(onward, payload=encoded[1])
        return await self._answer

    def _receive_from_sender(self, _frame: Frame, body: Body) -> None:
        if isinstance(body, End | Error):
            self.end()

    def _receive_from_next(self, frame: Frame, body: Body) -> None:
        if self._answer is None or self._answer.done():
            return
        if isinstance(body, Backward) and body.run == self.body.run:
            self._answer.set_result((body, frame.payload))
        elif isinstance(body, Backward):
            self._answer.set_exception(refusal(ErrorCode.WRONG_RUN, peer=self.body.route[self.body.hop + 1].peer))
        elif isinstance(body, Fault):
            peer = self.body.route[min(body.index, len(self.body.route) - 1)].peer
            self._answer.set_exception(refusal(body.code, peer=peer))
        elif (error := ending(body, self.body.route[self.body.hop + 1].peer)) is not None:
            self._answer.set_exception(error)

    def _lose_next(self, error: PeerError) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(error)

    def _fail(self, error: SwarmnodeError) -> None:
        """Report the failed hop of the route and the reason to the sender."""
        log.info("%r: %s", self, error)
        self._stage.meter.faults[error.code] += 1
        route = self.body.route
        index = next(
            (place for place, hop in enumerate(route) if hop.peer == getattr(error, "peer", None)), self.body.hop
        )
        if self._channel.open:
            self._channel.close(Fault(0, index, error.code))


MAX_HELD_BYTES = 1 << 30  # of the payloads that they brought


class Arrival(NamedTuple):
    """Arrived FORWARD message of a microbatch: its channel, body and payload."""

    channel: Channel
    body: Forward
    payload: bytes | bytearray


class AdmissionQueue:
    """The admitted microbatches of a stage: those of the current step are in flight, those of the next one wait for its COMMIT."""

    def __init__(self, parts: TrainingParts) -> None:
        self.labels = LabelQueue(parts.ledger)
        self._parts = parts
        self._microbatches: dict[int, MicrobatchInFlight] = {}  # by `place_of`
        self._waiting: list[Arrival] = []
        self._released: set[int] = set()  # leases of this step whose FORWARD may still arrive
        self._used_places: set[int] = set()  # places that were taken in this step: each may be used once

    def is_released(self, lease: int) -> bool:
        """Return whether the coordinator has called back this lease in the current step."""
        return lease in self._released

    def reserve(self, arrival: Arrival) -> bool:
        """Return whether a microbatch is new and has room, and reserve its memory. A lease is computed once, and senders are not
        trusted to keep within the limits."""
        held_bytes = sum(microbatch.held_bytes for microbatch in self._microbatches.values())
        held_bytes += sum(len(other.payload) for other in self._waiting) + len(arrival.payload)
        has_room = len(self._microbatches) + len(self._waiting) < MAX_IN_FLIGHT and held_bytes <= MAX_HELD_BYTES
        place = place_of(arrival.body)
        return has_room and place not in self._used_places and self._parts.admit(arrival.body, place)

    def wait(self, arrival: Arrival) -> None:
        """Keep a microbatch of the next step until that step begins."""
        self._used_places.add(place_of(arrival.body))
        self._waiting.append(arrival)

    def begin(self, microbatch: MicrobatchInFlight) -> None:
        """Record a microbatch that this node has begun to compute."""
        self._used_places.add(place_of(microbatch.body))
        self._microbatches[place_of(microbatch.body)] = microbatch

    def ended(self, microbatch: MicrobatchInFlight) -> None:
        """Remove a microbatch that has ended, and free its memory and labels. Safe to call twice."""
        place = place_of(microbatch.body)
        if self._microbatches.pop(place, None) is not None:
            self._parts.ended(place)
            self.labels.drop([microbatch.body.lease])

    def release(self, leases: Iterable[int]) -> None:
        """End the microbatches of these leases, as the coordinator has called them back; those that arrive later are refused."""
        called = set(leases)
        self._released |= called
        self.labels.drop(called)
        for microbatch in [microbatch for microbatch in self._microbatches.values() if microbatch.body.lease in called]:
            microbatch.end()

    def give_up_all(self) -> None:
        """End all microbatches, those that wait included, and drop all labels."""
        for microbatch in list(self._microbatches.values()):
            microbatch.end()
        for arrival in self._waiting:
            arrival.channel.close()
            self._parts.ended(place_of(arrival.body))
        self._waiting.clear()
        self.labels.clear()

    def new_term(self) -> None:
        """Begin a new coordinator's term: microbatches of earlier leases are given up."""
        self._released.clear()
        self._used_places.clear()
        self.give_up_all()

    def next_step(self, step: int) -> list[Arrival]:
        """Begin `step`, and return the microbatches that had arrived too early and waited for it."""
        self._released.clear()
        self.labels.next_step(step)
        self._used_places.clear()
        waiting, self._waiting = self._waiting, []
        return waiting
