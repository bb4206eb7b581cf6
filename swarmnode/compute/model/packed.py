"""Linear layers whose weights lie in the order in which a library multiplies them fastest, as many bytes as before.

A packed layer takes the place of the one that it was made of: one copy is in memory, and the pages that were mapped from a file
are let go. Which form is of use, if any, is found by timing (`model/linear.py`).
"""

from __future__ import annotations

import ctypes
import math
import mmap
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

LARGEST_EXPONENT = 15  # of float16
BLOCK = 16  # outputs: a cache line of float32
FEW_ROWS = 64  # for which oneDNN is asked to block: a chunk of a prompt, or many sessions
PAGEOUT = 21  # MADV_PAGEOUT: let go of the pages; whoever touches them again gets them back


class PackedLinear(nn.Module):
    """An nn.Linear of these values, which subclasses pack. Its own `weight` is empty, for families that look at its dtype."""

    compared_rows: ClassVar[Sequence[int]] = (1, 8, 64)
    """One session, several, and a prompt: a form is taken if it is faster on the average over these."""

    packs_fast: ClassVar[bool] = False
    """Whether many matrices can be packed just to be timed."""

    waits_for_company: ClassVar[bool] = False
    """Whether it is slower while there is one session alone."""

    def __init__(self, weight_OI: Tensor, bias_O: nn.Parameter | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight_OI.shape
        self.weight_bytes = weight_OI.nbytes
        self.weight = nn.Parameter(weight_OI.new_empty(0), requires_grad=False)
        self.bias = bias_O

    @staticmethod
    def works() -> bool:
        """Whether this build of torch has what it takes."""
        raise NotImplementedError

    def extra_repr(self) -> str:
        """As nn.Linear's."""
        return f"in_features={self.in_features}, out_features={self.out_features}, {self.weight_bytes / 1e6:.1f} MB"


class FbgemmLinear(PackedLinear):
    """For CPUs that cannot multiply half precision: by FBGEMM, sums in float32.

    Its numbers are float16. Scaled by a power of two, a bfloat16 matrix keeps all of its bits there: only what is smaller than
    2^-32 of its largest element loses some, which is below the last bit of a float32 sum.
    """

    def __init__(self, weight_OI: Tensor, bias_O: nn.Parameter | None) -> None:
        super().__init__(weight_OI, bias_O)
        largest = max(abs(float(extreme)) for extreme in weight_OI.aminmax())
        exponent = LARGEST_EXPONENT - math.frexp(largest)[1] if largest > 0 else 0
        self._unscale = 2.0**-exponent
        # A scale beside the sums, not in the inputs: these may be as large as they like.
        self._packed: Any = torch.ops.quantized.linear_prepack_fp16(weight_OI.float().mul_(2.0**exponent), None)

    @staticmethod
    def works() -> bool:
        """Whether this build of torch has FBGEMM."""
        return "fbgemm" in torch.backends.quantized.supported_engines

    def forward(self, x: Tensor) -> Tensor:
        """x (..., I) -> (..., O) in the dtype of x."""
        y: Tensor = torch.ops.quantized.linear_dynamic_fp16(x.float(), self._packed)
        y = y.mul_(self._unscale)
        if self.bias is not None:
            y += self.bias
        return y.to(x.dtype)


class OneDnnLinear(PackedLinear):
    """For CPUs that can (AMX, AVX-512 with bfloat16): in oneDNN's blocks, into which it else puts the matrix at every product."""

    def __init__(self, weight_OI: Tensor, bias_O: nn.Parameter | None) -> None:
        super().__init__(weight_OI, bias_O)
        self._packed: Any = torch.ops.mkldnn._reorder_linear_weight(weight_OI.contiguous(), FEW_ROWS)

    @staticmethod
    def works() -> bool:
        """Whether this build of torch has oneDNN, and this CPU what that needs for half precision."""
        try:
            OneDnnLinear(torch.zeros(16, 16, dtype=torch.bfloat16), None)(torch.zeros(1, 16, dtype=torch.bfloat16))
        except (RuntimeError, AttributeError):
            return False
        return True

    def forward(self, x: Tensor) -> Tensor:
        """x (..., I) -> (..., O)."""
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x.contiguous(), self._packed, self.bias, "none", [], "")
        return y


class BlockedLinear(PackedLinear):
    """For float32, several sessions and CPUs with AVX2: a cache line holds what an input weighs for BLOCK outputs
    (`multiply_blocks`). With AVX-512 weights may lie as they are."""

    compared_rows = (2, 4, 8)
    packs_fast = True
    waits_for_company = True

    def __init__(self, weight_OI: Tensor, bias_O: nn.Parameter | None) -> None:
        super().__init__(weight_OI, bias_O)
        blocks_NIB, rest_OI = in_blocks(weight_OI)
        self._blocks_NIB, self._rest_OI = blocks_NIB.contiguous(), rest_OI.clone()

    @staticmethod
    def works() -> bool:
        """Whether this CPU, or what torch is held to, is one of those."""
        return torch.backends.cpu.get_cpu_capability() == "AVX2"

    def forward(self, x: Tensor) -> Tensor:
        """x (..., I) -> (..., O)."""
        return multiply_blocks(x, self._blocks_NIB, self._rest_OI, self.bias)


def in_blocks(weight_OI: Tensor) -> tuple[Tensor, Tensor]:
    """(blocks_NIB, rest_OI): views of a matrix as blocks of BLOCK outputs, and of the outputs that fill none."""
    outputs, inputs = weight_OI.shape
    whole = outputs - outputs % BLOCK
    return weight_OI[:whole].view(-1, BLOCK, inputs).transpose(1, 2), weight_OI[whole:]


def multiply_blocks(x: Tensor, blocks_NIB: Tensor, rest_OI: Tensor, bias_O: Tensor | None) -> Tensor:
    """x (..., I) -> (..., O) as a batch of N small products: MKL multiplies those from where they lie, where it puts one large
    matrix into an order of its own first, whatever the number of rows."""
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
    """Linear layers of a model that are still to be packed, by name, and what into. It takes one core up to 10 ns for a weight; a
    model serves meanwhile: whichever of the two forms a pass meets, it multiplies the same numbers."""

    def __init__(self, model: nn.Module, linears: Mapping[str, tuple[nn.Linear, type[PackedLinear]]]) -> None:
        self._model = model
        self._left = dict(linears)

    def __repr__(self) -> str:
        return f"<Packing of {len(self._left)} layers>"

    def __len__(self) -> int:
        return len(self._left)

    def run(self, stopped: Callable[[], bool] = lambda: False) -> None:
        """Pack them all, by as many threads as torch computes with; once `stopped`, those that were begun."""

        @torch.inference_mode()
        def pack(entry: tuple[str, tuple[nn.Linear, type[PackedLinear]]]) -> None:
            name, (linear, form) = entry
            if not stopped():
                packed = form(linear.weight, linear.bias)
                packed._forward_hooks = linear._forward_hooks  # one table, whichever of the two an adapter finds
                self._model.set_submodule(name, packed)
                let_go(linear.weight)
                del self._left[name]

        with ThreadPoolExecutor(torch.get_num_threads(), thread_name_prefix="pack") as threads:
            for _ in threads.map(pack, list(self._left.items())):
                pass


class Packings(NamedTuple):
    """What of a model is to be packed when."""

    at_once: Packing
    in_company: Packing
    """Once several sessions are there."""

    @classmethod
    def of(cls, model: nn.Module, linears: Mapping[str, tuple[nn.Linear, type[PackedLinear]]]) -> Packings:
        """Of all layers that are to be packed at some time."""
        later = {name for name, (_, form) in linears.items() if form.waits_for_company}
        return cls(
            Packing(model, {name: entry for name, entry in linears.items() if name not in later}),
            Packing(model, {name: entry for name, entry in linears.items() if name in later}),
        )


def packed_bytes(model: nn.Module) -> int:
    """Memory of the weights that are packed, and so in no parameter."""
    return sum(module.weight_bytes for module in model.modules() if isinstance(module, PackedLinear))


def let_go(weight: Tensor) -> None:
    """Tell the system that a weight's pages are not needed now. They stay valid; mapped ones are read again from their file."""
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
