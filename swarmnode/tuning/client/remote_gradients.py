"""Loss and gradients of an adapter whose weights and optimiser the owner keeps; the hops compute."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import safetensors.torch
import torch
from torch import Tensor

from swarmnode.errors import NetworkDown, PeerError
from swarmnode.tuning.client.output import WEIGHT
from swarmnode.tuning.client.tuned_route import AdapterState, TunedMicrobatch
from swarmnode.tuning.client.tuner import AdapterRoute, RouteOpener

Layers = Mapping[int, Mapping[str, Tensor]]
"""Tensors of each layer, by name"""


class RemoteGradients:
    """Function from an adapter's weights and a microbatch to the loss and its gradients. Another route replaces a failed one."""

    def __init__(self, opener: RouteOpener) -> None:
        self._opener = opener
        self._route: AdapterRoute | None = None
        self._start: Layers = {}  # the state of step 0

    def __repr__(self) -> str:
        return f"<RemoteGradients on {self._route!r}>"

    async def start(self) -> dict[str, Tensor]:
        """Open the adapter, and return its weights before any update. Raises NoRoute, Busy, UsageError."""
        while True:
            try:
                self._start = _tensors(await (await self._opened()).fetch(0))
                return _weights(self._start)
            except (PeerError, NetworkDown) as error:
                await self._fail(error)

    async def compute(
        self, weights: Mapping[str, Tensor], microbatches: Sequence[TunedMicrobatch]
    ) -> tuple[float, dict[str, Tensor]]:
        """Return the sum of the microbatches' losses times their shares, and its gradients; none if they do not learn.

        Raises NotFinite or UsageError if it fails wherever it is computed, NoRoute, Busy.
        """
        state = self._state(weights)
        while True:
            try:
                route = await self._opened()
                await route.load(state)
                found = await route.compute(0, microbatches)
                learns = any(one.learns for one in microbatches)
                gradients = _weights(_tensors(await route.fetch(0, gradients=True))) if learns else {}
                self._opener.succeeded()
            except (PeerError, NetworkDown) as error:
                await self._fail(error)
                continue
            if route.leaving:
                await self.close()
            return sum(found[one.number][0] * one.share for one in microbatches), gradients

    async def close(self) -> None:
        """Free the adapter at the hops."""
        route, self._route = self._route, None
        if route is not None:
            await route.close()

    async def _opened(self) -> AdapterRoute:
        if self._route is None:
            self._route = await self._opener.open(None)
        return self._route

    async def _fail(self, error: PeerError | NetworkDown) -> None:
        await self.close()
        self._opener.failed(error)

    def _state(self, weights: Mapping[str, Tensor]) -> AdapterState:
        """Return the state of step 0 with other weights."""
        layers = {}
        for unit, tensors in self._start.items():
            given = {name: weights.get(name.removeprefix(WEIGHT), held) for name, held in tensors.items() if _is(name)}
            layers[unit] = safetensors.torch.save(
                {**tensors, **{name: one.contiguous() for name, one in given.items()}}
            )
        return AdapterState(0, layers)


def _is(name: str) -> bool:
    return name.startswith(WEIGHT)


def _tensors(state: AdapterState) -> Layers:
    return {unit: safetensors.torch.load(raw) for unit, raw in state.layers.items()}


def _weights(layers: Layers) -> dict[str, Tensor]:
    return {
        name.removeprefix(WEIGHT): tensor.to(torch.float32)
        for tensors in layers.values()
        for name, tensor in tensors.items()
        if _is(name)
    }
