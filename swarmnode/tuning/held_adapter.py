"""Adapter that a node keeps for its owner: the hop's side of one conversation of `/swarmnode/tune/1`.

The owner feeds microbatches, gathers squares, orders updates, and fetches states. The weights and the optimiser's memory live
exactly as long as the conversation with the owner, so nothing remains on a node that its owner has lost.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from swarmnode.codec.body import Body, HopSpec
from swarmnode.codec.frames import Frame
from swarmnode.codec.messages import End, Error, Fault
from swarmnode.codec.tensors import Codec, TensorInfo, gradients_fit
from swarmnode.codec.training_messages import packed_mask
from swarmnode.codec.tuning_messages import (
    MAX_ADAPTER_BYTES,
    AdapterOpened,
    AdapterPiece,
    Gather,
    Gathered,
    GetAdapter,
    JoinAdapter,
    OpenAdapter,
    TuneCounted,
    TuneGradient,
    TuneInput,
    TuneLabels,
    TuneLoss,
    Update,
    Updated,
)
from swarmnode.compress.codecs import Encoded, describe_values, encode_values
from swarmnode.compute.training.saved_activations import LARGEST_SENT, is_within
from swarmnode.compute.training.segment import Values
from swarmnode.errors import ErrorCode, ExecutorDied, PeerLost, ProtocolError, SwarmnodeError
from swarmnode.ledger import Account, Full
from swarmnode.links.switchboard import Channel, Switchboard
from swarmnode.measuring.meters import BACKWARD, FORWARD, StageMeter
from swarmnode.net.addressing.addresses import Claimant
from swarmnode.net.interfaces import Buffer, PeerId
from swarmnode.net.tasks import Tasks
from swarmnode.plan.compression import LinkCodecs
from swarmnode.serving.passage import call_hop, ending, within
from swarmnode.swarm.records.run import AUTO, Compression
from swarmnode.tuning.adapter_parts import AdapterParts, HopPassage, pieces_of

log = logging.getLogger(__name__)

Key = tuple[int, int]
"""(step, number) of a microbatch"""

T = TypeVar("T")

MOST_VALUES = 2  # of a microbatch: hidden states or token ids, and positions


@dataclass(frozen=True)
class _Leaving:
    """Values of a microbatch that left, and the future of their gradients."""

    infos: Sequence[TensorInfo]
    gradients: asyncio.Future[tuple[TuneGradient, Buffer]]


class AdapterHost(Protocol):
    """Interface to `TuningServer` (`server.py`): the members that an adapter uses."""

    switchboard: Switchboard
    meter: StageMeter

    @property
    def forgotten_s(self) -> float:
        """Seconds after which an owner that keeps this node waiting loses its adapter."""

    def ended(self, adapter: HeldAdapter) -> None:
        """Free the place of an adapter that has ended, and close it."""

    def record_pass(self, phase: str, seconds: float, adapter: HeldAdapter) -> None:
        """Count a pass of one microbatch, which took `seconds` with its waiting."""

    def bandwidth_bps(self, peer: PeerId) -> float | None:
        """Return the rate of large frames to a peer in bits/s; None if unknown."""

    def make_room(self, adapter: HeldAdapter) -> bool:
        """End adapters of owners that hold more than this one's owner, for a pass of it. Returns False if there are none."""

    def limit_payloads(self) -> None:
        """End adapters whose payloads take too much of the host's memory."""


class HopCodecs:
    """Codecs of the values that one hop sends on and back: one for all, or as each link needs among those that are `allowed`.

    `record_bandwidth` is called on the event loop, `encode` on the device's thread.
    """

    def __init__(self, opened: OpenAdapter, allowed: Collection[int]) -> None:
        rule = AUTO if opened.adapts else Codec(opened.codec).name.lower()
        self._decoded = {int(Codec.NONE), *(allowed if opened.adapts else (opened.codec,))}
        self._codecs = LinkCodecs[str](allowed, Compression(rule))  # by direction
        self._bandwidths_bps: dict[str, float | None] = {}
        self._counted_s: list[float] = []  # when the microbatches of the step were counted
        self._beat_s = 0.0  # between two microbatches in the last step

    def may_come(self, codec: int) -> bool:
        """Return whether the hops beside this one, and the owner, may send values in this codec."""
        return codec in self._decoded

    def record_bandwidth(self, direction: str, bandwidth_bps: float | None) -> None:
        """Note the bandwidth of the link in a direction."""
        self._bandwidths_bps[direction] = bandwidth_bps

    def count(self, now_s: float) -> None:
        """Note that a microbatch is counted at `now_s`."""
        self._counted_s.append(now_s)

    def end_step(self) -> None:
        """Take the mean time between the step's microbatches for that of the next step's."""
        if len(self._counted_s) > 1:
            self._beat_s = (self._counted_s[-1] - self._counted_s[0]) / (len(self._counted_s) - 1)
        self._counted_s = []

    def encode(self, values: Values, direction: str) -> Encoded:
        """Return descriptors and payloads of values. Raises ProtocolError if the receiver would not take them: the values that
        they follow from are at fault."""
        if not is_within(values, LARGEST_SENT):
            raise ProtocolError("values that overflow here", code=ErrorCode.NOT_FINITE)
        bandwidth_bps = self._bandwidths_bps.get(direction)
        choice = self._codecs.choose(direction, describe_values(values), bandwidth_bps, self._beat_s)
        return encode_values(values, choice.codec)


class HeldAdapter:
    """Adapter on this node, from `start` to `end`. `place` is its place among those of the node."""

    def __init__(
        self,
        host: AdapterHost,
        channel: Channel,
        opened: OpenAdapter,
        parts: AdapterParts,
        place: object,
        codecs: HopCodecs,
    ) -> None:
        self.opened = opened
        self._codecs = codecs
        self._clock = asyncio.get_running_loop().time
        self.owner = channel.peer
        self.ended = False
        self.moved_s = self._clock()  # when the owner was last heard, or a microbatch came
        self.host = host
        self.channel = channel
        self.adapter = parts
        self.place = place
        self._tasks = Tasks(f"adapter of {channel.peer}", on_crash=None)
        self._step = 0
        self._counted = 0  # microbatches of the step, as bits
        self._present: set[Key] = set()  # microbatches in flight, and those that wait for their step
        self._change = asyncio.Event()  # set, and replaced, when a microbatch is over and when a step begins
        self._payloads: Counter[Key] = Counter()  # bytes that came for microbatches which are not over
        self._labels: dict[Key, asyncio.Future[tuple[TuneLabels, Buffer]]] = {}
        self._leaving: dict[Key, _Leaving] = {}
        self._next: asyncio.Task[Channel] | None = None
        self._is_executing = False  # whether a command of the owner is under way
        self._loading = bytearray()  # the beginning of the file of layer `_due`
        self._due = self.hop.start
        self._loads_gradients = False  # whether the pieces that come are gradients, not a state
        self._loaded_bytes = 0  # of the files of the present state before it
        self._memory = host.switchboard.ledger.count(Account.CHECKPOINTS)  # of a state that comes or goes
        self._before: Channel | None = None  # from the previous hop
        channel.on_frame = self._receive_from_owner
        channel.on_lost = lambda _error: self.end()

    def __repr__(self) -> str:
        return f"<HeldAdapter {self.opened.adapter.hex()[:8]} of {self.owner} at step {self._step}, {len(self._present)} in flight>"

    @property
    def hop(self) -> HopSpec:
        """Hop of the adapter's route that this node is."""
        return self.opened.route[self.opened.index]

    @property
    def pass_bytes(self) -> int:
        """Bytes of one microbatch, until its gradient comes."""
        return self.adapter.pass_bytes

    @property
    def claimant(self) -> Claimant:
        """Owner, as limits count it."""
        return self.channel.claimant

    @property
    def payload_bytes(self) -> int:
        """Bytes in the host's memory that the owner and other hops have sent, and that are still needed."""
        return self._payloads.total() + self._memory.size_bytes

    @property
    def total_bytes(self) -> int:
        """Bytes of the adapter, its passes in flight and its payloads."""
        return self.adapter.held_bytes + self.payload_bytes

    @property
    def positions(self) -> int:
        """Most positions of one microbatch."""
        return self.opened.rows * self.opened.positions

    @property
    def is_last(self) -> bool:
        """Whether this is the last hop of the route."""
        return self.opened.index + 1 == len(self.opened.route)

    @property
    def ends_at_owner(self) -> bool:
        """Whether the route ends before the head: its last hop sends outputs to the owner, which sends gradients back."""
        return self.opened.route[-1].end < self.adapter.model_units

    def start(self) -> None:
        """Tell the owner that the adapter is open, with the bytes that it takes."""
        pass_bytes = self.opened.window * self.pass_bytes  # an estimate, for microbatches of the largest size
        sizes = (self.adapter.adapter_bytes, pass_bytes)
        self.channel.send(AdapterOpened(*(min(size, MAX_ADAPTER_BYTES) for size in sizes)))

    def expects(self, previous: PeerId, epoch: int) -> bool:
        """Return whether the owner's route of `epoch` names the peer `previous` as the hop before this one."""
        opened = self.opened
        return opened.epoch == epoch and opened.index > 0 and opened.route[opened.index - 1].peer == previous

    def join(self, channel: Channel) -> None:
        """Take microbatches from the previous hop on `channel`. Raises ProtocolError if another channel feeds the adapter."""
        if self._before is not None and self._before.open:
            raise ProtocolError("another conversation feeds this adapter", code=ErrorCode.NO_SESSION)
        channel.on_frame = self._receive_from_previous
        channel.on_lost = lambda error: self._fail(error)
        self._before = channel

    def drain(self) -> None:
        """Ask the owner to move the adapter to other peers; it still works here."""
        if self.channel.open:
            self.channel.send(Fault(self.opened.epoch, self.opened.index, ErrorCode.DRAINING))

    def end(self, last: Body | None = None) -> None:
        """End the conversation, with `last` (END by default), and free everything. Safe to call twice."""
        if self.ended:
            return
        self.ended = True
        self.channel.close(last)
        if self._before is not None:
            self._before.close()
        if self._next is not None and self._next.done() and not self._next.cancelled() and not self._next.exception():
            self._next.result().close()
        waits: list[asyncio.Future[Any]] = [*self._labels.values(), *(one.gradients for one in self._leaving.values())]
        for wait in waits:
            wait.cancel()  # else the microbatches in flight would wait for ever
        self.adapter.close()
        self.host.ended(self)

    async def close(self) -> None:
        """Cancel the tasks of an adapter that has ended, and wait for them."""
        await self._tasks.close()
        self._memory.release()

    # -- conversations

    def _receive_from_owner(self, frame: Frame, body: Body) -> None:
        self.moved_s = self._clock()
        if isinstance(body, TuneInput) and self.opened.index == 0:
            self._enter(body, frame.payload)
        elif isinstance(body, TuneLabels) and self.is_last and not self.ends_at_owner:
            future = self._labels_of((body.step, body.number))
            if not self._is_near(body.step) or future.done() or len(self._labels) > self.opened.window:
                self._fail(ProtocolError("more labels than microbatches, or those of another step"))
            elif not self._fits(body.values):
                self._fail(ProtocolError("labels larger than the adapter's microbatches", code=ErrorCode.TOO_LARGE))
            else:
                future.set_result((body, frame.payload))
                self._hold((body.step, body.number), frame.payload)
        elif isinstance(body, TuneGradient) and self.is_last and self.ends_at_owner:
            self._receive_gradient(body, frame.payload)
        elif isinstance(body, Gather):
            self._execute(self._gather(body))
        elif isinstance(body, Update):
            self._execute(self._update(body))
        elif isinstance(body, GetAdapter):
            self._execute(self._give(body))
        elif isinstance(body, AdapterPiece):
            self._load(body, frame.payload)
        elif isinstance(body, End | Error):
            self.end()
        else:
            self._fail(ProtocolError(f"an unexpected {type(body).__name__}"))

    def _receive_from_previous(self, frame: Frame, body: Body) -> None:
        if isinstance(body, TuneInput):
            self._enter(body, frame.payload)
        elif not isinstance(body, End | Error):  # the owner hears of a lost hop itself
            self._fail(ProtocolError(f"an unexpected {type(body).__name__}", peer=self.sender))

    def _receive_from_next(self, frame: Frame, body: Body) -> None:
        if isinstance(body, TuneGradient):
            self._receive_gradient(body, frame.payload)
        else:
            unexpected = ProtocolError(f"an unexpected {type(body).__name__}", peer=self.next_peer)
            self._fail(ending(body, self.next_peer) or unexpected)

    @property
    def next_peer(self) -> str:
        """Peer that outputs go to, and whose gradients come back: the next hop, or the owner."""
        return self.owner if self.is_last else self.opened.route[self.opened.index + 1].peer

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        if self.ended:
            work.close()
            return
        self._tasks.spawn(self._guarded(work), "step")

    def _execute(self, work: Coroutine[Any, Any, None]) -> None:
        """Begin a command. The owner awaits the answer to each one before the next, which bounds the states in memory."""
        if self._is_executing:
            work.close()
            self._fail(ProtocolError("a command before the answer to the last one"))
        else:
            self._is_executing = True
            self._spawn(self._obeyed(work))

    async def _obeyed(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        finally:
            self._is_executing = False

    async def _guarded(self, work: Coroutine[Any, Any, None]) -> None:
        """Run `work`; an error of it is reported to the owner and ends the adapter."""
        try:
            await work
        except (SwarmnodeError, ExecutorDied) as error:
            self._fail(error)
        except Exception:
            log.exception("%r failed", self)
            self._fail(ProtocolError("an adapter failed here", code=ErrorCode.INTERNAL))

    def _fail(self, error: SwarmnodeError) -> None:
        """End the adapter, and report the reason to the owner, with the neighbour that `error` names, or this hop itself.

        The owner takes a report on a neighbour as one on both.
        """
        if self.ended:
            return
        log.info("%r: %s", self, error)
        self.host.meter.faults[ErrorCode(error.code)] += 1
        route, peer = self.opened.route, getattr(error, "peer", None)
        index = next((place for place, hop in enumerate(route) if hop.peer == peer), self.opened.index)
        self.end(Fault(self.opened.epoch, index, ErrorCode(error.code)))

    # -- microbatches

    def _enter(self, body: TuneInput, payload: Buffer) -> None:
        """Begin a microbatch. A wrong step, a counted number, too many and too large microbatches end the adapter.

        A microbatch of the next step waits for the UPDATE before it, which may be on its way.
        """
        key = (body.step, body.number)
        is_counted = body.step == self._step and body.learns and self._counted >> body.number & 1
        if not self._is_near(body.step) or is_counted or key in self._present:
            self._fail(
                ProtocolError(
                    f"microbatch {body.number} of step {body.step} does not belong here now", peer=self.sender
                )
            )
        elif len(self._present) >= self.opened.window:
            error = ProtocolError("more microbatches than the window", code=ErrorCode.TOO_LARGE, peer=self.sender)
            self._fail(error)
        elif not self._fits(body.values):
            text = "a microbatch larger than those of the adapter"
            self._fail(ProtocolError(text, code=ErrorCode.TOO_LARGE, peer=self.sender))
        else:
            self.moved_s = self._clock()  # the owner feeds it, if through other hops
            self._present.add(key)
            self._hold(key, payload)
            self._spawn(self._pass(body, payload))

    def _hold(self, key: Key, payload: Buffer) -> None:
        """Count a payload of a microbatch until the microbatch is over. May end the adapter."""
        self._payloads[key] += len(payload)
        self.host.limit_payloads()

    def _is_near(self, step: int) -> bool:
        """Return whether microbatches of `step` may come now: of the present step, or of the next one."""
        return step in (self._step, self._step + 1)

    def _fits(self, values: Sequence[TensorInfo]) -> bool:
        """Return whether the values may be decoded: of the adapter's codec, and at most of the sizes that the owner asked for."""
        limits = (self.opened.rows, self.opened.positions, self.adapter.hidden_size)
        return 1 <= len(values) <= MOST_VALUES and all(
            2 <= len(info.shape) <= len(limits)
            and self._codecs.may_come(info.codec)
            and all(1 <= size <= limit for size, limit in zip(info.shape, limits, strict=False))
            for info in values
        )

    def _receive_gradient(self, body: TuneGradient, payload: Buffer) -> None:
        """Take the gradients of values that left here. Those of other values, or of other shapes, end the adapter."""
        leaving = self._leaving.get((body.step, body.number))
        if leaving is None or leaving.gradients.done():
            error = f"a gradient of microbatch {body.number} of step {body.step}, which did not leave here"
        elif not self._belongs(body, leaving.infos):
            error = f"other gradients than those of the values of microbatch {body.number}"
        else:
            leaving.gradients.set_result((body, payload))
            self._hold((body.step, body.number), payload)
            return
        self._fail(ProtocolError(error, peer=self.next_peer))

    def _belongs(self, body: TuneGradient, infos: Sequence[TensorInfo]) -> bool:
        """Return whether each gradient is of a float, has its shape, and may be decoded. Without any gradient the microbatch is
        dropped, which only an owner may do: then return whether the route ends there."""
        if not any(body.present):
            return self.ends_at_owner
        may_come = all(self._codecs.may_come(info.codec) for info in body.values)
        return may_come and gradients_fit(body.values, body.present, infos)

    def _labels_of(self, key: Key) -> asyncio.Future[tuple[TuneLabels, Buffer]]:
        return self._labels.setdefault(key, asyncio.get_running_loop().create_future())

    async def _pass(self, body: TuneInput, payload: Buffer) -> None:
        """Take one microbatch there and, if it learns, back."""
        key, number = (body.step, body.number), body.number
        if self.opened.adapts and not self.is_last:
            self._codecs.record_bandwidth(FORWARD, self.host.bandwidth_bps(self.next_peer))
        if self.opened.adapts and self.opened.index:
            self._codecs.record_bandwidth(BACKWARD, self.host.bandwidth_bps(self.sender))
        try:
            await self._owner_gives(self._until(lambda: self._step == body.step))
            ends_here = self.is_last and not self.ends_at_owner
            labels = await self._owner_gives(self._labels_of(key)) if ends_here else None
            while True:
                passage = HopPassage(self, self.adapter, body, payload, labels)
                try:
                    gradients = await passage.cross()
                    break
                except Full:  # owners that hold more give way
                    self.adapter.check_pass(*body.values[0].shape[:2])
                    if not self.host.make_room(self):
                        raise
                    self.adapter.forget(number)
            if ends_here:
                self.record_pass(BACKWARD, passage.began_s)
                if not self.ended:
                    self.channel.send(TuneLoss(body.step, number, passage.loss, passage.counted), at_once=True)
            if body.learns and gradients is not None:
                self._counted |= 1 << number
                self._codecs.count(self._clock())
        finally:
            self._present.discard(key)
            self._labels.pop(key, None)
            self._payloads.pop(key, None)
            self._leaving.pop(key, None)
            self.adapter.forget(number)
            self._signal_change()
        if body.learns and not self.ended:
            # The owner gets a report instead of gradients if token ids came, which have none.
            present, (infos, buffers) = gradients or ((), ((), []))
            before = self._before if self.opened.index else self.channel
            if not self.opened.index and not self.hop.start and gradients is not None:
                self.channel.send(TuneCounted(body.step, number), at_once=True)
            elif before is not None:
                before.send(TuneGradient(body.step, number, present, infos), payload=buffers, at_once=True)

    @property
    def sender(self) -> str:
        """Peer that microbatches come from: the previous hop, or the owner."""
        return self.opened.route[self.opened.index - 1].peer if self.opened.index else self.owner

    async def _owner_gives(self, work: Awaitable[T]) -> T:
        return await within(work, self.host.forgotten_s, "the owner keeps a microbatch waiting")

    async def send_on(self, body: TuneInput, encoded: Encoded) -> tuple[TuneGradient, Buffer] | None:
        """Send outputs of the microbatch `body` to the next hop, from the last hop to the owner.

        Returns the gradients that come back; None if the microbatch does not learn, or is dropped. Raises ProtocolError if the
        owner keeps the place for too long.
        """
        if not self.is_last and self._next is None:
            self._next = self._tasks.spawn(self._call_next(), "call the next hop", awaited=True)
        channel = self.channel if self._next is None else await asyncio.shield(self._next)
        leaving = _Leaving(encoded[0], asyncio.get_running_loop().create_future())
        if body.learns:
            self._leaving[body.step, body.number] = leaving
        channel.send(TuneInput(body.step, body.number, encoded[0], body.learns), payload=encoded[1], at_once=True)
        if not body.learns:
            return None
        answer = await (self._owner_gives(leaving.gradients) if self.is_last else leaving.gradients)
        return answer if any(answer[0].present) else None

    def encode(self, values: Values, direction: str) -> Encoded:
        """Return values encoded for the neighbour in a direction, on a device's thread. Raises ProtocolError if they overflow."""
        return self._codecs.encode(values, direction)

    def record_pass(self, phase: str, began_s: float) -> None:
        """Meter a pass that began at `began_s`, with its waiting."""
        self.host.record_pass(phase, self._clock() - began_s, self)

    async def _call_next(self) -> Channel:
        channel = await call_hop(self.host.switchboard, self.next_peer, self._receive_from_next, self._fail)
        if self.ended:
            channel.close()
            raise PeerLost("the adapter has ended")
        channel.send(JoinAdapter(self.opened.adapter, self.opened.epoch, self.owner))
        return channel

    # -- steps

    async def _until(self, ready: Callable[[], bool]) -> None:
        """Wait until `ready` returns true. The end of the adapter ends the wait."""
        while not ready():
            await self._change.wait()

    def _signal_change(self) -> None:
        self._change.set()
        self._change = asyncio.Event()

    def _begin(self, step: int) -> None:
        self._step, self._counted = step, 0
        self._signal_change()

    @property
    def is_computing(self) -> bool:
        """Whether a microbatch of the present step is in flight."""
        return any(step == self._step for step, _ in self._present)

    def _check_step(self, step: int) -> None:
        if step != self._step:
            raise ProtocolError(f"step {step} is not the present one: this hop is at step {self._step}")

    async def _gather(self, body: Gather) -> None:
        """Answer with the square of the step's gradient, once all its microbatches are counted."""
        self._check_step(body.step)
        await self._until(lambda: self._counted.bit_count() >= body.microbatches and not self.is_computing)
        square = await self.adapter.square()
        mask = packed_mask(self._counted)
        self.channel.send(Gathered(body.step, square, mask), at_once=True)

    async def _update(self, body: Update) -> None:
        self._check_step(body.step)
        if self.is_computing:
            raise ProtocolError(f"step {body.step} is not complete here")
        await self.adapter.step(body.step, body.learning_rate, body.scale)
        self._codecs.end_step()
        self._begin(body.step + 1)
        self.channel.send(Updated(self._step), at_once=True)

    async def _give(self, body: GetAdapter) -> None:
        """Send the tensors of each layer in pieces."""
        self._check_step(body.step)
        units = self.adapter.units
        for unit in units:
            raw = await (self.adapter.gradients if body.gradients else self.adapter.state)(unit)
            self._memory.count(len(raw))
            self.host.limit_payloads()
            for message, piece in pieces_of(body.step, unit, raw, ends=unit == units[-1]):
                await self.channel.drain()
                self.channel.send(message, payload=[piece])
        self._memory.release()

    def _load(self, body: AdapterPiece, payload: Buffer) -> None:
        """Take a piece of a state or of gradients, whose layers come in order. Each layer is loaded once its last piece is here."""
        came = len(self._loading) + len(payload)
        is_over = came == body.size and body.unit == self.adapter.units[-1]
        is_due = body.unit == self._due and body.offset == len(self._loading) and body.last == is_over
        if self._due == self.hop.start and not self._loading:
            self._loads_gradients = body.gradients
        is_same = body.gradients == self._loads_gradients and (not body.gradients or body.step == self._step)
        if self._present or not is_due or not is_same:
            self._fail(ProtocolError("a piece of a state that does not belong here"))
        elif came > body.size or self._loaded_bytes + body.size > self.adapter.most_state_bytes:
            self._fail(ProtocolError("a state larger than the adapter", code=ErrorCode.TOO_LARGE))
        else:
            self._memory.count(self._loaded_bytes + body.size)
            self.host.limit_payloads()
            self._loading += payload
            if len(self._loading) == body.size:
                raw, self._loading = bytes(self._loading), bytearray()
                self._loaded_bytes += len(raw)
                self._due = self.hop.start if body.last else body.unit + 1
                self._spawn(self._loaded(body, raw))

    async def _loaded(self, body: AdapterPiece, raw: bytes) -> None:
        await self.adapter.load(body.unit, raw, gradients=body.gradients)
        if body.last:
            if not body.gradients:
                self._begin(body.step)
            self._loaded_bytes = 0
            self._memory.release()
            self.channel.send(Updated(self._step), at_once=True)
