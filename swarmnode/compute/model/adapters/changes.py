"""What an adapter does to one layer: it adds a low-rank product (LoRA, DoRA), or puts other parameters in the layer's place."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from swarmnode.compute.model.linear import PackedLinear
from swarmnode.compute.packing.packed_weight import Block, PackedWeight, probed, tiles
from swarmnode.compute.packing.quantize import Int8Linear

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
