"""Linear layers in half precision for CPUs that cannot multiply it: packed for FBGEMM, two bytes a weight, sums in float32.

FBGEMM's numbers are float16. Scaled by a power of two, a bfloat16 matrix keeps all of its bits there: only what is smaller
than 2^-32 of its largest element loses some, which is below the last bit of a float32 sum. A packed layer takes the place of
the one that it was made of: one copy is in memory, and the pages that were mapped from a file are let go.
"""

from __future__ import annotations

import ctypes
import math
import mmap
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn

LARGEST_EXPONENT = 15  # of float16
PAGEOUT = 21  # MADV_PAGEOUT: let go of the pages; whoever touches them again gets them back


class PackedLinear(nn.Module):
    """An nn.Linear of these values. Its own `weight` is empty, for families that look at its dtype."""

    def __init__(self, weight_OI: Tensor, bias_O: nn.Parameter | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight_OI.shape
        self.weight_bytes = weight_OI.nbytes
        self.weight = nn.Parameter(weight_OI.new_empty(0), requires_grad=False)
        self.bias = bias_O
        largest = max(abs(float(extreme)) for extreme in weight_OI.aminmax())
        exponent = LARGEST_EXPONENT - math.frexp(largest)[1] if largest > 0 else 0
        self._unscale = 2.0**-exponent
        # A scale beside the sums, not in the inputs: these may be as large as they like.
        self._packed: Any = torch.ops.quantized.linear_prepack_fp16(weight_OI.float().mul_(2.0**exponent), None)

    def extra_repr(self) -> str:
        """As nn.Linear's."""
        return f"in_features={self.in_features}, out_features={self.out_features}, {self.weight_bytes / 1e6:.1f} MB"

    def forward(self, x: Tensor) -> Tensor:
        """x (..., I) -> (..., O) in the dtype of x."""
        y: Tensor = torch.ops.quantized.linear_dynamic_fp16(x.float(), self._packed)
        y = y.mul_(self._unscale)
        if self.bias is not None:
            y += self.bias
        return y.to(x.dtype)


class Packing:
    """Linear layers of a model that are still to be packed, by name. That takes one core some 10 ns for each weight, so a model
    serves meanwhile: whichever of the two forms a pass meets, it multiplies the same numbers."""

    def __init__(self, model: nn.Module, linears: Mapping[str, nn.Linear]) -> None:
        self._model = model
        self._left = dict(linears)

    def __repr__(self) -> str:
        return f"<Packing of {len(self._left)} layers>"

    def __len__(self) -> int:
        return len(self._left)

    def run(self, stopped: Callable[[], bool] = lambda: False) -> None:
        """Pack them all, by as many threads as torch computes with; once `stopped`, those that were begun."""

        @torch.inference_mode()
        def pack(entry: tuple[str, nn.Linear]) -> None:
            name, linear = entry
            if not stopped():
                self._model.set_submodule(name, PackedLinear(linear.weight, linear.bias))
                let_go(linear.weight)
                del self._left[name]

        with ThreadPoolExecutor(torch.get_num_threads(), thread_name_prefix="pack") as threads:
            for _ in threads.map(pack, list(self._left.items())):
                pass


def can_pack() -> bool:
    """Whether this build of torch has FBGEMM."""
    return "fbgemm" in torch.backends.quantized.supported_engines


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
