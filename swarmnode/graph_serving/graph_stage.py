"""Inference stage: a span of a graph's layers, loaded, measured, and open to other peers' passes.

Inference server: computes other peers' passes through this peer's layers.

A pass leaves no state behind: a client that loses a pass asks another peer.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import TypeVar

import torch

from swarmnode.codec.body import Body
from swarmnode.codec.frames import MAX_PAYLOAD_BYTES, Frame
from swarmnode.codec.messages import INFER_PROTOCOL, Error, Infer, Inferred
from swarmnode.compress.codecs import Encoded, encode_values
from swarmnode.compute.capacity.capacity import Speeds
from swarmnode.compute.executor import ByPiece, Executor, Urgency, as_piece, drain
from swarmnode.compute.graph.boundary import batch_of, descriptions_of, from_wire, to_wire
from swarmnode.compute.graph.costs.estimate import forward_bytes, values_bytes
from swarmnode.compute.graph.graph import torch_constant
from swarmnode.compute.graph.graph_segment import GraphSegment, load_segment
from swarmnode.compute.graph.serialise import GraphCheckpoint
from swarmnode.compute.stopwatch import Clock, best_s
from swarmnode.compute.training.segment import Values
from swarmnode.errors import Busy, ErrorCode, ExecutorDied, PeerError, ProtocolError
from swarmnode.ledger import Account, Reservation
from swarmnode.links.switchboard import Channel
from swarmnode.measuring.capability import Capability
from swarmnode.measuring.hardware import Hardware, LentDevice, StageResources
from swarmnode.measuring.meters import RefusalMeter
from swarmnode.metrics import table
from swarmnode.metrics.metric import Reading, Readings
from swarmnode.net.fair_share import FairShare
from swarmnode.net.interfaces import Buffer, PeerId
from swarmnode.net.tasks import Tasks
from swarmnode.peer.completed_work import CompletedWork
from swarmnode.peer.questions import LocalPeer, board_of
from swarmnode.plan.view import Span
from swarmnode.serving.passage import URGENCY, MicrobatchPassage, read_from, within
from swarmnode.serving.stage import Stage
from swarmnode.swarm.records.announcement import Section, ServingLoad

T = TypeVar("T")

PASSES, PASSES_OF_PEER = 64, 16  # running or waiting
MOST_S = 600.0  # for waiting and computing
RETRY_S = 1.0

log = logging.getLogger(__name__)


class InferenceServer:
    """Server of one span of a graph's layers. `start` opens it, `close` ends it."""

    def __init__(self, peer: LocalPeer, segment: GraphSegment, executor: Executor, lent: LentDevice) -> None:
        """Create a server that computes on `executor`, the thread of the device `lent`, which holds `segment`."""
        self.draining = False
        self._peer = peer
        self._segment = segment
        self._executor = executor
        self._lent = lent
        self._passes: FairShare[asyncio.Task[None]] = FairShare(PASSES, of_peer=PASSES_OF_PEER)
        self._refusals = RefusalMeter(Span(segment.start, segment.end))
        self._tasks = Tasks("inference server", on_crash=peer.link_config.supervisor.ends_conversation)
        self._pass_bytes = lru_cache(maxsize=256)(partial(forward_bytes, segment.layout))
        self._board = board_of(peer, INFER_PROTOCOL, accept=self._accept, on_peer_lost=peer.lost_neighbour)

    @property
    def load(self) -> int:
        """Number of passes for other peers that run or wait."""
        return len(self._tasks)

    def readings(self) -> Readings:
        """Return the metrics of the passes that run and of those that were refused."""
        return self._refusals.readings(self.load)

    async def start(self) -> None:
        """Start to accept other peers' passes."""
        await self._board.start()

    async def finish(self) -> None:
        """Take no new passes, and wait until the last one is over."""
        self.draining = True
        await self._tasks.idle()

    async def close(self) -> None:
        """End all passes, and close the links to other peers."""
        self.draining = True
        await self._tasks.close()
        await self._board.close()

    # -- incoming passes

    def _accept(self, channel: Channel, frame: Frame, body: Body) -> None:
        if not isinstance(body, Infer):
            self._refusals.refuse(channel, Error(ErrorCode.MALFORMED))
            return
        if self.draining:
            self._refusals.refuse(channel, Error(ErrorCode.DRAINING))
            return
        task = self._tasks.spawn(self._answer(channel, body, frame.payload), f"pass of {channel.peer}")
        yielding = self._passes.admit(task, channel.claimant)
        task.add_done_callback(self._passes.leave)
        if yielding is not None:
            yielding.cancel()
        if yielding is task:  # never began
            self._refusals.refuse(channel, Error(ErrorCode.BUSY, RETRY_S))
            return

        def gone(*_: object) -> None:
            task.cancel()

        channel.on_lost = gone
        channel.on_frame = gone  # a valid peer sends nothing but END

    async def _answer(self, channel: Channel, body: Infer, payload: Buffer) -> None:
        """Compute the pass of layers that a peer asks for, and send its results or an error code."""
        try:
            await self._infer(channel, body, payload)
            channel.close()
            await channel.drain()
        except asyncio.CancelledError:
            if channel.open:  # displaced by another peer's pass, or this node ends
                code = ErrorCode.DRAINING if self.draining else ErrorCode.BUSY
                self._refusals.refuse(channel, Error(code, RETRY_S))
            raise
        except (Busy, ProtocolError, ExecutorDied) as error:
            log.info("refused a pass of %s: %s", channel.peer, error)
            self._refusals.refuse(channel, _refusal(error))
        except PeerError as error:
            log.debug("%s", error)
        except Exception:  # an operator may raise anything on numbers that it does not support
            log.exception("a pass of %s failed", channel.peer)
            self._refusals.refuse(channel, Error(ErrorCode.INTERNAL))

    async def _infer(self, channel: Channel, asked: Infer, payload: Buffer) -> None:
        """Check a pass, compute it on the executor, and send its results. Raises ProtocolError, Busy, ExecutorDied, PeerError."""
        segment = self._segment
        if not segment.start <= asked.start < asked.end <= segment.end:
            raise ProtocolError(f"this node does not hold layers {asked.start}:{asked.end}", code=ErrorCode.WRONG_SPAN)
        batch = batch_of(segment.layout, asked.start, descriptions_of(asked.values))
        need_bytes = self._pass_bytes(asked.start, asked.end, batch)
        limit_bytes = self._lent.ledger.limit_bytes
        is_too_large = limit_bytes is not None and need_bytes > limit_bytes
        if is_too_large or values_bytes(segment.layout.boundaries[asked.end], batch) > MAX_PAYLOAD_BYTES:
            raise ProtocolError(f"a pass of {need_bytes} bytes is too large for this node", code=ErrorCode.TOO_LARGE)
        compute = partial(self._compute, asked, payload, batch, channel.peer)
        passage = _InferencePassage(channel, asked, batch, segment, self._executor, compute, self._peer.completed)
        with self._lent.ledger.reserve(Account.ACTIVATIONS, need_bytes):
            await passage.cross()

    def _compute(self, asked: Infer, payload: Buffer, batch: int, client: PeerId) -> Encoded:
        """Decode, compute and encode, on the compute thread. Raises ProtocolError if the values cannot be computed."""
        segment = self._segment
        with torch.inference_mode(), self._lent.throttle.pass_over(asked.end - asked.start, batch):
            came = read_from(client, asked.values, payload, segment.device, bounded=False)
            values = from_wire(segment.layout, asked.start, came)
            try:
                results = segment.forward(values, asked.start, asked.end, 0)
            except ProtocolError as error:
                raise ProtocolError(str(error), code=ErrorCode.INVALID_REQUEST) from error
            return encode_values(to_wire(results))


class _InferencePassage(MicrobatchPassage[GraphSegment]):
    """Passage of a client's `batch` rows of values through a span, by `function` on the executor. Its client passes the results
    on, and nothing comes back. `completed` counts the work."""

    def __init__(
        self,
        channel: Channel,
        asked: Infer,
        batch: int,
        segment: GraphSegment,
        executor: Executor,
        function: Callable[[], Encoded],
        completed: CompletedWork,
    ) -> None:
        self.sender, self.parts = channel.peer, (segment,)
        self._channel, self._asked, self._batch = channel, asked, batch
        self._executor, self._function, self._completed = executor, function, completed

    async def compute(self, phase: str, part: GraphSegment, work: ByPiece[T]) -> T:
        """Do `work` on the executor. Raises ProtocolError (BUSY) if it waits and computes for longer than the client does."""
        owner, limit_s = self._channel.peer[-8:], min(self._asked.within_s or MOST_S, MOST_S)
        computing = self._executor.call(
            URGENCY[phase], partial(drain, work), kind="infer", owner=owner, size=self._batch
        )
        return await within(computing, limit_s, "a pass waits and computes")

    def leave(self, part: GraphSegment, values: Values | None) -> ByPiece[Encoded]:
        """Decode, compute and encode the values that came."""
        return as_piece(self._function)

    async def send_on(self, encoded: Encoded) -> None:
        """Count the work, which is done also if the client is gone, and send the results to the client."""
        asked, sender = self._asked, self._channel.peer
        if asked.work:
            self._completed.begin(asked.work, sender)
            self._completed.answer(asked.work)
            self._completed.record(asked.work, (asked.end - asked.start) * self._batch, self._batch)
        self._channel.send(Inferred(encoded[0]), payload=encoded[1])


def _refusal(error: Exception) -> Error:
    """Return the error message for a pass that failed with `error`."""
    if isinstance(error, ExecutorDied):
        return Error(ErrorCode.INTERNAL)
    code = ErrorCode(error.code) if isinstance(error, ProtocolError) else ErrorCode.BUSY
    if code != ErrorCode.BUSY:
        return Error(code)
    return Error(code, error.retry_s if isinstance(error, Busy) else RETRY_S)


@dataclass(eq=False)
class InferenceStage(Stage):
    """Stage that serves a graph's layers to other peers. Made by `load`, ended by `close`."""

    hardware: Hardware
    server: InferenceServer
    capability: Capability
    weights: Reservation
    label: str

    def __repr__(self) -> str:
        return f"<InferenceStage {self.server!r}>"

    @classmethod
    async def load(cls, place: StageResources, checkpoint: GraphCheckpoint, units: Span) -> InferenceStage:
        """Load `units`, whose weights are on this machine, measure them, and start to serve.

        Raises CheckpointError, LocalError.
        """
        host, hardware = place.host, place.hardware
        (lent,), (executor,) = hardware.lent, place.executors
        async with contextlib.AsyncExitStack() as undo:
            weights = lent.ledger.count(Account.WEIGHTS, hardware.sizes.need_bytes(units.start, units.end, 0))
            undo.callback(weights.release)
            segment = await asyncio.to_thread(
                load_segment, checkpoint.path, units.start, units.end, device=lent.device.torch_device
            )
            once = partial(measure, segment, host.clock.compute)
            capability = await executor.call(
                Urgency.CONTROL, lambda: place.measure(units.units, lent, once), kind="measure", owner=f"units {units}"
            )
            server = InferenceServer(host, segment, executor, lent)
            undo.push_async_callback(server.close)
            await server.start()
            undo.pop_all()
        return cls(hardware, server, capability, weights, f"{units.start}:{units.end}")

    def sections(self) -> tuple[Section, ...]:
        """Return the announcement's sections on this stage: hardware, measured capability and load."""
        return self.hardware.section, self.capability.section(), ServingLoad(sessions=self.server.load)

    def readings(self) -> Readings:
        """Yield the metrics of this stage."""
        yield Reading(table.SPEED, self.capability.speeds.decode_units_per_s, (self.label,))
        yield from self.server.readings()

    async def drain(self, timeout_s: float) -> None:
        """Take no new passes, and wait for the running ones for up to `timeout_s` seconds."""
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self.server.finish(), timeout_s)

    async def finish(self) -> None:
        """Take no new passes, and wait until the last one is over."""
        await self.server.finish()

    def reopen(self) -> None:
        """Accept passes again after `finish` has stopped them."""
        self.server.draining = False

    async def close(self, *, keep_span: bool = False) -> None:
        """End all passes and release the memory."""
        await self.server.close()
        self.weights.release()


def measure(segment: GraphSegment, clock: Clock) -> Speeds:
    """Measure passes of the batch size that the module was exported with. Each sample counts as one position."""
    batch = segment.graph.batch
    values = tuple(
        torch.zeros(value.type.sizes(batch), dtype=torch_constant(value.type.dtype), device=segment.device)
        for value in segment.layout.boundaries[segment.start]
    )
    with torch.inference_mode():
        pass_s = best_s(lambda: segment.forward(values, segment.start, segment.end, 0), segment.device, clock)
    speed = (segment.end - segment.start) * batch / pass_s
    return Speeds(decode_units_per_s=speed, prefill_units_per_s=speed)
