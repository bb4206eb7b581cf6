"""Linear layers whose weights are reordered into a library's fastest format, in as many bytes as before.

A packed layer takes the place of the original one: only one copy is in memory, and the original's pages, mapped from a file, are
released. Timing decides whether a form is of use, and which (`model/linear.py`).
"""

from __future__ import annotations

import ctypes
import math
import mmap
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from swarmnode.compute.model.packing.matrix_blocks import Block, frozen_product, tiles

LARGEST_EXPONENT = 15  # of float16
BLOCK = 16  # outputs: a cache line of float32
FEW_ROWS = 64  # rows that oneDNN's blocks are made for: a chunk of a prompt, or many sessions
PAGEOUT = 21  # MADV_PAGEOUT: releases the pages; the next access reads them again


class PackedLinear(nn.Module):
    """Linear layer whose weights a subclass packs. Its own `weight` is empty, and kept for families that read its dtype."""

    compared_rows: ClassVar[Sequence[int]] = (1, 8, 64)
    """Numbers of rows for the comparison with the usual product: one session, several, a prompt. The average decides."""

    packs_fast: ClassVar[bool] = False
    """Whether many matrices can be packed just to be timed."""

    waits_for_company: ClassVar[bool] = False
    """Whether the form is slower for a single session, so that packing waits until there are several."""

    def __init__(self, weight_OI: Tensor, bias_O: nn.Parameter | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight_OI.shape
        self.weight_bytes = weight_OI.nbytes
        self.weight = nn.Parameter(weight_OI.new_empty(0), requires_grad=False)
        self.bias = bias_O

    @staticmethod
    def works() -> bool:
        """Return whether this build of torch supports the form. Raises NotImplementedError if a subclass does not define it."""
        raise NotImplementedError

    def multiply(self, x: Tensor) -> Tensor:
        """Return the layer's outputs (..., O) for inputs x (..., I), in the dtype of x.

        Raises NotImplementedError if a subclass does not define it.
        """
        raise NotImplementedError

    def blocks(self) -> Iterator[Block]:
        """Yield the packed matrix (O, I) in parts. Raises NotImplementedError if a subclass does not define it."""
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's outputs (..., O) for inputs x (..., I), in the dtype of x. Gradients pass to x only."""
        return frozen_product(x, self.multiply, self.blocks)

    def extra_repr(self) -> str:
        """Return a text like nn.Linear's."""
        return f"in_features={self.in_features}, out_features={self.out_features}, {self.weight_bytes / 1e6:.1f} MB"


class FbgemmLinear(PackedLinear):
    """Packed layer for CPUs without half-precision products: FBGEMM multiplies float16 weights with sums in float32.

    A bfloat16 matrix, scaled by a power of two, keeps all of its bits in float16. Only elements smaller than 2^-32 of the largest
    one lose some, which is below the last bit of a float32 sum.
    """

    def __init__(self, weight_OI: Tensor, bias_O: nn.Parameter | None) -> None:
        super().__init__(weight_OI, bias_O)
        largest = max(abs(float(extreme)) for extreme in weight_OI.aminmax())
        exponent = LARGEST_EXPONENT - math.frexp(largest)[1] if largest > 0 else 0
        self._unscale = 2.0**-exponent
        # The scale is applied to the sums, not to the inputs, so these may be of any size.
        self._packed: Any = torch.ops.quantized.linear_prepack_fp16(weight_OI.float().mul_(2.0**exponent), None)

    @staticmethod
    def works() -> bool:
        """Return whether this build of torch has FBGEMM."""
        return "fbgemm" in torch.backends.quantized.supported_engines

    def multiply(self, x: Tensor) -> Tensor:
        """Return (..., O) for x (..., I), in the dtype of x."""
        y: Tensor = torch.ops.quantized.linear_dynamic_fp16(x.float(), self._packed)
        y = y.mul_(self._unscale)
        if self.bias is not None:
            y += self.bias
        return y.to(x.dtype)

    def blocks(self) -> Iterator[Block]:
        """Yield the matrix, unpacked in float32."""
        weight_OI, _ = torch.ops.quantized.linear_unpack_fp16(self._packed)
        return tiles(weight_OI.float().mul_(self._unscale))


class OneDnnLinear(PackedLinear):
    """Packed layer for CPUs with half-precision products (AMX, AVX-512 with bfloat16), in oneDNN's blocks.

    oneDNN would otherwise reorder the matrix into these blocks for every product.
    """

    def __init__(self, weight_OI: Tensor, bias_O: nn.Parameter | None) -> None:
        super().__init__(weight_OI, bias_O)
        self._packed: Any = torch.ops.mkldnn._reorder_linear_weight(weight_OI.contiguous(), FEW_ROWS)

    @staticmethod
    def works() -> bool:
        """Return whether this build of torch has oneDNN, and this CPU its instructions for half precision."""
        try:
            OneDnnLinear(torch.zeros(16, 16, dtype=torch.bfloat16), None)(torch.zeros(1, 16, dtype=torch.bfloat16))
        except (RuntimeError, AttributeError):
            return False
        return True

    def multiply(self, x: Tensor) -> Tensor:
        """Return the layer's outputs (..., O) for inputs x (..., I), computed by oneDNN from packed weights."""
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x.contiguous(), self._packed, self.bias, "none", [], "")
        return y

    def blocks(self) -> Iterator[Block]:
        """Yield the matrix in the usual order of its numbers."""
        return tiles(self._packed.to_dense())


class BlockedLinear(PackedLinear):
    """Packed layer for float32 and several sessions on CPUs with AVX2, in blocks of BLOCK outputs (`multiply_blocks`).

    A cache line holds the weights of one input for BLOCK outputs. With AVX-512 weights need no packing for this.
    """

    compared_rows = (2, 4, 8)
    packs_fast = True
    waits_for_company = True

    def __init__(self, weight_OI: Tensor, bias_O: nn.Parameter | None) -> None:
        super().__init__(weight_OI, bias_O)
        blocks_NIB, rest_OI = in_blocks(weight_OI)
        self._blocks_NIB, self._rest_OI = blocks_NIB.contiguous(), rest_OI.clone()

    @staticmethod
    def works() -> bool:
        """Return whether torch uses AVX2 on this CPU, and nothing newer."""
        return torch.backends.cpu.get_cpu_capability() == "AVX2"

    def multiply(self, x: Tensor) -> Tensor:
        """Return the layer's outputs (..., O) for inputs x (..., I), computed from weights in blocks."""
        return multiply_blocks(x, self._blocks_NIB, self._rest_OI, self.bias)

    def blocks(self) -> Iterator[Block]:
        """Yield the matrix in the usual order of its numbers."""
        whole_OI = self._blocks_NIB.transpose(1, 2).reshape(-1, self.in_features)
        return tiles(torch.cat((whole_OI, self._rest_OI)))


def in_blocks(weight_OI: Tensor) -> tuple[Tensor, Tensor]:
    """Return (blocks_NIB, rest_OI): views of a matrix as blocks of BLOCK outputs, and of the remaining outputs."""
    outputs, inputs = weight_OI.shape
    whole = outputs - outputs % BLOCK
    return weight_OI[:whole].view(-1, BLOCK, inputs).transpose(1, 2), weight_OI[whole:]


def multiply_blocks(x: Tensor, blocks_NIB: Tensor, rest_OI: Tensor, bias_O: Tensor | None) -> Tensor:
    """Return (..., O) for x (..., I), computed as a batch of N small products.

    MKL multiplies small matrices in place, but reorders one large matrix first, whatever the number of rows.
    """
    blocks, inputs, width = blocks_NIB.shape
    x_RI = x.reshape(-1, inputs)
    y_NRB = torch.bmm(x_RI.expand(blocks, *x_RI.shape), blocks_NIB)
    y_RO = y_NRB.transpose(0, 1).reshape(len(x_RI), blocks * width)
    if len(rest_OI):
        y_RO = torch.cat((y_RO, x_RI @ rest_OI.t()), dim=1)
    if bias_O is not None:
        y_RO += bias_O
    return y_RO.view(*x.shape[:-1], y_RO.shape[1])


FORMS: Mapping[torch.dtype, Sequence[type[PackedLinear]]] = {
    torch.float32: (BlockedLinear,),
    torch.bfloat16: (FbgemmLinear, OneDnnLinear),
    torch.float16: (FbgemmLinear, OneDnnLinear),
}


class Packing:
    """Linear layers of a model that are still to be packed, with their forms, by name. Packing takes one core up to 10 ns a weight.

    The model can serve meanwhile: both forms of a layer multiply the same numbers.
    """

    def __init__(self, model: nn.Module, linears: Mapping[str, tuple[nn.Linear, type[PackedLinear]]]) -> None:
        self._model = model
        self._left = dict(linears)

    def __repr__(self) -> str:
        return f"<Packing of {len(self._left)} layers>"

    def __len__(self) -> int:
        return len(self._left)

    def run(self, stopped: Callable[[], bool] = lambda: False) -> None:
        """Pack all layers, with as many threads as torch computes with. After `stopped` returns True, no further layer is begun."""

        @torch.inference_mode()
        def pack(entry: tuple[str, tuple[nn.Linear, type[PackedLinear]]]) -> None:
            name, (linear, form) = entry
            if not stopped():
                packed = form(linear.weight, linear.bias)
                packed._forward_hooks = (
                    linear._forward_hooks
                )  # one shared table, so that adapters' hooks work on either layer
                self._model.set_submodule(name, packed)
                let_go(linear.weight)
                del self._left[name]

        with ThreadPoolExecutor(torch.get_num_threads(), thread_name_prefix="pack") as threads:
            for _ in threads.map(pack, list(self._left.items())):
                pass


class Packings(NamedTuple):
    """Layers of a model to be packed, by when."""

    at_once: Packing
    in_company: Packing
    """Layers to be packed once several sessions run"""

    @classmethod
    def of(cls, model: nn.Module, linears: Mapping[str, tuple[nn.Linear, type[PackedLinear]]]) -> Packings:
        """Split layers by whether their form waits for several sessions."""
        later = {name for name, (_, form) in linears.items() if form.waits_for_company}
        return cls(
            Packing(model, {name: entry for name, entry in linears.items() if name not in later}),
            Packing(model, {name: entry for name, entry in linears.items() if name in later}),
        )


def packed_bytes(model: nn.Module) -> int:
    """Return the bytes of packed weights, which no parameter holds."""
    return sum(module.weight_bytes for module in model.modules() if isinstance(module, PackedLinear))


def let_go(weight: Tensor) -> None:
    """Tell the system that a weight's pages are not needed now. They stay valid: mapped ones are read again from their file."""
    madvise: Callable[..., int] | None = getattr(_libc(), "madvise", None)
    first = -(-weight.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    size = (weight.data_ptr() + weight.nbytes - first) // mmap.PAGESIZE * mmap.PAGESIZE
    if madvise is not None and size > 0:
        madvise(ctypes.c_void_p(first), ctypes.c_size_t(size), PAGEOUT)


def _libc() -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL(None)
    except (OSError, TypeError):  # Windows
        return None
