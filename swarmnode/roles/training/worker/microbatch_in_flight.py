"""Microbatch in flight: one microbatch at one hop. Values come in, are computed, and go on; gradients come back, and so do ours.

One conversation with the sender and one with the next hop carry it; the end of either, in whatever way, is its end.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol, TypeVar

import msgspec
from torch import Tensor

from swarmnode.codec.body import MAX_ROUTE_HOPS
from swarmnode.codec.frames import Frame
from swarmnode.codec.messages import Body, End, Error, Fault
from swarmnode.codec.training_messages import Backward, Forward
from swarmnode.compress.values import Encoded, decode_values
from swarmnode.compute.executor import Executor, Urgency
from swarmnode.compute.stopwatch import Stopwatch
from swarmnode.compute.training.learner import Learner
from swarmnode.errors import ErrorCode, NotFinite, PeerError, PeerLost, ProtocolError, SwarmnodeError, refusal
from swarmnode.net.interfaces import Buffer, PeerId
from swarmnode.net.links.switchboard import Channel, Switchboard
from swarmnode.roles.credit.completed_work import CompletedWork
from swarmnode.roles.measuring.meters import BACKWARD, FORWARD
from swarmnode.roles.training.coordinator.answer_times import CLEANUP
from swarmnode.roles.training.spot_checks.step_records import KeptMicrobatch
from swarmnode.roles.training.worker.activation_compressor import ActivationCompressor
from swarmnode.roles.training.worker.label_queue import ReceivedLabels
from swarmnode.roles.training.worker.meter import TrainingMeter
from swarmnode.roles.training.worker.unit_time import UnitTime
from swarmnode.swarm.records.run import Run

log = logging.getLogger(__name__)
T = TypeVar("T")

LONGEST_S = 3600.0  # whatever a lease says
URGENCY = {FORWARD: Urgency.FORWARD, BACKWARD: Urgency.BACKWARD}


class MicrobatchStage(Protocol):
    """What a microbatch needs of the stage that it is at (`stage.py`)."""

    bench: Executor
    switchboard: Switchboard
    compressor: ActivationCompressor
    meter: TrainingMeter
    stopwatch: Stopwatch
    unit_time: UnitTime
    completed: CompletedWork

    @property
    def run(self) -> Run | None:
        """The one in force."""
        ...

    @property
    def learner(self) -> Learner:
        """Of the run in force."""
        ...

    async def labels_of(self, body: Forward) -> ReceivedLabels:
        """What the loss needs of a microbatch that ends here. Raises PeerError where it does not come."""
        ...

    def remember(self, body: Forward, payload: Buffer, labels: ReceivedLabels | None) -> KeptMicrobatch | None:
        """A microbatch is about to be computed; what to keep of it for replicas that check. On the bench."""
        ...

    def note_loss(self, number: int, loss: float) -> None:
        """A microbatch has been through the whole model."""

    def blame(self, error: NotFinite) -> None:
        """A unit met NaN."""

    def ended(self, microbatch: MicrobatchInFlight) -> None:
        """It is over, in whatever way."""


def place_of(body: Forward) -> int:
    """A number for a lease at one hop: a peer may be in a route more than once."""
    return body.lease * MAX_ROUTE_HOPS + body.hop


def patience_s(body: Forward) -> float:
    """For how long a hop keeps a microbatch, at most."""
    return min(LONGEST_S, CLEANUP * body.within_s) if body.within_s else LONGEST_S


def tokens_of(run: Run) -> int:
    """Of a microbatch; samples, where there are no tokens."""
    return run.microbatch * max(1, run.sequence)


class MicrobatchInFlight:
    """`run` lives its whole life; `cancel` ends it early. `body` says what and where."""

    def __init__(self, stage: MicrobatchStage, channel: Channel, body: Forward, payload: bytes | bytearray) -> None:
        self.body = body
        self._stage = stage
        self._channel = channel
        self._payload: bytes | bytearray = payload
        self._labels: ReceivedLabels | None = None  # at the last hop
        self.kept: KeptMicrobatch | None = None  # for replicas that check
        self._next: Channel | None = None
        self._answer: asyncio.Future[tuple[Backward, bytes | bytearray]] | None = None
        self._ended = False
        self._timer = asyncio.get_running_loop().call_later(patience_s(body), self._give_up)
        channel.on_frame = self._hear_sender
        channel.on_lost = lambda _error: self.end()

    def __repr__(self) -> str:
        body = self.body
        return (
            f"<MicrobatchInFlight of microbatch {body.number} of step {body.step}, lease {body.lease}, hop {body.hop}>"
        )

    @property
    def ended(self) -> bool:
        return self._ended

    @property
    def held_bytes(self) -> int:
        """Of what came in and is not computed yet."""
        return len(self._payload)

    async def run(self) -> None:
        """Forward, wait for the gradients, back. What goes wrong is told to the sender."""
        body = self.body
        try:
            if body.hop + 1 == len(body.route):
                self._check_alive()
                self._labels = await self._stage.labels_of(body)
                loss, encoded, present = await self._compute(FORWARD, self._there_and_back)
            else:
                values = await self._compute(FORWARD, self._forward)
                answer, payload = await self._ask_next(values)
                loss = answer.loss
                if self.kept is not None:
                    self.kept.answer, self.kept.gradients = answer, payload
                encoded, present = await self._compute(
                    BACKWARD, lambda: self._backward(self._gradients(answer, payload))
                )
            if not self._ended:
                self._finish(Backward(loss, present, encoded[0], body.run), encoded[1])
        except SwarmnodeError as error:
            if isinstance(error, NotFinite):
                self._stage.blame(error)
            self._fail(error)
        except asyncio.CancelledError:
            self.end()
            raise
        except Exception:
            log.exception("%r failed", self)
            self._fail(ProtocolError("a microbatch failed here", code=ErrorCode.INTERNAL))
        finally:
            self.end()

    def end(self) -> None:
        """Forget it all; whoever computes for it stops. Safe to call twice."""
        if self._ended:
            return
        self._ended = True
        self._timer.cancel()
        self._channel.close()
        if self._next is not None:
            self._next.close()
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(PeerLost("the microbatch was given up"))
        self._stage.ended(self)

    def _give_up(self) -> None:
        """Long after the lease's deadline: whoever gave it out has not called it back."""
        self._fail(PeerLost("the microbatch took too long", peer=self.body.route[-1].peer))
        self.end()

    async def _compute(self, phase: str, function: Callable[[], T]) -> T:
        """Wait for the bench, and have it done there. At the last hop the way forward leads back as well."""
        bench, run = self._stage.bench, self._stage.run
        came_s, size = bench.clock(), 0 if run is None else tokens_of(run)
        result = await bench.call(URGENCY[phase], function, kind=phase, owner=f"lease {self.body.lease}", size=size)
        self._stage.meter.note_hop(phase, bench.clock() - came_s)
        return result

    # -- compute, on the bench

    def _forward(self) -> Encoded:
        outputs = self._outputs()
        peer = self.body.route[self.body.hop + 1].peer
        bandwidth_bps = self._stage.switchboard.bandwidth_bps(peer)
        encoded = self._encode(outputs, peer, FORWARD, bandwidth_bps)
        if self.kept is not None:
            self.kept.sent = encoded
        return encoded

    def _there_and_back(self) -> tuple[float, Encoded, tuple[bool, ...]]:
        """At the last hop the loss's gradient is at hand."""
        (loss,) = self._outputs()
        encoded, present = self._backward(())
        self._stage.note_loss(self.body.number, float(loss))
        if self.kept is not None:
            self.kept.loss = float(loss)
        return float(loss), encoded, present

    def _outputs(self) -> tuple[Tensor, ...]:
        """What this hop's units make of what came in, which is let go."""
        body, learner = self.body, self._stage.learner
        self._check_alive()
        if body.hop:  # what a trainer feeds is its own affair
            compressor, sender = self._stage.compressor, self._channel
            compressor.arrived(body.values, sender.peer, FORWARD, sender.received_bps)
        device, came = learner.segment.device, self._labels
        values = decode_values(body.values, self._payload, device)
        labels = () if came is None else decode_values(came.body.values, came.payload, device)
        self.kept = self._stage.remember(body, self._payload, came)
        self._payload, self._labels = b"", None
        hop = body.route[body.hop]
        with self._passing(FORWARD):
            return learner.forward(place_of(body), body.number, hop.start, hop.end, values, labels)

    def _backward(self, gradients: tuple[Tensor | None, ...]) -> tuple[Encoded, tuple[bool, ...]]:
        self._check_alive()
        learner, kept = self._stage.learner, self.kept
        with self._passing(BACKWARD), kept.counting(learner) if kept is not None else nullcontext():
            inputs = learner.backward(place_of(self.body), gradients)
        if self.body.hop == 0:
            inputs = tuple(None for _ in inputs)  # the trainer has no use for them
        present = tuple(gradient is not None for gradient in inputs)
        flowing = [gradient for gradient in inputs if gradient is not None]
        channel = self._channel
        encoded = self._encode(flowing, channel.peer, BACKWARD, channel.bandwidth_bps)
        if kept is not None:
            kept.returned = encoded
        return encoded, present

    def _passing(self, phase: str) -> AbstractContextManager[None]:
        """Around the pass itself."""
        stage, hop = self._stage, self.body.route[self.body.hop]
        assert stage.run is not None
        units, tokens = hop.end - hop.start, tokens_of(stage.run)

        def told(pass_s: float) -> None:
            stage.unit_time.note(units, pass_s)
            stage.meter.note_pass(phase, pass_s, microbatches=1, tokens=tokens, unit_tokens=units * tokens)

        return stage.stopwatch.timing(told)

    def _encode(self, values: Sequence[Tensor], peer: PeerId, direction: str, bandwidth_bps: float | None) -> Encoded:
        compressor, run = self._stage.compressor, self._stage.run
        assert run is not None
        compressor.adopt(run.compression)
        infos, payloads = compressor.encode(values, peer, direction, bandwidth_bps)
        raw_bytes, encoded_bytes = sum(value.nbytes for value in values), sum(map(len, payloads))
        codec = compressor.choices[peer, direction].codec
        self._stage.meter.note_tensors(codec, direction, raw_bytes=raw_bytes, encoded_bytes=encoded_bytes)
        return infos, payloads

    def _gradients(self, answer: Backward, payload: bytes | bytearray) -> tuple[Tensor | None, ...]:
        peer, next_hop = self.body.route[self.body.hop + 1].peer, self._next
        if next_hop is not None:
            self._stage.compressor.arrived(answer.values, peer, BACKWARD, next_hop.received_bps)
        flowing = iter(decode_values(answer.values, payload, self._stage.learner.segment.device))
        return tuple(next(flowing) if present else None for present in answer.present)

    def _check_alive(self) -> None:
        if self._ended:
            raise PeerLost("the microbatch was given up")

    # -- conversations

    async def _ask_next(self, encoded: Encoded) -> tuple[Backward, bytes | bytearray]:
        body = self.body
        hop = body.route[body.hop + 1]
        channel = await self._stage.switchboard.call(hop.peer, self._hear_next, self._lose_next)
        if self._ended:
            channel.close()
            raise PeerLost("the microbatch was given up")
        self._next = channel
        self._answer = asyncio.get_running_loop().create_future()
        onward = msgspec.structs.replace(body, hop=body.hop + 1, values=encoded[0])
        channel.send(onward, payload=encoded[1])
        return await self._answer

    def _hear_sender(self, _frame: Frame, body: Body) -> None:
        if isinstance(body, End | Error):
            self.end()

    def _hear_next(self, frame: Frame, body: Body) -> None:
        if self._answer is None or self._answer.done():
            return
        if isinstance(body, Backward) and body.run == self.body.run:
            self._answer.set_result((body, frame.payload))
        elif isinstance(body, Backward):
            self._answer.set_exception(refusal(ErrorCode.WRONG_RUN, peer=self.body.route[self.body.hop + 1].peer))
        elif isinstance(body, Fault):
            peer = self.body.route[min(body.index, len(self.body.route) - 1)].peer
            self._answer.set_exception(refusal(body.code, peer=peer))
        elif isinstance(body, Error):
            self._answer.set_exception(refusal(body.code, peer=self.body.route[self.body.hop + 1].peer))
        elif isinstance(body, End):
            self._lose_next(PeerLost("the next hop ended the microbatch", peer=self.body.route[self.body.hop + 1].peer))

    def _lose_next(self, error: PeerError) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(error)

    def _finish(self, answer: Backward, payload: list[bytes | bytearray | memoryview]) -> None:
        hop, run = self.body.route[self.body.hop], self._stage.run
        if run is not None:
            self._stage.completed.note(self.body.seal, (hop.end - hop.start) * tokens_of(run))
        if self._channel.open:
            self._channel.send(answer, payload=payload)
            self._channel.close()

    def _fail(self, error: SwarmnodeError) -> None:
        """Tell the sender which hop of the route could not, and why."""
        log.info("%r: %s", self, error)
        self._stage.meter.faults[error.code] += 1
        route = self.body.route
        index = next(
            (place for place, hop in enumerate(route) if hop.peer == getattr(error, "peer", None)), self.body.hop
        )
        if self._channel.open:
            self._channel.close(Fault(0, index, error.code))
