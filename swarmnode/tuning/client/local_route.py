"""Adapter in this process: the same trainer and the same steps, without a swarm."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from swarmnode.codec.body import HopSpec
from swarmnode.codec.tuning_messages import AdapterOpened
from swarmnode.compute.executor import Executor
from swarmnode.compute.model.span import ModelSpan
from swarmnode.compute.training.adapters.recipe import AdapterRecipe
from swarmnode.compute.training.segment import Values
from swarmnode.errors import NetworkDown, PeerError
from swarmnode.plan.view import Span
from swarmnode.tuning.adapter_parts import AdapterParts, AdapterPassage, TuningDevice, TuningPace
from swarmnode.tuning.client.tuned_route import AdapterState, TunedMicrobatch

HERE = "this machine"


class LocalRoute:
    """Adapter on a whole model in this process; see `AdapterRoute`."""

    leaving = False

    def __init__(self, parts: AdapterParts) -> None:
        self._parts = parts

    @property
    def sizes(self) -> list[tuple[HopSpec, AdapterOpened]]:
        """Bytes that the adapter takes; the only hop is this process."""
        units = self._parts.units
        hop = HopSpec(HERE, units.start, units.stop)
        return [(hop, AdapterOpened(self._parts.adapter_bytes, self._parts.pass_bytes))]

    async def compute(self, step: int, microbatches: Sequence[TunedMicrobatch]) -> dict[int, tuple[float, int]]:
        """Return for each microbatch the sum of its labels' losses, and their number."""
        found = {}
        for one in microbatches:
            passage = AdapterPassage(self._parts, one.number, one.inputs, learns=one.learns)
            passage.labels, passage.share, passage.ends_here = one.labels, one.share, True
            await passage.cross()
            found[one.number] = passage.loss, passage.counted
        return found

    async def forward(self, step: int, number: int, inputs: Values, *, learns: bool) -> Tensor:
        """Return the outputs of layers without the model's ends."""
        passage = AdapterPassage(self._parts, number, inputs, learns=learns)
        hidden_BTH: Tensor = (await passage.there(passage.leave))[0]
        if not learns:
            await self.drop(step, number)
        return hidden_BTH

    async def backward(self, step: int, number: int, gradient_BTH: Tensor) -> Tensor:
        """Return the gradient of a microbatch's hidden states, and count the adapter's gradients."""
        passage = AdapterPassage(self._parts, number, (), learns=True)
        back_BTH: Tensor = (await passage.turn_back((gradient_BTH,)))[0]
        return back_BTH

    async def drop(self, step: int, number: int) -> None:
        """Forget a microbatch that waits for its gradient."""
        self._parts.forget(number)

    async def gradient(
        self, step: int, microbatches: Sequence[TunedMicrobatch]
    ) -> tuple[dict[int, tuple[float, int]], float]:
        """Return what `compute` does, and the norm of the step's gradient."""
        return await self.compute(step, microbatches), math.sqrt(await self._parts.square())

    async def update(self, step: int, learning_rate: float, scale: float) -> None:
        """Update the adapter with its gradient times `scale`."""
        await self._parts.step(step, learning_rate, scale)

    async def fetch(self, step: int, *, gradients: bool = False) -> AdapterState:
        """Return the state at the beginning of `step`, or the sums of gradients in it."""
        give = self._parts.gradients if gradients else self._parts.state
        return AdapterState(step, {unit: await give(unit) for unit in self._parts.units})

    async def load(self, state: AdapterState, *, gradients: bool = False) -> None:
        """Go on from a state, or replace the sums of gradients."""
        for unit, raw in sorted(state.layers.items()):
            await self._parts.load(unit, raw, gradients=gradients)

    async def close(self) -> None:
        """Free the adapter."""
        self._parts.close()


class LocalOpener:
    """Opener of a `LocalRoute` on a model's span, which computes on `executor`; see `RouteOpener`."""

    def __init__(self, span: ModelSpan, executor: Executor, recipe: AdapterRecipe, size: tuple[int, int]) -> None:
        self._device = TuningDevice(span, executor, TuningPace(executor, 1.0, lambda: False))
        self._recipe = recipe
        self._size = size

    async def open(self, state: AdapterState | None) -> LocalRoute:
        """Open the adapter here. Raises Full if there is no memory."""
        span = self._device.span
        parts = await AdapterParts.open([self._device], Span(span.start, span.end), self._recipe, HERE, self._size)
        route = LocalRoute(parts)
        if state is not None:
            await route.load(state)
        return route

    def failed(self, error: PeerError | NetworkDown) -> None:
        """Raise the error: there is no other place."""
        raise error

    def succeeded(self) -> None:
        """Do nothing: no peer has to be forgiven."""
