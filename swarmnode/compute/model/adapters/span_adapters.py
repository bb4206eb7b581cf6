"""The adapters that are loaded beside a span, and the choice among them for the rows of a pass.

The model's own layers are not changed. Each layer that some adapter changes has a hook that adds the chosen adapters' products.
So an adapter costs its own two small products, and a pass without an adapter only a look-up at each of these layers.

Passes whose rows go through different adapters: one grouped product for all of them, or each adapter's rows apart.

A grouped product multiplies row r of the pass with matrices of its own: a batch of as many small products as there are rows, as
Punica (arXiv 2310.18547) and S-LoRA (arXiv 2311.03285) group them. Their kernels gather the matrices from where they are. Here the
matrices lie side by side in the rows' order, copied once for many passes. No number of one row enters another row's product.

What an adapter does to one layer: it adds a low-rank product (LoRA, DoRA), or puts other parameters in the layer's place.
"""

from __future__ import annotations

import copy
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from swarmnode.compute.model.linear import PackedLinear
from swarmnode.compute.packing.packed_weight import Block, PackedWeight, probed, tiles
from swarmnode.compute.packing.quantize import Int8Linear
from swarmnode.errors import ErrorCode, ProtocolError
from swarmnode.ledger import Account, Full, MemoryLedger, Reservation

REPLACEABLE = frozenset({"weight", "bias"})


@dataclass(frozen=True)
class Lora:
    """Low-rank matrices `a_RI` and `b_OR` for one layer. The adapter's scale is already in `b_OR`.

    DoRA (arXiv 2402.09353) also multiplies the layer's own product, without its `bias_O`, by 1 + `gain_O`. This factor is in
    `b_OR`, too.
    """

    a_RI: Tensor
    b_OR: Tensor
    gain_O: Tensor | None = None
    bias_O: Tensor | None = None

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        """Return `y` (..., O), the layer's own result for `x` (..., I), with the adapter's product added, in the dtype of `y`."""
        low = functional.linear(x.to(self.a_RI.dtype), self.a_RI)
        return scaled(y, self.gain_O, self.bias_O) + functional.linear(low, self.b_OR).to(y.dtype)

    def to(self, device: torch.device) -> Lora:
        """Return the change with its matrices on `device`. The layer's bias stays where it is."""
        gain_O = None if self.gain_O is None else self.gain_O.to(device)
        return Lora(self.a_RI.to(device), self.b_OR.to(device), gain_O, self.bias_O)


@dataclass(frozen=True)
class Whole:
    """Layer with the adapter's own parameters (peft's `modules_to_save`), in the place of the model's."""

    layer: nn.Module

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        """Return what the adapter's layer makes of `x`, in the dtype and shape of `y`, the result of the model's own."""
        own: Tensor = self.layer.forward(x)
        return own.to(y.dtype)

    def to(self, device: torch.device) -> Whole:
        """Return the change with its parameters on `device`."""
        layer: Any = copy.copy(self.layer)
        layer._parameters = {
            name: None if one is None else nn.Parameter(one.to(device), requires_grad=False)
            for name, one in self.layer._parameters.items()
        }
        return Whole(layer)


Change = Lora | Whole


def moved_to(changes: Mapping[str, Change], device: torch.device) -> dict[str, Change]:
    """Return an adapter's changes with all matrices on `device`."""
    return {module: change.to(device) for module, change in changes.items()}


def scaled(y: Tensor, gain: Tensor | None, bias: Tensor | None) -> Tensor:
    """Return `y` (..., O) with all but its bias multiplied by 1 + `gain`; None stands for zeros."""
    if gain is None:
        return y
    return y + gain.to(y.dtype) * (y if bias is None else y - bias.to(y.dtype))


def features_of(module: nn.Module) -> tuple[int, int] | None:
    """Return a linear layer's numbers of inputs and outputs; None for other modules.

    Packed and quantised layers have the same attributes as torch's own. transformers' Conv1D (GPT-2's) keeps its matrix
    transposed, which changes nothing for the two small matrices.
    """
    for inputs, outputs in (("in_features", "out_features"), ("nx", "nf")):
        found = getattr(module, inputs, None), getattr(module, outputs, None)
        if isinstance(found[0], int) and isinstance(found[1], int):
            return found[0], found[1]
    return None


def shapes_of(module: nn.Module) -> dict[str, tuple[int, ...]] | None:
    """Return the shapes of a layer's parameters as a checkpoint has them, however the layer holds them; None if the layer has
    parts, or parameters of other names than REPLACEABLE, so that it cannot be replaced."""
    names = {name for name, parameter in module._parameters.items() if parameter is not None}
    names |= {name for name in REPLACEABLE if getattr(module, name, None) is not None}
    if next(module.children(), None) is not None or not names or not names <= REPLACEABLE:
        return None
    shapes = {name: tuple(getattr(module, name).shape) for name in sorted(names)}
    sizes = features_of(module)
    if sizes is not None:
        shapes["weight"] = sizes if _is_transposed(module) else sizes[::-1]
    return shapes


def whole(module: nn.Module, parameters: Mapping[str, Tensor]) -> Whole:
    """Return a layer like `module` with other parameters, which have the shapes of `shapes_of`."""
    held = {name: nn.Parameter(tensor, requires_grad=False) for name, tensor in parameters.items()}
    sizes = features_of(module)
    if sizes is not None:
        linear = nn.Linear(*sizes, bias="bias" in held, device="meta")
        weight = held["weight"]
        linear.weight = nn.Parameter(weight.t(), requires_grad=False) if _is_transposed(module) else weight
        linear.bias = held.get("bias")  # type: ignore[assignment]
        return Whole(linear)
    layer: Any = copy.copy(module)
    for name in held:
        layer.__dict__.pop(name, None)  # a packed weight stands in the place of the parameter
    layer._parameters = held
    layer._forward_hooks = type(module._forward_hooks)()
    return Whole(layer)


def dora(module: nn.Module, a_RI: Tensor, b_OR: Tensor, magnitude_O: Tensor) -> tuple[Tensor, Tensor]:
    """Return (gain_O, b_OR) of DoRA for a layer, in float32: its magnitudes by the norms of W + B A, minus one; and B times these.

    `b_OR` holds the scale already. Reads the layer's whole matrix. A layer that is not torch's own is asked for its products with
    unit vectors, which costs as much as a prompt of I positions.
    """
    a_RI, b_OR = a_RI.float(), b_OR.float()
    squares_O = torch.zeros(len(b_OR))
    for outputs, inputs, block in blocks_of(module):
        changed = block.float().cpu() + b_OR[outputs] @ a_RI[:, inputs]
        squares_O[outputs] += changed.square().sum(dim=1)
    factor_O = magnitude_O.float() / squares_O.sqrt()
    return factor_O - 1, b_OR * factor_O[:, None]


def row_blocks(module: nn.Module, elements: int) -> Iterator[Block]:
    """Yield a linear layer's matrix (O, I) in parts of whole rows of a block, with at most `elements` elements or one row each."""
    sizes = features_of(module)
    assert sizes is not None
    for outputs, inputs, block in blocks_of(module):
        first, _, _ = outputs.indices(sizes[1])
        for part in block.split(max(1, elements // block.shape[1])):
            yield slice(first, first + len(part)), inputs, part
            first += len(part)


def blocks_of(module: nn.Module) -> Iterator[Block]:
    """Yield a linear layer's matrix (O, I) in parts. A layer that only multiplies is asked for its products with unit vectors."""
    sizes = features_of(module)
    assert sizes is not None
    (inputs, outputs), weight = sizes, cast(Any, module.weight)
    if isinstance(weight, PackedWeight):
        yield from weight.blocks()
    elif isinstance(module, PackedLinear | Int8Linear):
        yield from module.blocks()
    elif weight.is_floating_point() and weight.shape in ((outputs, inputs), sizes):
        yield from tiles(weight.t() if _is_transposed(module) else weight)
    else:
        bias: Tensor | None = getattr(module, "bias", None)
        without = module.forward if bias is None else lambda x: module.forward(x) - bias
        yield from probed(without, inputs, 1.0, torch.empty(0, device=weight.device))


def _is_transposed(module: nn.Module) -> bool:
    return hasattr(module, "nx")


FEW_PARTS = 2
"""Parts of a pass (neighbouring rows with one adapter) up to which going part by part costs no more than a grouped product"""

Reserve = Callable[[int], Reservation]
"""Function that reserves bytes for copies of matrices; raises Full if they do not fit"""


class Added(Protocol):
    """Change of a layer's result for all rows of a pass."""

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        """Return `y` (rows first), the layer's own result for `x`, as the rows' adapters change it, in the dtype of `y`."""
        ...


class AdapterRows(NamedTuple):
    """Neighbouring rows [start, end) with one adapter's change of a layer; None if it does not change this layer."""

    start: int
    end: int
    change: Added | None


@dataclass(frozen=True)
class Apart:
    """Change of each part of the pass in turn. `rows` is the number of rows of the pass."""

    parts: Sequence[AdapterRows]
    rows: int

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        """Return `y` (rows first), the layer's own result for `x`, as the rows' adapters change it, in the dtype of `y`."""
        x_by_row = x.reshape(self.rows, -1, x.shape[-1]) if x.is_floating_point() else x  # an embedding's are ids
        y_by_row = y.reshape(self.rows, -1, y.shape[-1])
        pieces = [
            _changed(part.change, x_by_row[part.start : part.end], y_by_row[part.start : part.end])
            for part in self.parts
        ]
        return torch.cat(pieces).view(y.shape)


def _changed(change: Added | None, x: Tensor, y: Tensor) -> Tensor:
    return y if change is None else change.add(x, y)


@dataclass(frozen=True)
class Grouped:
    """Low-rank matrices of all rows, each row's in its own place: transposed views `a_BIR` and copies `b_BRO`.

    `gain_B1O` and `bias_O` are DoRA's, None if no row has it. Rows without an adapter, and ranks below the largest, have zeros.
    """

    a_BIR: Tensor
    b_BRO: Tensor
    gain_B1O: Tensor | None
    bias_O: Tensor | None

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        """Return `y` (rows first), the layer's own result for `x`, as the rows' adapters change it, in the dtype of `y`."""
        rows = len(self.a_BIR)
        x_BTI = x.reshape(rows, -1, x.shape[-1]).to(self.a_BIR.dtype)
        y_BTO = scaled(y.reshape(rows, -1, y.shape[-1]), self.gain_B1O, self.bias_O)
        low_BTR = torch.bmm(x_BTI, self.a_BIR)
        if y.dtype is self.b_BRO.dtype:
            return torch.baddbmm(y_BTO, low_BTR, self.b_BRO).view(y.shape)
        return (y_BTO + torch.bmm(low_BTR, self.b_BRO).to(y.dtype)).view(y.shape)


@dataclass(eq=False)
class SharedPass:
    """Changes of all layers for a pass whose rows go through the adapters `names`, and the memory that their copies take."""

    names: tuple[str, ...]
    layers: Mapping[str, Added]
    memory: Reservation | None

    def __repr__(self) -> str:
        form = "apart" if self.memory is None else "grouped"
        return f"<SharedPass of {len(self.names)} rows, {len(set(self.names))} adapters, {form}>"


def share_pass(names: tuple[str, ...], loaded: Mapping[str, Mapping[str, Added]], reserve: Reserve) -> SharedPass:
    """Return the changes for a pass whose row r goes through the adapter names[r], "" for none.

    Matrices are copied side by side if that is faster and `reserve` has room for them.
    """
    parts = _parts(names)
    layers = {layer: [loaded.get(name, {}).get(layer) for name in names] for layer in _layers(names, loaded)}
    groupable = {layer for layer, changes in layers.items() if all(isinstance(one, Lora | None) for one in changes)}
    size_bytes = sum(_grouped_bytes(_loras(layers[layer]), len(names)) for layer in groupable)
    memory = _room(size_bytes, reserve) if len(parts) > FEW_PARTS else None
    added: dict[str, Added] = {}
    for layer, changes in layers.items():
        if memory is not None and layer in groupable:
            added[layer] = _grouped(changes)
        else:
            added[layer] = Apart([AdapterRows(start, end, changes[start]) for start, end in parts], len(names))
    shared = SharedPass(names, added, memory)
    if memory is not None:
        weakref.finalize(shared, memory.release)
    return shared


def _room(size_bytes: int, reserve: Reserve) -> Reservation | None:
    """Reserve room for copies; None if there is none."""
    try:
        return reserve(size_bytes)
    except Full:
        return None


def _parts(names: Sequence[str]) -> list[tuple[int, int]]:
    """Return the ranges of neighbouring rows with the same adapter."""
    ranges, start = [], 0
    for _, rows in groupby(names):
        end = start + len(list(rows))
        ranges.append((start, end))
        start = end
    return ranges


def _layers(names: Sequence[str], loaded: Mapping[str, Mapping[str, Added]]) -> list[str]:
    """Return the layers that some of the adapters change."""
    return sorted({layer for name in names if name for layer in loaded[name]})


def _loras(changes: Sequence[Added | None]) -> list[Lora]:
    return [change for change in changes if isinstance(change, Lora)]


def _grouped_bytes(loras: Sequence[Lora], rows: int) -> int:
    """Return the bytes of `_grouped`'s copies for a layer and a number of rows."""
    rank = max(len(lora.a_RI) for lora in loras)
    (inputs, outputs), gains = (
        (loras[0].a_RI.shape[1], len(loras[0].b_OR)),
        any(lora.gain_O is not None for lora in loras),
    )
    return rows * loras[0].a_RI.dtype.itemsize * (rank * (inputs + outputs) + (outputs if gains else 0))


def _grouped(changes: Sequence[Added | None]) -> Grouped:
    """Return a layer's matrices side by side. Some row has an adapter, and all are low-rank."""
    loras = _loras(changes)
    like, rank = loras[0], max(len(lora.a_RI) for lora in loras)
    a_BRI = like.a_RI.new_zeros(len(changes), rank, like.a_RI.shape[1])
    b_BRO = like.b_OR.new_zeros(len(changes), rank, len(like.b_OR))
    gains = [lora for lora in loras if lora.gain_O is not None]
    gain_B1O = like.b_OR.new_zeros(len(changes), 1, len(like.b_OR)) if gains else None
    for row, lora in enumerate(changes):
        if isinstance(lora, Lora):
            a_BRI[row, : len(lora.a_RI)] = lora.a_RI
            b_BRO[row, : len(lora.a_RI)] = lora.b_OR.t()
            if gain_B1O is not None and lora.gain_O is not None:
                gain_B1O[row, 0] = lora.gain_O
    return Grouped(a_BRI.transpose(1, 2), b_BRO, gain_B1O, gains[0].bias_O if gains else None)


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
