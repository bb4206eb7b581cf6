"""Adapter on the devices of one node: a trainer for the layers on each device, and passes through all of them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Generic, TypeVar

import safetensors.torch
from torch import Tensor

from swarmnode.compute.executor import Executor, Urgency
from swarmnode.compute.model.adapters.adapter_file import units_of_layer
from swarmnode.compute.model.family import Family
from swarmnode.compute.model.span import ModelSpan
from swarmnode.compute.training.adapters.adapter_weights import STEP
from swarmnode.compute.training.adapters.layers import layer_of
from swarmnode.compute.training.adapters.recipe import AdapterRecipe
from swarmnode.compute.training.adapters.starts import PROMPT
from swarmnode.compute.training.adapters.trainer import AdapterTrainer, ByPiece
from swarmnode.compute.training.saved_activations import Gradients
from swarmnode.compute.training.segment import Values, moved
from swarmnode.errors import CheckpointError, ErrorCode, ProtocolError
from swarmnode.plan.view import Span
from swarmnode.tuning.adapter_bytes import SLACK_BYTES, decode_state
from swarmnode.tuning.pace import TuningPace

T = TypeVar("T")
KIND = "tune"


@dataclass(frozen=True)
class TuningDevice:
    """Layers on one device of a node, the device's thread, and the pace of tuning on it."""

    span: ModelSpan
    executor: Executor
    pace: TuningPace


@dataclass(frozen=True)
class LossEnd(Generic[T]):
    """End of a microbatch at the last hop: the sum of its labels' losses, their number, and the gradients as they were encoded."""

    loss: float
    labels: int
    sent: T


@dataclass
class _Part:
    device: TuningDevice
    trainer: AdapterTrainer
    loading: dict[str, Tensor] = field(default_factory=dict)  # tensors of a state that is coming

    @property
    def units(self) -> range:
        return range(self.trainer.span.start, self.trainer.span.end)


class AdapterParts:
    """Adapter on one hop's layers, which may lie on several devices. Made by `open`, ended by `close`.

    Functions that are arguments run on a device's thread: they decode what came and encode what leaves.
    """

    def __init__(self, parts: Sequence[_Part], owner: str) -> None:
        self._parts = parts
        self._owner = owner
        self.device = parts[0].trainer.span.device  # of the values that come in
        self.pass_bytes = 0  # of one microbatch, until its gradient comes

    def __repr__(self) -> str:
        return f"<AdapterParts {[part.trainer for part in self._parts]}>"

    @classmethod
    async def open(
        cls, devices: Sequence[TuningDevice], units: Span, recipe: AdapterRecipe, owner: str, size: tuple[int, int]
    ) -> AdapterParts:
        """Make an adapter for layers `units`, for microbatches of `size` (rows, positions).

        Raises Full if there is no room on a device, UsageError if the layers cannot have such an adapter.
        """
        parts: list[_Part] = []
        used = [one for one in devices if one.span.start < units.end and units.start < one.span.end]
        try:
            for device in used:
                make = partial(_make, parts, device, narrowed(device.span, units), recipe, owner)
                await device.executor.call(Urgency.FORWARD, make, kind="open an adapter", owner=owner)
            opened = cls(parts, owner)
            for part in parts:
                await opened._run(part, Urgency.FORWARD, part.trainer.prepare_by_piece())
            opened.pass_bytes = sum([await opened._on(part, part.trainer.activation_bytes, *size) for part in parts])
        except BaseException:
            for device in used:  # each behind a part that its thread still makes for a caller that was cancelled
                let_go = partial(_close_on, parts, device)
                device.executor.call(Urgency.CONTROL, let_go, kind="let an adapter go", owner=owner)
            raise
        return opened

    @property
    def units(self) -> range:
        """Numbers of the layers."""
        return range(self._parts[0].units.start, self._parts[-1].units.stop)

    @property
    def model_units(self) -> int:
        """Number of layers of the whole model."""
        return self._parts[0].trainer.span.family.units

    @property
    def hidden_size(self) -> int:
        """Size of the hidden states between the layers."""
        return self._parts[0].trainer.span.hidden_size

    @property
    def adapter_bytes(self) -> int:
        """Bytes of weights, gradients and optimiser state."""
        return sum(part.trainer.adapter_bytes for part in self._parts)

    @property
    def most_state_bytes(self) -> int:
        """Upper bound of the bytes of a state of all layers."""
        return self.adapter_bytes + SLACK_BYTES

    def close(self) -> None:
        """Forget everything, and release the memory, after the running piece."""
        for part in self._parts:
            part.device.executor.call(Urgency.CONTROL, part.trainer.close, kind="let an adapter go", owner=self._owner)

    # -- passes

    async def forward(
        self, number: int, came: Callable[[], Values], leave: Callable[[Values], T], *, learns: bool
    ) -> T:
        """Run a microbatch forward from the values of `came`, and return what `leave` makes of the result."""
        values = await self._enter(number, came, learns=learns)
        return await self._run(
            self._parts[-1], Urgency.FORWARD, _forward(self._parts[-1], number, values, leave, learns)
        )

    async def finish(
        self,
        number: int,
        came: Callable[[], Values],
        labels: Callable[[], Values],
        leave: Callable[[Gradients], T],
        share: float,
        *,
        learns: bool,
    ) -> LossEnd[T]:
        """Run a microbatch forward to its loss, whose sum over labels counts `share`, and back to the hop's inputs if it learns."""
        values = await self._enter(number, came, learns=learns)
        *before, last = self._parts
        work = _finish(last, number, values, labels, share, learns)
        loss, count, gradients = await self._run(last, Urgency.FORWARD, work)
        sent = await self._leave(number, before, gradients, leave)
        return LossEnd(loss, count, sent)

    async def backward(self, number: int, came: Callable[[], Gradients], leave: Callable[[Gradients], T]) -> T:
        """Take the gradients of `came` back through the layers, and return what `leave` makes of those of the inputs."""
        *before, last = self._parts
        gradients = await self._run(last, Urgency.BACKWARD, _backward(last, number, came))
        return await self._leave(number, before, gradients, leave)

    def forget(self, number: int) -> None:
        """Forget a microbatch that has no pass here any more; does nothing if there is none."""
        for part in self._parts:
            if part.trainer.in_flight:
                part.device.executor.call(
                    Urgency.CONTROL, partial(part.trainer.forget, number), kind=KIND, owner=self._owner
                )

    async def _enter(self, number: int, came: Callable[[], Values], *, learns: bool) -> Callable[[], Values]:
        """Run all parts but the last one forward. Returns the function that gives the values for the last one."""
        for part in self._parts[:-1]:
            values = await self._run(part, Urgency.FORWARD, _forward(part, number, came, unchanged, learns))
            came = partial(moved, values, self._parts[-1].trainer.span.device)
        return came

    async def _leave(
        self, number: int, before: Sequence[_Part], gradients: Gradients, leave: Callable[[Gradients], T]
    ) -> T:
        """Take gradients back through the parts `before` the last one, and return what `leave` makes of those of the inputs."""
        for part in reversed(before):
            gradients = await self._run(part, Urgency.BACKWARD, _backward(part, number, partial(unchanged, gradients)))
        return await self._on(self._parts[0], leave, gradients)

    async def _run(self, part: _Part, urgency: Urgency, work: ByPiece[T]) -> T:
        return await part.device.pace.run(urgency, work, kind=KIND, owner=self._owner, size=0)

    async def _on(self, part: _Part, function: Callable[..., T], *args: object) -> T:
        """Run a short function on the part's device."""
        call = partial(function, *args)
        return await part.device.executor.call(Urgency.BACKWARD, call, kind=KIND, owner=self._owner)

    # -- steps and states

    async def square(self) -> float:
        """Return the sum of squares of the gradient. Raises NotFinite."""
        return sum([await self._on(part, part.trainer.gradient_square) for part in self._parts])

    async def step(self, number: int, learning_rate: float, scale: float) -> None:
        """Update the weights, and begin the next step. Raises ProtocolError for another step than the present one."""
        for part in self._parts:
            await self._on(part, part.trainer.step, number, learning_rate, scale)

    async def state(self, unit: int) -> bytes:
        """Return the weights and moments of one layer, and the number of updates, as a safetensors file."""
        part = self._part_of(unit)
        return await self._on(part, _saved, part, unit, part.trainer.state)

    async def gradients(self, unit: int) -> bytes:
        """Return the sums of gradients of one layer, under the names of its weights, as a safetensors file."""
        part = self._part_of(unit)
        return await self._on(part, _saved, part, unit, part.trainer.gradients)

    async def load(self, unit: int, raw: bytes, *, gradients: bool = False) -> None:
        """Take in the state of one layer, or its sums of gradients; all are loaded with the last one.

        Raises ProtocolError if the tensors do not fit.
        """
        part = self._part_of(unit)
        await self._on(part, _load, part, unit, raw, part.trainer.load_gradients if gradients else part.trainer.load)

    def _part_of(self, unit: int) -> _Part:
        return next(part for part in self._parts if unit in part.units)


def narrowed(span: ModelSpan, units: Span) -> ModelSpan:
    """Return the span, as one of the layers that it has in `units` only. Weights and adapters are the same ones."""
    narrow = copy.copy(span)
    narrow.start, narrow.end = max(span.start, units.start), min(span.end, units.end)
    return narrow


def unchanged(values: T) -> T:
    """Return the values: for passes whose values come, or leave, as they are."""
    return values


def unit_of(family: Family, name: str) -> int:
    """Return the layer that a tensor of a trainer's state belongs to, by its name."""
    tensor = name.partition("/")[2]
    return 0 if tensor == PROMPT else units_of_layer(family, layer_of(tensor))[0]


# -- on the thread of a part's device


def _make(parts: list[_Part], device: TuningDevice, span: ModelSpan, recipe: AdapterRecipe, owner: str) -> None:
    parts.append(_Part(device, AdapterTrainer(span, recipe, name=owner)))


def _close_on(parts: Sequence[_Part], device: TuningDevice) -> None:
    for part in parts:
        if part.device is device:
            part.trainer.close()


def _forward(
    part: _Part, number: int, came: Callable[[], Values], leave: Callable[[Values], T], learns: bool
) -> ByPiece[T]:
    x, *places = came()
    out = yield from part.trainer.forward_by_piece(number, x, *places[:1], evaluates=not learns)
    return leave((out, *places))


def _finish(
    part: _Part, number: int, came: Callable[[], Values], labels: Callable[[], Values], share: float, learns: bool
) -> ByPiece[tuple[float, int, Gradients]]:
    x, *places = came()
    given = labels()
    if len(given) != 1:
        raise ProtocolError(f"{len(given)} labels for a microbatch, which takes one tensor of them")
    yield from part.trainer.forward_by_piece(number, x, *places[:1], evaluates=not learns)
    loss, count = yield from part.trainer.loss_by_piece(number, given[0], share)
    gradient = (yield from part.trainer.backward_by_piece(number)) if learns else None
    return loss, count, (gradient, *(None for _ in places))


def _backward(part: _Part, number: int, came: Callable[[], Gradients]) -> ByPiece[Gradients]:
    gradient, *rest = came()
    if gradient is not None:
        gradient = gradient.to(part.trainer.span.device)
    back = yield from part.trainer.backward_by_piece(number, gradient)
    return back, *rest


def _saved(part: _Part, unit: int, tensors: Callable[[], Mapping[str, Tensor]]) -> bytes:
    family = part.trainer.span.family
    found = {name: tensor for name, tensor in tensors().items() if name == STEP or unit_of(family, name) == unit}
    raw: bytes = safetensors.torch.save({name: tensor.detach().cpu().contiguous() for name, tensor in found.items()})
    return raw


def _load(part: _Part, unit: int, raw: bytes, load: Callable[[Mapping[str, Tensor]], None]) -> None:
    try:
        part.loading |= decode_state(raw)
        if unit == part.units[-1]:
            state, part.loading = part.loading, {}
            load(state)
    except CheckpointError as error:
        raise ProtocolError(f"a state that does not fit: {error}", code=ErrorCode.INVALID_REQUEST) from error
