"""The adapters that are loaded beside a span, and the choice among them for the rows of a pass.

The model's own layers are not changed. Each layer that some adapter changes has a hook that adds the chosen adapters' products.
So an adapter costs its own two small products, and a pass without an adapter only a look-up at each of these layers.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from swarmnode.compute.model.adapters.changes import Change, Lora, Whole, moved_to
from swarmnode.compute.model.adapters.shared_pass import Added, SharedPass, share_pass
from swarmnode.errors import ErrorCode, ProtocolError
from swarmnode.ledger import Account, MemoryLedger, Reservation

NOTHING: Mapping[str, Added] = {}
KEPT = 4
"""Most combinations of adapters whose copies are kept for later passes"""


class SpanAdapters:
    """The loaded adapters of a span, by name. Used only from the compute thread: a hook added within a pass would break it."""

    def __init__(self, model: nn.Module) -> None:
        self.ledger = MemoryLedger()
        self.are_shared = True
        """Whether rows of one pass may go through different adapters: not if a layer's inputs do not tell their rows"""
        self._model = model
        self._loaded: dict[str, Mapping[str, Added]] = {}
        self._hooked: set[str] = set()
        self._chosen: Mapping[str, Added] = NOTHING
        self._rows = 0  # of a pass with different adapters; 0: all rows have the same
        self._positions = 0
        self._shared: OrderedDict[tuple[str, ...], SharedPass] = OrderedDict()  # the least recently used first

    def __repr__(self) -> str:
        return f"<SpanAdapters {', '.join(self._loaded) or 'none'}>"

    def __contains__(self, name: str) -> bool:
        return name in self._loaded

    def add(self, name: str, loras: Mapping[str, Added]) -> None:
        """Add an adapter. `loras` holds its changes by the names of the layers that it changes here."""
        self._loaded[name] = loras
        for module in loras.keys() - self._hooked:
            self._model.get_submodule(module).register_forward_hook(partial(self._add, module))
            self._hooked.add(module)
            if "experts" in module.split("."):  # an expert sees positions of any rows
                self.are_shared = False

    def copied(self, name: str) -> Mapping[str, Change]:
        """Return copies of a loaded adapter's matrices in the host's memory."""
        served = {module: one for module, one in self._loaded[name].items() if isinstance(one, Lora | Whole)}
        return moved_to(served, torch.device("cpu"))

    def remove(self, name: str) -> None:
        """Unload the adapter `name`; does nothing if it is not loaded."""
        self._loaded.pop(name, None)
        self._chosen = NOTHING
        for names in [names for names in self._shared if name in names]:
            del self._shared[names]

    def clear(self) -> None:
        """Unload all adapters."""
        self._loaded.clear()
        self._shared.clear()
        self._chosen = NOTHING

    def choose(self, names: tuple[str, ...], positions: int = 0) -> SharedPass | None:
        """Send row r of passes through the adapter names[r] from now on; "" is the model alone, and () is it for all rows.

        `positions` is the number of positions of a row. Returns what the passes need of copied matrices, which live as long as it
        is held; None if all rows have the same adapter. Raises ProtocolError if an adapter is not loaded.
        """
        if any(name and name not in self._loaded for name in names):
            raise ProtocolError("the adapter is not loaded", code=ErrorCode.INTERNAL)
        if len(set(names)) < 2:
            self._rows = 0
            self._chosen = self._loaded[names[0]] if names and names[0] else NOTHING
            return None
        if names not in self._shared:
            self._shared[names] = share_pass(names, self._loaded, self._reserve)
        self._shared.move_to_end(names)
        shared = self._shared[names]
        if len(self._shared) > KEPT:
            self._shared.popitem(last=False)
        self._chosen, self._rows, self._positions = shared.layers, len(names), positions
        return shared

    def _reserve(self, size_bytes: int) -> Reservation:
        return self.ledger.reserve(Account.ADAPTERS, size_bytes)

    def _add(self, module: str, _layer: nn.Module, inputs: tuple[Any, ...], y: Tensor) -> Tensor | None:
        added = self._chosen.get(module)
        if added is None:
            return None
        x: Tensor = inputs[0]
        if self._rows and not self._tells_rows(x, y):
            self.are_shared = False  # later passes are of one adapter
            raise ProtocolError(f"rows of {module} cannot be told apart", code=ErrorCode.INTERNAL)
        return added.add(x, y)

    def _tells_rows(self, x: Tensor, y: Tensor) -> bool:
        """Return whether a layer's inputs have the pass's rows first, or all positions of one row after another."""
        if y.dim() > 2:
            return len(x) == len(y) == self._rows
        return len(x) == len(y) == self._rows * self._positions
