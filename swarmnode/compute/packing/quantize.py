"""Weights in 8 or 4 bits, made from full ones while a span is loaded. Saves memory, not time.

int8: rows of each matrix with a scale. nf4: blocks of 64 in the 16 levels of a normal distribution, the scales themselves
in 8 bits (QLoRA, arXiv 2305.14314, section 3), by bitsandbytes, which is imported only here. Relative error of a product with
normal weights: 0.008 and 0.09. Only plain linear layers inside blocks are quantised.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from swarmnode.compute.packing.packed_weight import Block, frozen_product, tiles
from swarmnode.counting import format_bytes
from swarmnode.errors import LocalError

METHODS = ("none", "int8", "nf4")
MIN_FEATURES = 32  # narrower matrices (routers of experts) are not quantised
LEVELS = 127


class Int8Linear(nn.Module):
    """Linear layer with int8 weights: its matrix is made on the device for each product.

    The matrix is `weight` (O, I, int8) times `scale_O1` (float32).
    """

    def __init__(self, linear: nn.Linear, device: torch.device) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        full_OI = linear.weight.detach().to(device, torch.float32)
        scale_O1 = (full_OI.abs().amax(dim=1, keepdim=True) / LEVELS).clamp_(min=torch.finfo(torch.float32).tiny)
        self.register_buffer("weight", (full_OI / scale_O1).round_().to(torch.int8))
        self.register_buffer("scale_O1", scale_O1)
        self.bias = None if linear.bias is None else nn.Parameter(linear.bias.detach().to(device), requires_grad=False)

    def extra_repr(self) -> str:
        """Return a text like nn.Linear's."""
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"

    def forward(self, x: Tensor) -> Tensor:
        """Return (..., O) for x (..., I), in the dtype of x. Gradients pass to x only."""
        return frozen_product(x, self._multiply, self.blocks)

    def _multiply(self, x: Tensor) -> Tensor:
        return functional.linear(x, self._matrix(x.dtype), self.bias)

    def _matrix(self, dtype: torch.dtype) -> Tensor:
        return self.get_buffer("weight") * self.get_buffer("scale_O1").to(dtype)

    def blocks(self) -> Iterator[Block]:
        """Yield the matrix in float32."""
        return tiles(self._matrix(torch.float32))


@dataclass(frozen=True)
class Quantization:
    """Result of `quantize_layers`. Sizes in bytes are of the quantised matrices, before and after, with their scales."""

    method: str
    matrices: int
    bytes_before: int
    bytes_after: int
    unquantised_bytes: int  # weights of the layers that are not quantised: fused experts, norms, convolutions

    def __str__(self) -> str:
        kept = f"; {format_bytes(self.unquantised_bytes)} of layers stay as they are" if self.unquantised_bytes else ""
        sizes = f"{format_bytes(self.bytes_before)} -> {format_bytes(self.bytes_after)}"
        return f"{self.method}: {self.matrices} matrices {sizes}{kept}"


def quantize_layers(layers: nn.Module, method: str, device: torch.device) -> Quantization:
    """Replace the linear layers in `layers` by quantised ones on `device`, one at a time. The rest of `layers` is not moved.

    Raises LocalError if the method is unknown or unavailable on `device`, or there are no matrices to quantise.
    """
    if method not in METHODS[1:]:
        raise LocalError(f"no quantisation {method!r}: use one of {', '.join(METHODS)}")
    if method == "nf4" and device.type not in ("cuda", "cpu"):
        raise LocalError(f"{method} is not available on {device.type}: use int8, or --device cpu")
    before = after = matrices = 0
    for name, module in list(layers.named_modules()):
        if type(module) is not nn.Linear or min(module.weight.shape) < MIN_FEATURES:
            continue
        quantized = Int8Linear(module, device) if method == "int8" else _nf4_linear(module, device)
        before += module.weight.nbytes
        after += _weight_bytes(quantized)
        matrices += 1
        layers.set_submodule(name, quantized)
    kept = sum(parameter.nbytes for parameter in layers.parameters() if parameter.is_floating_point())
    if not matrices:
        raise LocalError(
            f"{method}: the layers of this model hold no plain matrices "
            f"to quantise ({format_bytes(kept)}); leave --quantize out"
        )
    return Quantization(method, matrices, before, after, kept)


def _nf4_linear(linear: nn.Linear, device: torch.device) -> nn.Module:
    try:
        import bitsandbytes

        bnb: Any = bitsandbytes  # untyped

        with torch.device("meta"):
            quantized = bnb.nn.Linear4bit(
                linear.in_features, linear.out_features, linear.bias is not None, linear.weight.dtype, quant_type="nf4"
            )
        quantized.weight = bnb.nn.Params4bit(
            linear.weight.data, requires_grad=False, quant_type="nf4", compress_statistics=True
        )
        quantized.bias = linear.bias
        on_device: nn.Module = quantized.to(device)
        return on_device
    except (ImportError, RuntimeError, NotImplementedError, AssertionError) as error:
        raise LocalError(f"nf4 does not work on this machine's {device.type} ({error}): load without it") from error


def _weight_bytes(quantized: Any) -> int:
    """Return the bytes of a quantised matrix and its scales, except scales that are buffers: the caller counts those."""
    weight = quantized.weight
    size = int(weight.nbytes)
    state = getattr(weight, "quant_state", None)
    if state is not None:
        size += int(state.absmax.nbytes)
        if state.nested:
            size += int(state.state2.absmax.nbytes)
    return size
