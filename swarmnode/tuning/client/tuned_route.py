"""Adapter open on a route: the owner's conversations with its hops, from `open` to `close`.

The first error of any hop ends all waits here. The owner then opens the adapter on another route from its last checkpoint.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import msgspec
import torch
from torch import Tensor

from swarmnode.codec.body import Body, HopSpec
from swarmnode.codec.frames import Frame
from swarmnode.codec.messages import Fault
from swarmnode.codec.tensors import Codec, TensorInfo
from swarmnode.codec.tuning_messages import (
    AdapterOpened,
    AdapterPiece,
    Gather,
    Gathered,
    GetAdapter,
    OpenAdapter,
    TuneCounted,
    TuneGradient,
    TuneInput,
    TuneLabels,
    TuneLoss,
    Update,
    Updated,
)
from swarmnode.compress.codecs import encode_values
from swarmnode.compute.training.segment import Values
from swarmnode.errors import ErrorCode, PeerError, PeerLost, ProtocolError, refusal
from swarmnode.links.switchboard import Channel, Switchboard
from swarmnode.net.interfaces import Buffer, PeerId
from swarmnode.net.tasks import cancel_and_wait, unless_failed
from swarmnode.serving.client.router import HopFault
from swarmnode.serving.passage import call_hop, ending, read_from
from swarmnode.tuning.adapter_parts import pieces_of
from swarmnode.tuning.client.state_shapes import AdapterState, ComingState, StateShapes

T = TypeVar("T")

FIRST_S, FLOOR_S, SLACK = 600.0, 20.0, 8.0
"""Longest silence of all hops (seconds) before the first answer; later `SLACK` times the longest one before, within both bounds"""


MOST_LOSS = 1e50  # of a microbatch: past any sum of float32 numbers, and sums of many do not overflow


@dataclass(frozen=True)
class TunedMicrobatch:
    """Microbatch of a step. The sum of its labels' losses counts `share` in the step's loss. Without `learns` it is held out."""

    number: int
    inputs: Values
    labels: Values
    share: float
    learns: bool = True


@dataclass(eq=False)
class _Hop:
    """Conversation with one hop, and the answers that the owner waits for."""

    spec: HopSpec
    channel: Channel
    opened: asyncio.Future[AdapterOpened]
    coming: ComingState
    answer: asyncio.Future[Body] | None = None  # to the last command
    updating: asyncio.Future[Body] | None = None  # the same one, of an UPDATE whose answer nothing has waited for
    gathered: asyncio.Future[dict[int, bytes]] | None = None


@dataclass(frozen=True)
class _Passing:
    """Microbatch on a route without the model's ends: the futures of its outputs and of the gradients of its inputs."""

    outputs: asyncio.Future[tuple[Sequence[TensorInfo], Buffer]]
    gradients: asyncio.Future[tuple[Sequence[TensorInfo], Buffer]]


@dataclass(frozen=True)
class _Wait:
    """Microbatch in flight: the reports on it that are `missing`."""

    step: int
    missing: set[type[Body]]
    over: asyncio.Future[None]


class TunedRoute:
    """Adapter open on one route. Made by `open`, ended by `close`. `leavers` are the hops that asked to be left."""

    def __init__(self, board: Switchboard, request: OpenAdapter, shapes: StateShapes) -> None:
        self.request = request
        self._shapes = shapes
        self.leavers: set[PeerId] = set()
        self._board = board
        self._loop = asyncio.get_running_loop()
        self._hops: list[_Hop] = []
        self._failed: asyncio.Future[None] = self._loop.create_future()
        self._losses: dict[int, tuple[float, int]] = {}
        self._waits: dict[int, _Wait] = {}  # by microbatch
        self._passing: dict[int, _Passing] = {}  # by microbatch
        self._received_s = self._loop.time()
        self._longest_s = 0.0  # silence between two answers
        self._answered = False
        self._next_step = 0  # that the last UPDATE begins

    @classmethod
    async def open(
        cls, board: Switchboard, request: OpenAdapter, shapes: StateShapes, state: AdapterState | None
    ) -> TunedRoute:
        """Open the adapter at all hops of the request's route, and load `state` if there is one.

        Raises PeerLost, PeerRefused or ProtocolError with the peer that failed.
        """
        route = cls(board, request, shapes)
        try:
            for index, spec in enumerate(request.route):
                await route._call(index, spec)
            for hop in route._hops:
                await route._wait(hop.opened)
            if state is not None:
                await route.load(state)
        except BaseException:
            await route.close()
            raise
        return route

    @property
    def leaving(self) -> bool:
        """Whether a hop asks to be left after the present step."""
        return bool(self.leavers)

    @property
    def sizes(self) -> list[tuple[HopSpec, AdapterOpened]]:
        """The hops with the bytes that each keeps."""
        return [(hop.spec, hop.opened.result()) for hop in self._hops]

    async def close(self) -> None:
        """End the conversations: the hops free the adapter."""
        for hop in self._hops:
            hop.channel.close()
        if self._failed.done() and not self._failed.cancelled():
            self._failed.exception()  # marks it as retrieved
        else:
            self._failed.cancel()

    # -- steps

    async def compute(self, step: int, microbatches: Sequence[TunedMicrobatch]) -> dict[int, tuple[float, int]]:
        """Have the route compute the microbatches of `step`. Returns for each the sum of its labels' losses, and their number."""
        self._losses.clear()
        window = asyncio.Semaphore(self.request.window)
        feeding = [asyncio.ensure_future(self._feed(step, one, window)) for one in microbatches]
        try:
            for one in feeding:
                await self._wait(one)
        finally:
            await cancel_and_wait(*feeding)
        return dict(self._losses)

    async def gradient(
        self, step: int, microbatches: Sequence[TunedMicrobatch]
    ) -> tuple[dict[int, tuple[float, int]], float]:
        """Have the route compute a step. Returns what `compute` does, and the norm of the gradient of those that learn.

        The hops are asked for the norm at once, and answer when they are ready: over a far link this saves a way there and back.
        """
        gathering = asyncio.ensure_future(self._gather(step, [one.number for one in microbatches if one.learns]))
        try:
            return await self.compute(step, microbatches), await gathering
        finally:
            await cancel_and_wait(gathering)

    async def _gather(self, step: int, numbers: Sequence[int]) -> float:
        """Return the norm of the step's gradient. Raises ProtocolError if a hop counted other microbatches than `numbers`."""
        answers = await self._ask_all(Gather(step, len(numbers)), Gathered)
        mask = sum(1 << number for number in numbers)
        for hop, answer in zip(self._hops, answers, strict=True):
            if answer.step != step or int.from_bytes(answer.counted, "little") != mask:
                raise ProtocolError("the hop counted other microbatches", peer=hop.spec.peer)
        return math.sqrt(math.fsum(answer.square for answer in answers))

    async def update(self, step: int, learning_rate: float, scale: float) -> None:
        """Order an update of all hops' layers. The next command waits for the answers, the next microbatches do not."""
        await self._settle()
        for hop in self._hops:
            hop.updating = self._expect(hop)
            hop.channel.send(Update(step, learning_rate, scale), at_once=True)
        self._next_step = step + 1

    async def _settle(self) -> None:
        """Wait until all hops have answered the last UPDATE. Raises ProtocolError if one answers something else."""
        for hop in self._hops:
            if hop.updating is not None:
                if await self._wait(hop.updating) != Updated(self._next_step):
                    raise ProtocolError("the hop is at another step", peer=hop.spec.peer)
                hop.updating = None

    async def fetch(self, step: int, *, gradients: bool = False) -> AdapterState:
        """Return the weights and optimiser state of all layers at the beginning of `step`, or the sums of gradients in it.

        Raises ProtocolError if a hop gives other tensors than those of the adapter, NaN or infinity.
        """
        await self._settle()
        layers: dict[int, bytes] = {}
        for hop in self._hops:
            hop.coming = self._coming(hop.spec)
            hop.gathered = self._loop.create_future()
            hop.channel.send(GetAdapter(step, gradients))
        for hop in self._hops:
            assert hop.gathered is not None
            files = await self._wait(hop.gathered)
            await asyncio.to_thread(self._check, hop, files, step, gradients)
            layers |= files
        return AdapterState(step, layers)

    def _check(self, hop: _Hop, files: Mapping[int, bytes], step: int, gradients: bool) -> None:
        for unit, raw in files.items():
            self._shapes.check(unit, raw, step, gradients=gradients, peer=hop.spec.peer)

    async def _feed(self, step: int, microbatch: TunedMicrobatch, window: asyncio.Semaphore) -> None:
        async with window:
            missing: set[type[Body]] = {TuneLoss, TuneCounted} if microbatch.learns else {TuneLoss}
            wait = self._waits[microbatch.number] = _Wait(step, missing, self._loop.create_future())
            infos, payload = encode_values(microbatch.labels)
            self._hops[-1].channel.send(
                TuneLabels(step, microbatch.number, infos, microbatch.share), payload=payload, at_once=True
            )
            infos, payload = encode_values(microbatch.inputs)
            self._hops[0].channel.send(
                TuneInput(step, microbatch.number, infos, microbatch.learns), payload=payload, at_once=True
            )
            try:
                await wait.over
            finally:
                del self._waits[microbatch.number]

    # -- passes between ends that the owner computes

    async def forward(self, step: int, number: int, inputs: Values, *, learns: bool) -> Tensor:
        """Return the outputs hidden_BTH (float32) of the route's layers.

        `inputs` are hidden_BTH, and positions_BT if rows hold several documents. A microbatch that `learns` waits at the hops for
        `backward` or `drop`. Raises ProtocolError if the outputs have another shape, or are NaN or infinite.
        """
        passing = self._passing[number] = _Passing(self._loop.create_future(), self._loop.create_future())
        infos, payload = encode_values(inputs, Codec(self.request.codec))
        self._hops[0].channel.send(TuneInput(step, number, infos, learns), payload=payload, at_once=True)
        try:
            came = await self._wait(passing.outputs)
            return await asyncio.to_thread(self._decoded, came, inputs, self.request.route[-1].peer)
        finally:
            if not learns:
                del self._passing[number]

    async def backward(self, step: int, number: int, gradient_BTH: Tensor) -> Tensor:
        """Return the gradient of a microbatch's hidden states (float32) from that of its outputs.

        The hops count the adapter's gradients. Raises ProtocolError if the gradient that comes has another shape, or is NaN or
        infinite.
        """
        values = (gradient_BTH,)
        infos, payload = encode_values(values, Codec(self.request.codec))
        came = await self._turned(step, number, infos, payload)
        if not came[0]:
            raise ProtocolError("some hop dropped a microbatch")
        return await asyncio.to_thread(self._decoded, came, values, self.request.route[0].peer)

    async def drop(self, step: int, number: int) -> None:
        """Have the hops forget a microbatch that waits for its gradient. Nothing is counted."""
        infos, _ = await self._turned(step, number, (), [])
        if infos:
            raise ProtocolError("a gradient of a microbatch that was dropped", peer=self.request.route[0].peer)

    async def _turned(
        self, step: int, number: int, infos: Sequence[TensorInfo], payload: Sequence[Buffer]
    ) -> tuple[Sequence[TensorInfo], Buffer]:
        """Send the gradient of the outputs to the last hop, and return what the first one answers."""
        passing = self._passing[number]
        present = (True, *(False for _ in passing.outputs.result()[0][1:])) if infos else ()
        self._hops[-1].channel.send(TuneGradient(step, number, present, tuple(infos)), payload=payload, at_once=True)
        try:
            return await self._wait(passing.gradients)
        finally:
            del self._passing[number]

    @staticmethod
    def _decoded(came: tuple[Sequence[TensorInfo], Buffer], like: Values, peer: PeerId) -> Tensor:
        """Return the first of the values that `peer` sent, which must have the shapes of the values `like`."""
        infos, payload = came
        if [info.shape for info in infos] != [tuple(value.shape) for value in like]:
            raise ProtocolError("values of other shapes than those of the microbatch", peer=peer)
        values = read_from(peer, infos, payload, "cpu")
        if not values[0].is_floating_point():
            raise ProtocolError("integers instead of hidden states or gradients", code=ErrorCode.NOT_FINITE, peer=peer)
        return values[0].to(torch.float32)

    def _receive_values(self, index: int, body: TuneInput | TuneGradient, payload: Buffer) -> None:
        """Take outputs of the last hop, or gradients of the first one. Values that nothing waits for end the route."""
        passing = self._passing.get(body.number)
        at_end = index == (0 if isinstance(body, TuneGradient) else len(self._hops) - 1)
        future = None if passing is None else passing.gradients if isinstance(body, TuneGradient) else passing.outputs
        if future is None or future.done() or not at_end:
            error = ProtocolError("values that nothing waits for", peer=self.request.route[index].peer)
            self._fail(error)
            return
        self._answered = True
        self._record_progress()
        future.set_result((body.values, payload))

    # -- states

    async def load(self, state: AdapterState, *, gradients: bool = False) -> None:
        """Go on from a state: the hops forget the sums of gradients. With `gradients`, replace these sums, and nothing else."""
        await self._settle()
        answers = []
        for hop in self._hops:
            answers.append(self._expect(hop))
            units = [unit for unit in sorted(state.layers) if hop.spec.start <= unit < hop.spec.end]
            for unit in units:
                raw, ends = state.layers[unit], unit == units[-1]
                for message, piece in pieces_of(state.step, unit, raw, ends=ends, gradients=gradients):
                    hop.channel.send(message, payload=[piece])
                    await self._wait(hop.channel.drain())
        for answer in answers:
            await self._wait(answer)

    # -- conversations

    async def _call(self, index: int, spec: HopSpec) -> None:
        request = msgspec.structs.replace(self.request, index=index)

        def receive(frame: Frame, body: Body) -> None:
            self._receive(index, frame.payload, body)

        channel = await call_hop(self._board, spec.peer, receive, self._fail)
        self._hops.append(_Hop(spec, channel, self._loop.create_future(), self._coming(spec)))
        channel.send(request, at_once=True)

    def _receive(self, index: int, payload: Buffer, body: Body) -> None:
        hop, last = self._hops[index], len(self.request.route) - 1
        if (isinstance(body, TuneLoss) and index == last) or (isinstance(body, TuneCounted) and index == 0):
            self._record_report(body)
        elif isinstance(body, AdapterOpened) and not hop.opened.done():
            self._record_progress()
            hop.opened.set_result(body)
        elif isinstance(body, AdapterPiece):
            self._receive_piece(hop, body, payload)
        elif isinstance(body, TuneInput | TuneGradient):
            self._receive_values(index, body, payload)
        elif isinstance(body, Fault) and body.code == ErrorCode.DRAINING and body.index == index and hop.channel.open:
            self.leavers.add(hop.spec.peer)
        elif isinstance(body, Fault):
            self._fail(self._reported(index, body))
        elif (error := ending(body, hop.spec.peer)) is not None:
            self._fail(error)
        elif hop.answer is not None and not hop.answer.done():
            self._record_progress()
            hop.answer.set_result(body)

    def _reported(self, index: int, body: Fault) -> PeerError:
        """Return the error for a FAULT of hop `index`: of the hop itself, or of the hop and the neighbour that it accuses.

        Any hop may have made the values of another one large: outputs go one way, and gradients back.
        """
        route = self.request.route
        if body.index not in range(max(0, index - 1), min(len(route), index + 2)):
            return ProtocolError("an accusation of a peer that is no neighbour", peer=route[index].peer)
        refused = refusal(body.code, peer=route[body.index].peer)
        is_own = body.index == index and body.code == ErrorCode.NOT_FINITE
        suspects = [hop.peer for hop in (route if is_own else (route[index], route[body.index]))]
        return HopFault(refused, claimant=route[index].peer, suspects=suspects)

    def _record_progress(self) -> None:
        """Note the time of a frame that was waited for. Others do not count, else a hop could hide that another one hangs."""
        now_s = self._loop.time()
        if self._answered:
            self._longest_s = max(self._longest_s, now_s - self._received_s)
        self._received_s = now_s

    def _record_report(self, body: TuneLoss | TuneCounted) -> None:
        """Note a report on a microbatch, which is over once both reports are here; a held-out one has only a loss."""
        if body.number in self._passing:
            self._fail(ProtocolError("a hop that gives its owner no gradients", peer=self.request.route[0].peer))
        wait = self._waits.get(body.number)
        if wait is None or wait.step != body.step or type(body) not in wait.missing:
            return
        wait.missing.remove(type(body))
        self._answered = True
        self._record_progress()
        if isinstance(body, TuneLoss) and not abs(body.loss) <= MOST_LOSS:  # NaN, too
            self._fail(refusal(ErrorCode.NOT_FINITE, peer=self.request.route[-1].peer))
            return
        if isinstance(body, TuneLoss):
            self._losses[body.number] = body.loss, body.labels
        if not wait.missing and not wait.over.done():
            wait.over.set_result(None)

    def _coming(self, spec: HopSpec) -> ComingState:
        return ComingState(self._shapes, range(spec.start, spec.end))

    def _receive_piece(self, hop: _Hop, body: AdapterPiece, payload: Buffer) -> None:
        """Take a piece of the tensors that a hop gives."""
        try:
            if hop.gathered is None or hop.gathered.done():
                raise ProtocolError("a piece of a state that does not fit")
            hop.coming.accept_piece(body, payload)
        except ProtocolError as error:
            error.peer = hop.spec.peer
            self._fail(error)
            return
        self._record_progress()
        if hop.coming.is_complete:
            hop.gathered.set_result(hop.coming.files)

    def _fail(self, error: Exception) -> None:
        if not self._failed.done():
            self._failed.set_exception(error)

    def _expect(self, hop: _Hop) -> asyncio.Future[Body]:
        hop.answer = self._loop.create_future()
        return hop.answer

    async def _ask_all(self, question: Body, kind: type[T]) -> list[T]:
        """Ask all hops, and return their answers in order. Raises ProtocolError for an answer of another kind."""
        await self._settle()
        answers = [self._expect(hop) for hop in self._hops]
        for hop in self._hops:
            hop.channel.send(question, at_once=True)
        found: list[T] = []
        for hop, answer in zip(self._hops, answers, strict=True):
            body = await self._wait(answer)
            if not isinstance(body, kind):
                raise ProtocolError(f"{type(body).__name__} is no answer", peer=hop.spec.peer)
            found.append(body)
        return found

    async def _wait(self, work: Awaitable[T]) -> T:
        """Wait for `work`. Raises the error of a hop that fails, or PeerLost if all hops are silent for too long."""
        self._received_s = max(self._received_s, self._loop.time())
        try:
            return await unless_failed(
                work, self._failed, lambda: self._received_s + self._patience_s - self._loop.time()
            )
        except asyncio.TimeoutError:
            raise PeerLost("no hop answers although all links are alive") from None

    @property
    def _patience_s(self) -> float:
        return min(FIRST_S, max(FLOOR_S, SLACK * self._longest_s)) if self._answered else FIRST_S
