"""The layers of a model, with a door in front of the first and one behind the last that run.

A family's own forward prepares masks and rotary embeddings, then goes through its list of layers. `Stack` replaces that list.
It keeps every layer's place (family code may look at a layer's number) and runs only the selected layers. It exchanges hidden
states at two doors. At the first one, hidden states from elsewhere replace those that the family made of its inputs. At the second
one, the hidden states that leave the last layer are kept, before any final norm. So embedding scales, position tables and norms
of any family need no code here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn


class Stack(nn.ModuleList):
    """Layers of a model under their numbers in the whole model. Layers that are not held are missing.

    `tuple_length` is the number of values that the family's layers return in a tuple that starts with the hidden states, or 0 if
    they return the hidden states alone. `layer_types` names the kind of each of the model's layers, if the family has several.
    `block_types` are the names that some families' layers have for it themselves.
    """

    def __init__(
        self,
        layers: Mapping[int, nn.Module],
        *,
        total: int,
        tuple_length: int,
        layer_types: Sequence[str] | None = None,
        block_types: Mapping[int, str] | None = None,
    ) -> None:
        super().__init__()
        for number, layer in layers.items():
            self.add_module(str(number), layer)
        self.total = total
        kinds = layer_types or ["full_attention"] * total
        self._skips: list[Any] = [
            _Skip(tuple_length, kind, (block_types or {}).get(number, kind)) for number, kind in enumerate(kinds)
        ]
        self.entering_BTH: Tensor | None = None
        self.leaving_BTH: Tensor | None = None
        self.keep_last = -1
        self._is_passing = False
        self.when_left: Callable[[], None] | None = None  # called once hidden states have left the last layer
        self._routes: dict[tuple[int, int], list[Any]] = {}
        self._route: list[Any] = []
        self.select(0, 0)

    def select(self, first: int, end: int) -> None:
        """Run only layers [first, end) from now on; with an empty range hidden states go from door to door."""
        if (first, end) not in self._routes:
            if (
                first == end
            ):  # the door takes a layer's place: families walk over as many places as the model has layers
                place = min(first, self.total - 1)
                route = [*self._skips[:place], _BoundaryLayer(self, self._skips[place], enters=True, leaves=True)]
            else:
                route = self._skips[:first] + [self._modules[str(number)] for number in range(first, end)]
                route[first] = _BoundaryLayer(self, route[first], enters=True, leaves=first == end - 1)
                if first < end - 1:
                    route[-1] = _BoundaryLayer(self, route[-1], enters=False, leaves=True)
            self._routes[first, end] = route
        self._route = self._routes[first, end]

    def pass_through(
        self, forward: Callable[[], Any], entering_BTH: Tensor | None, keep_last: int = -1
    ) -> tuple[Any, Tensor]:
        """Call the family's `forward` and return its result, and the hidden states that left the last layer.

        With `entering_BTH` None the family's own embeddings enter. Behind the last layer the family goes on with only the last
        `keep_last` positions (-1: all of them, 0: none).
        """
        self.entering_BTH, self.keep_last, self._is_passing = entering_BTH, keep_last, True
        try:
            output = forward()
            assert self.leaving_BTH is not None
            return output, self.leaving_BTH
        finally:
            self.entering_BTH = self.leaving_BTH = None
            self._is_passing = False

    def __iter__(self) -> Iterator[Any]:
        # Outside passes, as when weights are initialised, families' code means the layers that are held.
        return iter(self._route if self._is_passing else self._modules.values())

    def __len__(self) -> int:
        return self.total

    def __getitem__(self, index: Any) -> Any:
        return self._route[index]

    def __repr__(self) -> str:
        return f"Stack({len(self._modules)} of {self.total} layers)"


def unchanged(hidden_states: Tensor, tuple_length: int) -> Any:
    """Return hidden states as a layer does that returns a tuple of so many values, or the hidden states alone at 0."""
    return (hidden_states, *[None] * (tuple_length - 1)) if tuple_length else hidden_states


class _Skip:
    """Stand-in for a layer that is not run. Some families choose a layer's mask by its `attention_type` or `block_type`."""

    def __init__(self, tuple_length: int, attention_type: str, block_type: str) -> None:
        self.tuple_length = tuple_length
        self.attention_type = attention_type
        self.block_type = block_type

    def __call__(self, hidden_states: Tensor, *_: Any, **__: Any) -> Any:
        return unchanged(hidden_states, self.tuple_length)


class _BoundaryLayer:
    """Wrapper of a layer at which hidden states enter the stack, leave it, or both."""

    def __init__(self, stack: Stack, layer: Any, *, enters: bool, leaves: bool) -> None:
        self.stack = stack
        self.layer = layer
        self.enters = enters
        self.leaves = leaves

    def __call__(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        stack = self.stack
        if self.enters and stack.entering_BTH is not None:
            hidden_states = stack.entering_BTH
        output = self.layer(hidden_states, *args, **kwargs)
        if not self.leaves:
            return output
        leaving_BTH: Tensor = output[0] if isinstance(output, tuple) else output
        stack.leaving_BTH = leaving_BTH
        if stack.when_left is not None:
            stack.when_left()
        kept = leaving_BTH
        if stack.keep_last >= 0:
            kept = leaving_BTH[:, leaving_BTH.shape[1] - stack.keep_last :]
        return (kept, *output[1:]) if isinstance(output, tuple) else kept

    def __getattr__(self, name: str) -> Any:
        return getattr(self.layer, name)


class Absent(nn.Module):
    """Stand-in for a module that is not held: an embedding gives zero, other modules return their input."""

    weight = torch.empty(0)  # some families' code initialises it

    def __init__(self, missing: nn.Module) -> None:
        super().__init__()
        self.is_embedding = isinstance(missing, nn.Embedding)

    def forward(self, x: Any, *_: Any, **__: Any) -> Any:
        """Return zero (a scalar, which broadcasts) for an embedding, else `x`."""
        return torch.zeros((), device=getattr(x, "device", None)) if self.is_embedding else x
