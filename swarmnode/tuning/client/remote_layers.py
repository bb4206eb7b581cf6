"""Layers of a swarm's model as a function with gradients: the owner keeps the adapter's weights and optimiser, the hops compute.

A pass that a route has lost is computed again on another one: its inputs are kept until its gradient has come.
"""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Mapping
from dataclasses import dataclass

import safetensors.torch
import torch
from torch import Tensor

from swarmnode.codec.tuning_messages import MAX_WINDOW
from swarmnode.compute.training.adapters.layers import STEP, VECTORS, Shapes
from swarmnode.compute.training.saved_activations import is_finite
from swarmnode.compute.training.segment import Values
from swarmnode.errors import NetworkDown, NotFinite, PeerError, UsageError
from swarmnode.ledger import Account, MemoryLedger
from swarmnode.tuning.client.state_shapes import WEIGHT, AdapterState
from swarmnode.tuning.client.tuned_route import TunedMicrobatch
from swarmnode.tuning.client.tuner import AdapterRoute, RouteOpener

Weights = Mapping[str, Tensor]
"""Tensors of an adapter, by name"""

MOST_FAILURES = 10  # in a row
MOST_SUMMED = 64
"""Microbatches after which the hops' sums of gradients begin anew, so that rounding of a sum stays that of few microbatches"""


@dataclass(eq=False)
class PendingPass:
    """Pass of a microbatch with these `inputs`, which waits for its gradient. Its hops forget it once nothing refers to it."""

    inputs: Values
    number: int = 0


class RemoteLayers:
    """Layers of a model in a swarm, with an adapter whose weights the caller passes in.

    Args:
        opener: Source of routes through the layers.
        units: Shapes of the adapter's tensors in each of these layers.
        window: Most passes that wait for their gradients at once; the routes take one more.
        ledger: Account of the inputs that are kept.
    """

    def __init__(self, opener: RouteOpener, units: Mapping[int, Shapes], window: int, ledger: MemoryLedger) -> None:
        self.window = window
        self._opener = opener
        self._units = units
        self._memory = ledger.count(Account.ACTIVATIONS)
        self._lock = asyncio.Lock()
        self._route: AdapterRoute | None = None
        self._weights: dict[str, Tensor] = {}  # of the last pass,
        self._loaded = False  # and whether the present route has them
        self._sums: dict[str, Tensor] = {}  # of gradients at the hops, as they were fetched last,
        self._skipped = False  # and whether they have grown since
        self._pending: dict[int, weakref.ref[PendingPass]] = {}
        self._number = 0  # of the next microbatch
        self._failures = 0  # since the last pass that a route finished

    async def start(self) -> dict[str, Tensor]:
        """Open the adapter, and return its weights before any update. Raises NoRoute, Busy, UsageError."""
        async with self._lock:
            while True:
                try:
                    state = await (await self._opened()).fetch(0)
                    return _weights(state)
                except (PeerError, NetworkDown) as error:
                    await self._fail(error)

    async def forward(self, weights: Weights, inputs: Values, *, learns: bool) -> tuple[Tensor, PendingPass]:
        """Return the outputs hidden_BTH of the layers, and the pass, which waits for its gradient if it `learns`.

        `inputs` are hidden_BTH, and positions_BT if rows hold several documents.

        Raises:
            NotFinite: The inputs, the weights or the outputs are NaN or infinite.
            UsageError: `window` passes wait for their gradients, or no peer can compute this one.
            NoRoute, Busy, PeerError: No machines tune within the patience, or machines fail again and again.
        """
        if not is_finite(inputs):
            raise self._not_finite("hidden states that enter the swarm's layers")
        pending = PendingPass(inputs)
        async with self._lock:
            while True:
                try:
                    return await self._forward(weights, pending, learns=learns), pending
                except (PeerError, NetworkDown) as error:
                    await self._fail(error)

    async def backward(
        self, pending: PendingPass, gradient_BTH: Tensor, *, trains: bool
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the gradient of a pass's hidden states, and if the adapter `trains` those of its weights.

        A pass that is not in flight on the present route is computed again first. Raises as `forward`.
        """
        async with self._lock:
            while True:
                try:
                    if self._lacks(pending):
                        await self._forward(self._weights, pending, learns=True)
                    route = self._route
                    assert route is not None
                    del self._pending[pending.number]
                    self._count()
                    if trains and self._skipped:
                        await self._gradients(route)  # of passes whose gradients were not asked for
                    self._skipped = not trains
                    back_BTH = await route.backward(0, pending.number, gradient_BTH)
                    gradients = await self._gradients(route) if trains else {}
                    self._succeed()
                    return back_BTH, gradients
                except (PeerError, NetworkDown) as error:
                    await self._fail(error)

    async def loss(self, weights: Weights, microbatch: TunedMicrobatch) -> tuple[float, dict[str, Tensor]]:
        """Return the sum of a microbatch's losses times its share, and the gradients of the weights; none if it does not learn.

        The layers must include the model's ends. Raises as `forward`.
        """
        async with self._lock:
            while True:
                try:
                    route, number = await self._ready(weights, learns=microbatch.learns)
                    one = TunedMicrobatch(
                        number, microbatch.inputs, microbatch.labels, microbatch.share, microbatch.learns
                    )
                    found = await route.compute(0, [one])
                    gradients = await self._gradients(route) if microbatch.learns else {}
                    self._succeed()
                    return found[number][0] * microbatch.share, gradients
                except (PeerError, NetworkDown) as error:
                    await self._fail(error)

    async def close(self) -> None:
        """Free the adapter at the hops. A later pass opens it again."""
        async with self._lock:
            await self._leave()

    # -- passes on the present route, within the lock

    async def _forward(self, weights: Weights, pending: PendingPass, *, learns: bool) -> Tensor:
        route, pending.number = await self._ready(weights, learns=learns)
        if learns:
            await self._make_place(route)
        outputs_BTH = await route.forward(0, pending.number, pending.inputs, learns=learns)
        if learns:
            self._pending[pending.number] = weakref.ref(pending)
            self._count()
        self._succeed()
        return outputs_BTH

    async def _gradients(self, route: AdapterRoute) -> dict[str, Tensor]:
        """Return the gradients that the hops have added to their sums since the last call."""
        sums = _weights(await route.fetch(0, gradients=True))
        before, self._sums = self._sums, sums
        return {name: one - before[name] if name in before else one for name, one in sums.items()}

    def _lacks(self, pending: PendingPass) -> bool:
        """Return whether a pass is not in flight on the present route."""
        known = self._pending.get(pending.number)
        return known is None or known() is not pending

    async def _make_place(self, route: AdapterRoute) -> None:
        """Have the hops forget passes that nothing refers to. Raises UsageError if all others wait for their gradients."""
        if len(self._pending) >= self.window:
            await asyncio.to_thread(gc.collect)  # graphs may refer to themselves
        for number, known in list(self._pending.items()):
            if known() is None:
                del self._pending[number]
                await route.drop(0, number)
        if len(self._pending) >= self.window:
            raise UsageError(
                f"{self.window} passes wait for their gradients: call backward(), compute with torch.no_grad(), or ask for a "
                f"larger window (at most {MAX_WINDOW - 1})"
            )

    async def _ready(self, weights: Weights, *, learns: bool) -> tuple[AdapterRoute, int]:
        """Return an open route with these weights, and the number of the next microbatch on it.

        Those that do not learn have one number, as only one is on its way at a time. Passes in flight are dropped if the weights
        have changed, since autograd refuses their way back.
        """
        if self._route is not None and self._route.leaving and not self._pending:
            await self._leave()
        route = await self._opened()
        if self._number >= MOST_SUMMED or not self._has(weights):
            for number in list(self._pending):
                del self._pending[number]
                await route.drop(0, number)
            # The state of step 0 with these weights. Raises NotFinite if one is NaN or infinite.
            if not is_finite(list(weights.values())):
                raise self._not_finite("adapter's weights")
            layers = {}
            for unit, shapes in self._units.items():
                tensors = {STEP: torch.tensor(0)}
                for name, shape in shapes.items():
                    tensors[f"{VECTORS[0]}/{name}"] = weights[name].contiguous()
                    tensors |= {f"{kind}/{name}": torch.zeros(shape) for kind in VECTORS[1:]}
                layers[unit] = safetensors.torch.save(tensors)
            state = AdapterState(0, layers)
            await route.load(state)
            self._weights, self._loaded = {name: tensor.clone() for name, tensor in weights.items()}, True
            self._sums, self._skipped, self._number = {}, False, 0
        if not learns:
            return route, MOST_SUMMED
        self._number += 1
        return route, self._number - 1

    def _has(self, weights: Weights) -> bool:
        """Return whether the hops have these weights. Values are compared: optimisers may write past autograd's versions."""
        return self._loaded and all(torch.equal(self._weights[name], tensor) for name, tensor in weights.items())

    def _not_finite(self, what: str) -> NotFinite:
        text = f"the {what} are NaN or infinite; lower the learning rate, or check the data"
        return NotFinite(text, unit=min(self._units))

    def _count(self) -> None:
        """Count the inputs of the passes in flight in the ledger."""
        waiting = [pending for known in self._pending.values() if (pending := known()) is not None]
        self._memory.count(sum(value.nbytes for pending in waiting for value in pending.inputs))

    # -- routes

    async def _opened(self) -> AdapterRoute:
        if self._route is None:
            self._route, self._loaded = await self._opener.open(None), False
        return self._route

    async def _fail(self, error: PeerError | NetworkDown) -> None:
        """Leave the route. Raises the error after `MOST_FAILURES` in a row, and what the opener makes of it."""
        await self._leave()
        self._failures += 1
        if self._failures >= MOST_FAILURES:
            self._failures = 0
            raise error
        self._opener.failed(error)

    def _succeed(self) -> None:
        self._failures = 0
        self._opener.succeeded()

    async def _leave(self) -> None:
        self._pending.clear()
        self._count()
        route, self._route = self._route, None
        if route is not None:
            await route.close()


def _weights(state: AdapterState) -> dict[str, Tensor]:
    """Return the weights in a state, or the gradients under their names, in float32."""
    return {
        name.removeprefix(WEIGHT): tensor.to(torch.float32)
        for raw in state.layers.values()
        for name, tensor in safetensors.torch.load(raw).items()
        if name.startswith(WEIGHT)
    }
