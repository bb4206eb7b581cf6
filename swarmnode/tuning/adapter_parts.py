"""Adapter on the devices of one node: a trainer for the layers on each device, and passes through all of them.

Recipe and states of an adapter as bytes of messages.

Pace of tuning on a device that also serves sessions.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, TypeVar

import msgspec
import safetensors
import safetensors.torch
import torch
from torch import Tensor

from swarmnode.codec.body import DECODE_ERRORS, HopSpec
from swarmnode.codec.tuning_messages import PIECE_BYTES, AdapterPiece, TuneGradient, TuneInput, TuneLabels
from swarmnode.compress.codecs import Encoded
from swarmnode.compute.executor import ByPiece, Executor, Urgency, as_piece
from swarmnode.compute.model.adapters.adapter_file import units_of_layer
from swarmnode.compute.model.family import Family
from swarmnode.compute.model.span import ModelSpan
from swarmnode.compute.training.adapters.adapter_recipe import AdapterRecipe
from swarmnode.compute.training.adapters.adapter_trainer import AdapterTrainer
from swarmnode.compute.training.adapters.layers import PROMPT, STEP, AdapterLayers, copied, layer_of
from swarmnode.compute.training.saved_activations import Gradients
from swarmnode.compute.training.segment import Values, moved
from swarmnode.errors import CheckpointError, ErrorCode, ProtocolError, UsageError
from swarmnode.ledger import Account, MemoryLedger
from swarmnode.measuring.meters import BACKWARD, FORWARD
from swarmnode.net.interfaces import Buffer
from swarmnode.plan.view import Span
from swarmnode.serving.passage import URGENCY, MicrobatchPassage, read_from, read_gradients

SLACK_BYTES = 1 << 20  # for the headers of a state's files


def encode_recipe(recipe: AdapterRecipe) -> bytes:
    """Return the msgpack bytes of a recipe."""
    return msgspec.msgpack.encode(recipe)


def decode_recipe(raw: bytes) -> AdapterRecipe:
    """Return the recipe in a message. Raises ProtocolError if it is not valid."""
    try:
        return msgspec.msgpack.decode(raw, type=AdapterRecipe)
    except (*DECODE_ERRORS, UsageError) as error:
        raise ProtocolError(f"bad recipe: {error}") from None


def pieces_of(
    step: int, unit: int, raw: bytes, *, ends: bool, gradients: bool = False
) -> Iterator[tuple[AdapterPiece, bytes]]:
    """Yield the messages for the file of one layer at `step`, each with its payload. `ends`: it is the last layer.

    `gradients`: the file holds sums of gradients for a hop, in place of a state.
    """
    for offset in range(0, max(1, len(raw)), PIECE_BYTES):
        piece = raw[offset : offset + PIECE_BYTES]
        is_last = ends and offset + len(piece) == len(raw)
        yield AdapterPiece(step, unit, offset, len(raw), is_last, gradients), piece


def decode_state(raw: bytes) -> dict[str, Tensor]:
    """Return the tensors in a layer's file, by name. Raises CheckpointError if the bytes are no safetensors file."""
    try:
        return safetensors.torch.load(raw)
    except (safetensors.SafetensorError, KeyError, ValueError, TypeError, RuntimeError) as error:  # also of odd dtypes
        raise CheckpointError(f"the bytes are no state of an adapter: {str(error)[:200]}") from None


T = TypeVar("T")


class TuningPace:
    """Pace of all that tuning computes on one device: passes, starts, updates and states.

    While `serves` returns true, the device computes one piece of a work (a layer for some rows, some elements of a vector) at a
    time, and rests from tuning after each, so that tuning takes `share` of the time. Otherwise a work goes on until a session
    comes. So a session's step waits for one piece at most.
    """

    def __init__(self, executor: Executor, share: float, serves: Callable[[], bool]) -> None:
        self._executor = executor
        self._share = share
        self._serves = serves
        self._turn = asyncio.Lock()
        self._free_at_s = 0.0  # on the executor's clock
        self.busy_s = 0.0  # seconds of all works

    async def run(self, urgency: Urgency, work: ByPiece[T], *, kind: str, owner: str, size: int) -> T:
        """Do all pieces of `work` on the device, and return its result. Raises ExecutorDied, and whatever the work raises."""
        while True:
            async with self._turn if self._serves() else nullcontext():
                wait_s = self._free_at_s - self._executor.clock()
                if wait_s > 0 and self._serves():
                    await asyncio.sleep(wait_s)
                ended = await self._executor.call(
                    urgency, partial(self._timed, work), kind=kind, owner=owner, size=size
                )
            if ended:
                return ended[0]

    def _timed(self, work: ByPiece[T]) -> list[T]:
        """Do a piece on the device's thread, and all others unless sessions run. Note how long the device then rests from tuning.

        Returns a list with the result; empty if the work goes on. A work that has waited for the thread while a session came does
        nothing before the rest is over.
        """
        began_s = self._executor.began_s
        if self._serves() and began_s < self._free_at_s:
            return []
        try:
            next(work)
            while not self._serves():
                next(work)
            return []
        except StopIteration as ended:
            return [ended.value]
        finally:
            ended_s = self._executor.clock()
            self.busy_s += ended_s - began_s
            self._free_at_s = ended_s + (ended_s - began_s) * (1 / self._share - 1)


KIND = "tune"


@dataclass(frozen=True)
class TuningDevice:
    """Layers on one device of a node, the device's thread, and the pace of tuning on it."""

    span: ModelSpan
    executor: Executor
    pace: TuningPace


@dataclass
class AdapterPart:
    """Layers of an adapter on one device, and their trainer."""

    device: TuningDevice
    trainer: AdapterTrainer
    loading: dict[str, Tensor] = field(default_factory=dict)  # tensors of a state that is coming

    @property
    def units(self) -> range:
        """Numbers of the layers."""
        return range(self.trainer.span.start, self.trainer.span.end)


class AdapterParts:
    """Adapter on one hop's layers, which may lie on several devices. Made by `open`, ended by `close`.

    An `AdapterPassage` takes one microbatch through it.
    """

    def __init__(self, parts: Sequence[AdapterPart], owner: str) -> None:
        self.parts = parts
        self._owner = owner
        self._loading = asyncio.Lock()  # held in the order in which files come
        self.device = parts[0].trainer.span.device  # of the values that come in
        self.pass_bytes = 0  # of one microbatch, until its gradient comes

    @classmethod
    async def open(
        cls, devices: Sequence[TuningDevice], units: Span, recipe: AdapterRecipe, owner: str, size: tuple[int, int]
    ) -> AdapterParts:
        """Make an adapter for layers `units`, for microbatches of `size` (rows, positions).

        Raises Full if there is no room on a device.
        """
        parts: list[AdapterPart] = []
        used = _used(devices, units)
        try:
            for device in used:
                make = as_piece(partial(_make, parts, device, narrowed(device.span, units), recipe, owner))
                await device.pace.run(Urgency.FORWARD, make, kind="open an adapter", owner=owner, size=0)
            opened = cls(parts, owner)
            for part in parts:
                await opened.run(part, Urgency.FORWARD, part.trainer.start_by_piece())
                await opened.run(part, Urgency.FORWARD, part.trainer.prepare_by_piece())
                # The rows and positions of the largest microbatch of `size` that the model can compute.
                limit = part.trainer.span.position_limit
                within_model = size if limit is None else (size[0], min(size[1], limit))
                measuring = part.trainer.activation_bytes_by_piece(*within_model)
                opened.pass_bytes += await opened.run(part, Urgency.FORWARD, measuring)
        except BaseException:
            for device in used:  # each behind a part that its thread still makes for a caller that was cancelled
                let_go = partial(_close_on, parts, device)
                device.executor.call(Urgency.CONTROL, let_go, kind="let an adapter go", owner=owner)
            raise
        return opened

    @property
    def units(self) -> range:
        """Numbers of the layers."""
        return range(self.parts[0].units.start, self.parts[-1].units.stop)

    @property
    def model_units(self) -> int:
        """Number of layers of the whole model."""
        return self.parts[0].trainer.span.family.units

    @property
    def hidden_size(self) -> int:
        """Size of the hidden states between the layers."""
        return self.parts[0].trainer.span.hidden_size

    @property
    def adapter_bytes(self) -> int:
        """Bytes of weights, gradients and optimiser state."""
        return sum(part.trainer.adapter_bytes for part in self.parts)

    @property
    def held_bytes(self) -> int:
        """Bytes of the adapter, and of passes in flight."""
        return self.adapter_bytes + sum(part.trainer.in_flight_bytes for part in self.parts)

    @property
    def most_state_bytes(self) -> int:
        """Upper bound of the bytes of a state of all layers."""
        return self.adapter_bytes + SLACK_BYTES

    def close(self) -> None:
        """Forget everything, and release the memory, after the running piece."""
        for part in self.parts:
            part.device.executor.call(Urgency.CONTROL, part.trainer.close, kind="let an adapter go", owner=self._owner)

    # -- passes

    def check_pass(self, rows: int, tokens: int) -> None:
        """Raise ProtocolError if a microbatch of some rows of tokens can never have room, even alone."""
        for part in self.parts:
            trainer = part.trainer
            positions = tokens + (trainer.recipe.prompt_positions if trainer.span.has_embedding else 0)
            kept_bytes = trainer.activation_bytes(rows, positions)  # measured when the adapter was opened
            _check_room(trainer.span.adapters.ledger, trainer.adapter_bytes + kept_bytes)

    def forget(self, number: int) -> None:
        """Forget a microbatch that has no pass here any more; does nothing if there is none."""
        for part in self.parts:
            if part.trainer.in_flight:
                part.device.executor.call(
                    Urgency.CONTROL, partial(part.trainer.forget, number), kind=KIND, owner=self._owner
                )

    async def run(self, part: AdapterPart, urgency: Urgency, work: ByPiece[T]) -> T:
        """Do a work on the device of `part`, and return its result. Raises ExecutorDied, and whatever the work raises."""
        return await part.device.pace.run(urgency, work, kind=KIND, owner=self._owner, size=0)

    # -- steps and states

    async def square(self) -> float:
        """Return the sum of squares of the gradient. Raises NotFinite."""
        squares = [
            await self.run(part, Urgency.BACKWARD, part.trainer.gradient_square_by_piece()) for part in self.parts
        ]
        return sum(squares)

    async def step(self, number: int, learning_rate: float, scale: float) -> None:
        """Update the weights, and begin the next step. Raises ProtocolError for another step than the present one."""
        for part in self.parts:
            await self.run(part, Urgency.BACKWARD, part.trainer.step_by_piece(number, learning_rate, scale))

    async def state(self, unit: int) -> bytes:
        """Return the weights and moments of one layer, and the number of updates, as a safetensors file."""
        return await self._saved(unit, lambda part: part.trainer.state())

    async def gradients(self, unit: int) -> bytes:
        """Return the sums of gradients of one layer, under the names of its weights, as a safetensors file."""
        return await self._saved(unit, lambda part: part.trainer.gradients())

    async def _saved(self, unit: int, tensors: Callable[[AdapterPart], Mapping[str, Tensor]]) -> bytes:
        part = self._part_of(unit)
        copies = await self.run(part, Urgency.BACKWARD, _copies(part, unit, tensors))
        raw: bytes = await asyncio.to_thread(safetensors.torch.save, copies)  # the device does not wait for it
        return raw

    async def load(self, unit: int, raw: bytes, *, gradients: bool = False) -> None:
        """Take in the state of one layer, or its sums of gradients; all are loaded with the last one.

        Raises ProtocolError if the tensors do not fit.
        """
        part = self._part_of(unit)
        try:
            async with self._loading:
                part.loading |= await asyncio.to_thread(decode_state, raw)
                if unit == part.units[-1]:
                    state, part.loading = part.loading, {}
                    load = part.trainer.load_gradients if gradients else part.trainer.load_by_piece
                    await self.run(part, Urgency.BACKWARD, load(state))
        except CheckpointError as error:
            raise ProtocolError(f"a state that does not fit: {error}", code=ErrorCode.INVALID_REQUEST) from error

    def _part_of(self, unit: int) -> AdapterPart:
        return next(part for part in self.parts if unit in part.units)


class AdapterPassage(MicrobatchPassage[AdapterPart]):
    """Passage of one microbatch through an adapter's parts. Here its values come and leave as they are, without a network."""

    loss = 0.0
    """Sum of the losses of the labels, once it is known"""
    counted = 0
    """Number of labels in `loss`"""

    def __init__(self, adapter: AdapterParts, number: int, inputs: Values, *, learns: bool) -> None:
        self.adapter = adapter
        self.parts = adapter.parts
        self.number = number
        self.learns = learns
        self.labels: Values = ()
        self.share = 0.0  # of the labels' losses in the step's
        self._inputs = inputs

    async def compute(self, phase: str, part: AdapterPart, work: ByPiece[T]) -> T:
        """Do `work` at the pace of tuning on the part's device."""
        return await self.adapter.run(part, URGENCY[phase], work)

    def read(self) -> Values:
        """Return the values that came to the hop, on its first device."""
        return self._inputs

    def read_labels(self) -> Values:
        """Return the labels that the owner gives."""
        return self.labels

    def encoded(self, values: Values) -> Any:
        """Return what leaves for the next peer: the outputs."""
        return values

    def encoded_gradients(self, gradients: Gradients) -> Any:
        """Return what leaves for the sender: the gradients of the inputs."""
        return gradients

    async def send_on(self, encoded: Any) -> Any:
        """Send nothing: the caller holds the outputs."""

    def forward(self, part: AdapterPart, values: Values | None) -> ByPiece[Values]:
        """Compute a part's outputs, and the places that came with the inputs, which stay as they are."""
        x, *places = self.read() if values is None else moved(values, part.trainer.span.device)
        out = yield from part.trainer.forward_by_piece(self.number, x, *places[:1], evaluates=not self.learns)
        return out, *places

    def leave(self, part: AdapterPart, values: Values | None) -> ByPiece[Any]:
        """Compute the last part's outputs, and encode them."""
        return self.encoded((yield from self.forward(part, values)))

    def finish(self, part: AdapterPart, values: Values | None) -> ByPiece[Any]:
        """Compute the loss on the last part, and the gradients of its inputs; None if the microbatch does not learn.

        Raises ProtocolError if the labels are not one tensor.
        """
        entered = self.read() if values is None else values
        labels = self.read_labels()
        if len(labels) != 1:
            raise ProtocolError(f"{len(labels)} labels for a microbatch, which takes one tensor of them")
        _, *places = yield from self.forward(part, entered)
        self.loss, self.counted = yield from part.trainer.loss_by_piece(self.number, labels[0], self.share)
        return (yield from self.backward(part, (None, *(None for _ in places)))) if self.learns else None

    def backward(self, part: AdapterPart, gradients: Gradients) -> ByPiece[Any]:
        """Take gradients of the outputs (none after the loss) back through a part, and return those of its inputs."""
        gradient, *rest = gradients
        if gradient is not None:
            gradient = gradient.to(part.trainer.span.device)
        back = (yield from part.trainer.backward_by_piece(self.number, gradient)), *rest
        if part is not self.parts[0]:
            return back
        yield
        return self.encoded_gradients(back)

    def turn(self, part: AdapterPart, answer: Any) -> ByPiece[Any]:
        """Take the caller's gradients of the outputs back through the last part."""
        return self.backward(part, answer)


Sent = tuple[tuple[bool, ...], Encoded]
"""Gradients for the sender of a microbatch: which values have one, and those encoded"""


class HopAdapter(Protocol):
    """Interface to `HeldAdapter` (`held_adapter.py`): the members that a passage uses."""

    owner: str

    @property
    def hop(self) -> HopSpec:
        """Hop of the adapter's route that this node is."""

    @property
    def sender(self) -> str:
        """Peer that microbatches come from."""

    @property
    def next_peer(self) -> str:
        """Peer that outputs go to, and whose gradients come back."""

    def encode(self, values: Values, direction: str) -> Encoded:
        """Return descriptors and payloads of values for the neighbour in a direction. Raises ProtocolError if they overflow."""

    def record_pass(self, phase: str, began_s: float) -> None:
        """Meter a pass that began at `began_s`, with its waiting."""

    async def send_on(self, body: TuneInput, encoded: Encoded) -> tuple[TuneGradient, Buffer] | None:
        """Send outputs of the microbatch `body` on, and return the gradients that come back; None if it has no way back."""


class HopPassage(AdapterPassage):
    """Passage of one microbatch through a hop: its values come from the previous hop or the owner, and leave encoded."""

    def __init__(
        self,
        held: HopAdapter,
        adapter: AdapterParts,
        body: TuneInput,
        payload: Buffer,
        labels: tuple[TuneLabels, Buffer] | None,
    ) -> None:
        """Create a passage of the microbatch `body`. `labels` are those of the owner at the route's end, else None."""
        super().__init__(adapter, body.number, (), learns=body.learns)
        self.held = held
        self.sender, self.receiver = held.sender, held.next_peer
        self.ends_here = labels is not None
        self.began_s = asyncio.get_running_loop().time()
        self._body, self._payload, self._came_labels = body, payload, labels

    def read(self) -> Values:
        """Return the values that the sender sent. Raises ProtocolError, which names it, if they are malformed or too large."""
        return read_from(self.held.sender, self._body.values, self._payload, self.adapter.device)

    def read_labels(self) -> Values:
        """Return the owner's labels. Raises ProtocolError, which names the owner, if they are malformed."""
        assert self._came_labels is not None
        body, payload = self._came_labels
        self.share = body.share
        return read_from(self.held.owner, body.values, payload, "cpu", bounded=False)

    def encoded(self, values: Values) -> Encoded:
        """Return the outputs encoded for the next peer. Raises ProtocolError if they overflow."""
        return self.held.encode(values, FORWARD)

    def encoded_gradients(self, gradients: Gradients) -> Sent:
        """Return the gradients encoded for the sender. Raises ProtocolError if they overflow."""
        present = tuple(one is not None for one in gradients)
        return present, self.held.encode(tuple(one for one in gradients if one is not None), BACKWARD)

    async def send_on(self, encoded: Encoded) -> tuple[TuneGradient, Buffer] | None:
        """Send the outputs on; see `HopAdapter`."""
        self.held.record_pass(FORWARD, self.began_s)
        return await self.held.send_on(self._body, encoded)

    async def turn_back(self, answer: tuple[TuneGradient, Buffer]) -> Sent:
        """Compute the gradients of the inputs from those of the outputs, which the next peer sent."""
        began_s = asyncio.get_running_loop().time()
        sent: Sent = await super().turn_back(answer)
        self.held.record_pass(BACKWARD, began_s)
        return sent

    def turn(self, part: AdapterPart, answer: tuple[TuneGradient, Buffer]) -> ByPiece[Any]:
        """Compute the gradients of the last part's inputs. Raises ProtocolError, which names the next peer, if what it sent is
        malformed or too large."""
        body, payload = answer
        device = self.adapter.device
        gradients = read_gradients(self.held.next_peer, body.present, body.values, payload, device)
        return (yield from self.backward(part, gradients))


def check_parts(devices: Sequence[TuningDevice], units: Span, recipe: AdapterRecipe) -> int:
    """Return the bytes of an adapter for layers `units`. Raises ProtocolError if the devices can never have room for it."""
    needed: dict[MemoryLedger, int] = {}
    for device in _used(devices, units):
        span = narrowed(device.span, units)
        ledger, adapter_bytes = span.adapters.ledger, sum(AdapterLayers(span, recipe).memory_bytes().values())
        needed[ledger] = needed.get(ledger, 0) + adapter_bytes
    for ledger, size_bytes in needed.items():
        _check_room(ledger, size_bytes)
    return sum(needed.values())


def _check_room(ledger: MemoryLedger, size_bytes: int) -> None:
    """Raise ProtocolError if `size_bytes` exceed what a ledger has beside the model's weights."""
    limit_bytes = ledger.limit_bytes
    if limit_bytes is not None and size_bytes > limit_bytes - ledger.accounts()[Account.WEIGHTS]:
        text = f"tuning with {size_bytes / 1e6:.0f} MB at once, more than this machine can ever have"
        raise ProtocolError(text, code=ErrorCode.TOO_LARGE)


def _used(devices: Sequence[TuningDevice], units: Span) -> list[TuningDevice]:
    """Return the devices that have some of the layers `units`."""
    return [one for one in devices if one.span.start < units.end and units.start < one.span.end]


def narrowed(span: ModelSpan, units: Span) -> ModelSpan:
    """Return the span, as one of the layers that it has in `units` only. Weights and adapters are the same ones."""
    narrow = copy.copy(span)
    narrow.start, narrow.end = max(span.start, units.start), min(span.end, units.end)
    return narrow


def unit_of(family: Family, name: str) -> int:
    """Return the layer that a tensor of a trainer's state belongs to, by its name."""
    tensor = name.partition("/")[2]
    return 0 if tensor == PROMPT else units_of_layer(family, layer_of(tensor))[0]


# -- on the thread of a part's device


def _make(parts: list[AdapterPart], device: TuningDevice, span: ModelSpan, recipe: AdapterRecipe, owner: str) -> None:
    parts.append(AdapterPart(device, AdapterTrainer(span, recipe, name=owner)))


def _close_on(parts: Sequence[AdapterPart], device: TuningDevice) -> None:
    for part in parts:
        if part.device is device:
            part.trainer.close()


def _copies(
    part: AdapterPart, unit: int, tensors: Callable[[AdapterPart], Mapping[str, Tensor]]
) -> ByPiece[dict[str, Tensor]]:
    """Return copies on the CPU of the tensors of a unit, and of the number of updates."""
    family = part.trainer.span.family
    found = {name: one.detach() for name, one in tensors(part).items() if name == STEP or unit_of(family, name) == unit}
    copies = {name: torch.empty(one.shape, dtype=one.dtype) for name, one in found.items()}
    yield from copied((copies[name], one) for name, one in found.items())
    return copies
