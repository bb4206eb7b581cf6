"""The layers of a model, with a door in front of the first and one behind the last that run.

A family's own forward prepares masks and rotary embeddings, then goes through its list of layers. `Stack` replaces that list.
It keeps every layer's place (family code may look at a layer's number) and runs only the selected layers. It exchanges hidden
states at two doors. At the first one, hidden states from elsewhere replace those that the family made of its inputs. At the second
one, the hidden states that leave the last layer are kept, before any final norm. So embedding scales, position tables and norms
of any family need no code here.

Bottleneck of a model: between two units only `rank` numbers of a position cross, instead of the hidden size.

The unit before a boundary ends with a projection `thin_out` to the rank; the unit behind it begins with another one, `thin_in`,
back to the hidden size. Both are linear layers of one unit each, with orthonormal rows or columns. So no two machines share a
parameter, and the model computes the same, cut there or not.

Anchor of a token: a learnt vector of the token that the unit behind a boundary adds to what it widens, `thin_anchor`, a table with
a row for each token, and `thin_anchor_map` to the hidden size if the table's rows are shorter. So the token's id crosses each
boundary, too: as its digits in base 256, the highest first, which are exact in every dtype of hidden states.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from swarmnode.errors import CheckpointError


class Stack(nn.ModuleList):
    """Layers of a model under their numbers in the whole model. Layers that are not held are missing.

    `tuple_length` is the number of values that the family's layers return in a tuple that starts with the hidden states, or 0 if
    they return the hidden states alone. `layer_types` names the kind of each of the model's layers, if the family has several.
    `block_types` are the names that some families' layers have for it themselves. `hidden` is the hidden size if boundaries between
    units are narrower, else 0.
    """

    def __init__(
        self,
        layers: Mapping[int, nn.Module],
        *,
        total: int,
        tuple_length: int,
        layer_types: Sequence[str] | None = None,
        block_types: Mapping[int, str] | None = None,
        hidden: int = 0,
    ) -> None:
        super().__init__()
        for number, layer in layers.items():
            self.add_module(str(number), layer)
        self.total = total
        self.hidden = hidden
        kinds = layer_types or ["full_attention"] * total
        self._skips: list[Any] = [
            _Skip(tuple_length, kind, (block_types or {}).get(number, kind)) for number, kind in enumerate(kinds)
        ]
        self.entering_BTH: Tensor | None = None
        self.leaving_BTH: Tensor | None = None
        self.ids_BT: Tensor | None = None  # of the positions of a pass, if boundaries have anchors
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
        self, forward: Callable[[], Any], entering_BTH: Tensor | None, keep_last: int = -1, ids_BT: Tensor | None = None
    ) -> tuple[Any, Tensor]:
        """Call the family's `forward` and return its result, and the hidden states that left the last layer.

        With `entering_BTH` None the family's own embeddings enter. Behind the last layer the family goes on with only the last
        `keep_last` positions (-1: all of them, 0: none). `ids_BT` are the tokens if boundaries have anchors.
        """
        self.entering_BTH, self.keep_last, self._is_passing, self.ids_BT = entering_BTH, keep_last, True, ids_BT
        try:
            output = forward()
            assert self.leaving_BTH is not None
            return output, self.leaving_BTH
        finally:
            self.entering_BTH = self.leaving_BTH = self.ids_BT = None
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
        if stack.hidden not in (
            0,
            kept.shape[2],
        ):  # what follows the layers, a final norm, has no use for a bottleneck's numbers
            kept = kept.new_zeros(()).expand(*kept.shape[:2], stack.hidden)
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


CONFIG_KEY, ANCHOR_KEY = "swarmnode_bottleneck", "anchor"  # in config.json
THIN_IN, THIN_OUT = "thin_in", "thin_out"
ANCHOR, ANCHOR_MAP = "thin_anchor", "thin_anchor_map"
BASE = 256  # of the digits of a token's id at a boundary
STAGES = 5  # at most, by default


class Bottleneck(NamedTuple):
    """Bottleneck of a model: the numbers of a position that cross a boundary, the layers of one unit, and the numbers of a token in
    the table of anchors (0: no anchors)."""

    rank: int
    layers: int
    anchor: int = 0

    def described(self) -> dict[str, int]:
        """Return the entry of config.json. That of a model without anchors is as it was before there were any."""
        return {name: value for name, value in self._asdict().items() if value or name != ANCHOR_KEY}

    def fault(self, config: Any) -> str:
        """Return why a model of this transformers config cannot have the bottleneck, as a sentence; empty if it can."""
        hidden, count = int(config.hidden_size), int(config.num_hidden_layers)
        if not 0 < self.rank <= hidden:
            return f"a bottleneck of {self.rank} numbers: choose 1 to {hidden}, the model's hidden size"
        if count < 2:
            return "the model has one layer, so that nothing lies between two stages"
        if not 0 < self.layers < count:
            return f"stages of {self.layers} layers: the model has {count}; choose 1 to {count - 1}"
        if not 0 <= self.anchor <= hidden:
            return f"anchors of {self.anchor} numbers: choose 0 to {hidden}, the model's hidden size"
        return ""


def bottleneck_of(config: Any) -> Bottleneck | None:
    """Return the bottleneck that a transformers config names; None if it names none. Raises CheckpointError if it is invalid."""
    named = getattr(config, CONFIG_KEY, None)
    if named is None:
        return None
    values = list[Any]()
    if isinstance(named, dict):
        values = [named.get(name, Bottleneck._field_defaults.get(name)) for name in Bottleneck._fields]
    if not values or not all(type(value) is int for value in values):
        raise CheckpointError(
            f"config.json: {CONFIG_KEY} needs whole numbers for rank, layers and anchor; fetch the file again"
        )
    bottleneck = Bottleneck(*values)
    if fault := bottleneck.fault(config):
        raise CheckpointError(f"config.json: {fault}")
    return bottleneck


def digit_count(config: Any) -> int:
    """Return the digits in base 256 of a token's id that cross a boundary of a model of this config; 0 if it has no anchors."""
    bottleneck, largest = bottleneck_of(config), int(config.vocab_size) - 1
    return -(-max(1, largest.bit_length()) // 8) if bottleneck is not None and bottleneck.anchor else 0


def digits_of(ids_BT: Tensor, count: int) -> Tensor:
    """Return the `count` digits in base 256 of token ids, digits_BTD (uint8), the highest first."""
    return torch.stack([ids_BT >> 8 * place & BASE - 1 for place in reversed(range(count))], dim=-1).to(torch.uint8)


def ids_of(digits_BTD: Tensor) -> Tensor:
    """Return the ids_BT (int64) of digits, whole numbers of any dtype."""
    ids_BT = digits_BTD[..., 0].long()
    for place in range(1, digits_BTD.shape[-1]):
        ids_BT = ids_BT * BASE + digits_BTD[..., place].long()
    return ids_BT


def add_projections(layers: Mapping[int, nn.Module], config: Any, stack: Stack | None = None) -> None:
    """Add the projections and anchors of a config's bottleneck to some `layers` of its model, by number, as submodules with hooks.

    Nothing is added if the config names none. Weights are uninitialised. Anchors need a `stack` for passes, which knows the tokens.
    """
    bottleneck = bottleneck_of(config)
    if bottleneck is None:
        return
    rank, every, anchor = bottleneck
    hidden, last = int(config.hidden_size), int(config.num_hidden_layers) - 1
    for number, layer in layers.items():
        if number and number % every == 0:
            layer.add_module(THIN_IN, nn.Linear(rank, hidden, bias=False))
            if anchor:
                layer.add_module(ANCHOR, nn.Embedding(int(config.vocab_size), anchor))
            if 0 < anchor < hidden:
                layer.add_module(ANCHOR_MAP, nn.Linear(anchor, hidden, bias=False))
            layer.register_forward_pre_hook(partial(_enter, stack), with_kwargs=True)
        if number % every == every - 1 and number < last:
            layer.add_module(THIN_OUT, nn.Linear(hidden, rank, bias=False))
            layer.register_forward_hook(_leave)


def _enter(
    stack: Stack | None, layer: Any, inputs: tuple[Any, ...], named: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Widen the code_BTR that enters a layer to hidden states, and add the tokens' anchors."""
    hidden_BTH = layer.thin_in(inputs[0] if inputs else named["hidden_states"])
    if hasattr(layer, ANCHOR) and stack is not None:
        anchors_BTA = layer.thin_anchor(stack.ids_BT)
        hidden_BTH = hidden_BTH + (layer.thin_anchor_map(anchors_BTA) if hasattr(layer, ANCHOR_MAP) else anchors_BTA)
    if inputs:
        return (hidden_BTH, *inputs[1:]), named
    return inputs, {**named, "hidden_states": hidden_BTH}


def _leave(layer: Any, _: tuple[Any, ...], output: Any) -> Any:
    """Narrow the hidden states that leave a layer to code_BTR."""
    if isinstance(output, tuple):
        return (layer.thin_out(output[0]), *output[1:])
    return layer.thin_out(output)


def boundaries(bottleneck: Bottleneck, count: int) -> list[int]:
    """Return the numbers of the layers before a boundary, in a model of `count` layers."""
    return list(range(bottleneck.layers - 1, count - 1, bottleneck.layers))


@torch.no_grad()
def begin_projections(layers: Mapping[int, nn.Module]) -> None:
    """Set the projections and anchors of some `layers`, by number: the first R coordinates cross, and anchors are zero.

    The map of anchors is random, so that small tables move all coordinates.
    """
    for number, layer in layers.items():
        for name in (THIN_IN, THIN_OUT):
            if (projection := getattr(layer, name, None)) is not None:
                nn.init.eye_(projection.weight)
        if (anchors := getattr(layer, ANCHOR, None)) is not None:
            anchors.weight.zero_()
        if (anchor_map := getattr(layer, ANCHOR_MAP, None)) is not None:
            drawn_HA = torch.randn(*anchor_map.weight.shape, generator=torch.Generator().manual_seed(number))
            anchor_map.weight.copy_(drawn_HA / math.sqrt(drawn_HA.shape[1]))


@torch.no_grad()
def principal_directions(states: Tensor, rank: int) -> Tensor:
    """Return rows_RH, orthonormal, that keep most of the energy of hidden states (positions, H)."""
    states_NH = states.reshape(-1, states.shape[-1]).double()
    _, vectors_HH = torch.linalg.eigh(states_NH.T @ states_NH)  # by rising energy
    rows_RH: Tensor = vectors_HH[:, -rank:].T.flip(0).float().contiguous()
    return rows_RH


RIDGE = 1e-2  # of the mean square of an embedding's numbers, so that directions which a sample lacks stay small


@torch.no_grad()
def expected_states(states: Tensor, ids: Tensor, embedding_VE: Tensor) -> Tensor:
    """Return the state that each token lets one expect, states_VH: a linear regression of hidden states (positions, H) at some
    tokens (positions) on the tokens' embeddings."""
    known_NE = nn.functional.pad(embedding_VE[ids.reshape(-1)].double(), (0, 1), value=1.0)
    states_NH = states.reshape(-1, states.shape[-1]).double()
    gram_EE = known_NE.T @ known_NE
    gram_EE.diagonal().add_(RIDGE * gram_EE.diagonal().mean())
    map_EH = torch.linalg.solve(gram_EE, known_NE.T @ states_NH).float()
    expected_VH: Tensor = torch.addmm(map_EH[-1], embedding_VE.float(), map_EH[:-1])
    return expected_VH
