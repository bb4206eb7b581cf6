"""Matrix products on the CPU, each in the way that is fastest on this machine: found by timing, once per shape in a process.

One decode step multiplies each weight matrix by one to some ten rows, one for each session. Libraries were made for many rows, and
which way is fast differs. For float32, a single-threaded MKL on an AMD EPYC takes 8.7 ms for 8 rows and a matrix of 5632 x 2048;
oneDNN takes 5.6. For one row W x^T is sometimes twice as fast as x W^T. For bfloat16, a CPU without instructions for it
multiplies 8 rows no faster than each alone: 10.7 ms, while FBGEMM takes 2.4.

Linear layers whose weights are reordered into a library's fastest format, in as many bytes as before.

A packed layer takes the place of the original one: only one copy is in memory, and the original's pages, mapped from a file, are
released. Timing decides whether a form is of use, and which.
"""

from __future__ import annotations

import bisect
import ctypes
import math
import mmap
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, ClassVar, NamedTuple, TypeGuard, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from swarmnode.compute.packing.packed_weight import Block, frozen_product, tiles

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
    def works(dtype: torch.dtype) -> bool:
        """Return whether this build of torch and this CPU support the form for weights of this dtype. Raises NotImplementedError
        if a subclass does not define it."""
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
    def works(_dtype: torch.dtype) -> bool:
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
    def works(dtype: torch.dtype) -> bool:
        """Return whether this build of torch has oneDNN, and this CPU its instructions for this half precision."""
        try:
            OneDnnLinear(torch.zeros(16, 16, dtype=dtype), None)(torch.zeros(1, 16, dtype=dtype))
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
    def works(_dtype: torch.dtype) -> bool:
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
                release_pages(linear.weight)
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


def release_pages(weight: Tensor) -> None:
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


T = TypeVar("T")

Product = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""Function for a product: x (..., I), weight_OI, bias_O -> y (..., O)"""

Sample = Mapping[torch.Size, Sequence[Tensor]]
"""Matrices (or their first rows) to be timed, by the shape of the layer's matrix"""

TIMED_ROWS = (1, 2, 4, 8, 16, 64)  # for numbers between two of them the lower one decides
MANY_ROWS = 16  # from here on a product's time is proportional to the part, and independent of the weights' place
TURNS = 3
PACKED_TURNS = 4  # for the comparison of a packed matrix and a plain one
HOPELESS = 1.5  # times the usual time
MIN_GAIN = 0.9  # of the usual time: a faster way is taken below it
SAMPLE_BYTES = 96 << 20
PACKED_SAMPLE_BYTES = 32 << 20
TALLEST = 8192  # most outputs of a matrix that are timed: a head has 100,000
SAMPLE_OUTPUTS = 1024  # outputs timed with many rows, or of a matrix that takes long to pack
MIN_ELEMENTS = 1 << 16  # smaller matrices are all overhead
TILE_BYTES, MIN_TILE_ROWS = 1 << 20, 16

Kind = tuple[torch.dtype, torch.Size, int]
"""Key of a choice: (number format, shape, threads)"""


class TimedLinear(nn.Linear):
    """Linear layer that shares another one's parameters. `products` holds the function to use for each of TIMED_ROWS."""

    def __init__(self, like: nn.Linear, products: Sequence[Product]) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = like.in_features, like.out_features
        self.weight, self.bias = like.weight, like.bias
        self._forward_hooks = like._forward_hooks  # one shared table, so that adapters' hooks work on either layer
        self.products = tuple(products)

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's outputs (..., O) for inputs x (..., I), by the kernel that was fastest for this number of rows,
        or for the next lower one in TIMED_ROWS."""
        return frozen_product(x, self._multiply, self._blocks)

    def _multiply(self, x: Tensor) -> Tensor:
        rows = x.numel() // self.in_features
        return self.products[bisect.bisect(TIMED_ROWS, rows) - 1](x, self.weight, self.bias)

    def _blocks(self) -> Iterator[Block]:
        return tiles(self.weight)


def weight_first_linear(x: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
    """Multiply as (W x^T)^T. A single row is doubled: with one column libraries take their slower vector path."""
    x_RI = x.reshape(-1, x.shape[-1])
    rows = x_RI.shape[0]
    if rows == 1:
        x_RI = torch.cat((x_RI, x_RI))
    y_RO = torch.mm(weight_OI, x_RI.t()).t()[:rows].contiguous()
    if bias_O is not None:
        y_RO += bias_O
    return y_RO.view(*x.shape[:-1], weight_OI.shape[0])


def onednn_linear(x: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
    """Multiply with oneDNN, which torch does not use for float32 by default."""
    y: Tensor = torch.ops.mkldnn._linear_pointwise(x.contiguous(), weight_OI, bias_O, "none", [], "")
    return y


def blocked_linear(x: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
    """Multiply as a batch of small products: for a few rows and AVX-512 (`linear.py`)."""
    return multiply_blocks(x, *in_blocks(weight_OI), bias_O)


def plain_linear(x: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
    """Multiply without oneDNN, which reorders the whole matrix first: for one row of bfloat16 this takes half the time.

    The switch is the process's: products in other threads meanwhile get the same results, more slowly.
    """
    torch.backends.mkldnn.set_flags(False)
    try:
        return functional.linear(x, weight_OI, bias_O)
    finally:
        torch.backends.mkldnn.set_flags(True)


def tiled_linear(x: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
    """Multiply in float32. A few rows of the weights are converted at a time, so that they stay in the processor's cache."""
    outputs, inputs = weight_OI.shape
    x_RI = x.reshape(-1, inputs).float()
    y_RO = x_RI.new_empty(x_RI.shape[0], outputs)
    height = max(MIN_TILE_ROWS, TILE_BYTES // (4 * inputs))
    tile = x_RI.new_empty(min(height, outputs), inputs)
    for first in range(0, outputs, height):
        rows = weight_OI[first : first + height]
        torch.mm(x_RI, tile[: len(rows)].copy_(rows).t(), out=y_RO[:, first : first + height])
    if bias_O is not None:
        y_RO += bias_O
    return y_RO.to(x.dtype).view(*x.shape[:-1], outputs)


USUAL: Product = functional.linear
OTHERS: Mapping[torch.dtype, Sequence[Product]] = {
    torch.float32: (weight_first_linear, onednn_linear, blocked_linear),
    torch.bfloat16: (plain_linear, tiled_linear),
    torch.float16: (plain_linear, tiled_linear),
}


_products: dict[Kind, list[Product]] = {}  # one for each of TIMED_ROWS
_forms: dict[Kind, type[PackedLinear] | None] = {}  # None: not packed


@torch.inference_mode()
def speed_up_linears(model: nn.Module) -> Packings:
    """Let the model's large linear layers on the CPU multiply in the fastest way. Returns the layers still to be packed.

    Layers that are fastest packed work unpacked until their packing has `run`. A model on the meta device makes the choices ahead
    for one to be loaded.
    """
    uses = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
    to_pack: dict[str, tuple[nn.Linear, type[PackedLinear]]] = {}
    for dtype, others in OTHERS.items():
        linears = {name: module for name, module in model.named_modules() if _is_candidate(module, dtype)}
        choices = _remembered(
            _products, [module.weight for module in linears.values()], partial(_choose, others=others)
        )
        own = {name: module for name, module in linears.items() if uses[id(module.weight)] == 1}
        forms = _remembered(
            _forms, [module.weight for module in own.values()], partial(_forms_to_pack, choices=choices)
        )
        packable = {name: (module, forms[module.weight.shape]) for name, module in own.items()}
        to_pack.update((name, (module, form)) for name, (module, form) in packable.items() if form is not None)
        for name, module in linears.items():
            chosen = choices[module.weight.shape]
            if any(product is not USUAL for product in chosen):
                model.set_submodule(name, TimedLinear(module, chosen))
    return Packings.of(model, to_pack)


def _is_candidate(module: nn.Module, dtype: torch.dtype) -> TypeGuard[nn.Linear]:
    if type(module) is not nn.Linear:
        return False
    weight = module.weight
    if not isinstance(weight, nn.Parameter):  # it stays packed
        return False
    return weight.device.type in ("cpu", "meta") and weight.dtype is dtype and weight.numel() >= MIN_ELEMENTS


def _remembered(
    known: dict[Kind, T], weights: Sequence[Tensor], find: Callable[[Sequence[Tensor]], Mapping[torch.Size, T]]
) -> dict[torch.Size, T]:
    """Return the known choice for each shape. Unknown ones are found now and remembered."""
    kinds = {weight.shape: (weight.dtype, weight.shape, torch.get_num_threads()) for weight in weights}
    for shape, found in find([weight for weight in weights if kinds[weight.shape] not in known]).items():
        known[kinds[shape]] = found
    return {shape: known[kind] for shape, kind in kinds.items()}


def _choose(weights: Sequence[Tensor], others: Sequence[Product]) -> dict[torch.Size, list[Product]]:
    """Return, for each shape of weight matrix, the fastest way to multiply for each number of rows in TIMED_ROWS."""
    sample = _first_bytes(weights, SAMPLE_BYTES)
    others = [product for product in others if _works(product)] if sample else []
    choices: dict[torch.Size, list[Product]] = {shape: [] for shape in sample}
    for rows in TIMED_ROWS:
        if rows == MANY_ROWS:
            sample = {shape: [weights[0][:SAMPLE_OUTPUTS]] for shape, weights in sample.items()}
        times_s = _time_in_turns([USUAL, *_rivals(others, sample, rows)], sample, rows)
        for shape, chosen in choices.items():
            best = min(times_s, key=lambda product: times_s[product][shape])
            chosen.append(best if times_s[best][shape] < MIN_GAIN * times_s[USUAL][shape] else USUAL)
    return choices


def _rivals(products: Sequence[Product], sample: Sample, rows: int) -> list[Product]:
    """Return the products that are not hopelessly slow in a few tries of one matrix of each shape."""
    one_of_each = {shape: weights[:1] for shape, weights in sample.items()}
    tries_s = _time_in_turns([USUAL, *products], one_of_each, rows)
    usual_s = tries_s.pop(USUAL)
    return [
        product
        for product, took_s in tries_s.items()
        if any(took_s[shape] < HOPELESS * usual_s[shape] for shape in took_s)
    ]


def _forms_to_pack(
    weights: Sequence[Tensor], choices: Mapping[torch.Size, Sequence[Product]]
) -> dict[torch.Size, type[PackedLinear] | None]:
    """Return for each shape the form that is fastest on the average over its compared rows; None if none is fast enough.

    All weights are of one dtype.
    """
    forms = [form for form in FORMS[weights[0].dtype] if form.works(weights[0].dtype)] if weights else []
    if not forms:  # no matrices are made up just to be timed
        return dict.fromkeys(weight.shape for weight in weights)
    best: dict[torch.Size, type[PackedLinear] | None] = {}
    for shape, matrices in _first_bytes(weights, PACKED_SAMPLE_BYTES).items():
        times = {form: _time_beside(form, matrices, choices[shape]) for form in forms}
        fastest = min(times, key=times.__getitem__)
        best[shape] = fastest if times[fastest] < MIN_GAIN else None
    return best


def _time_beside(form: type[PackedLinear], matrices: Sequence[Tensor], chosen: Sequence[Product]) -> float:
    """Return the time of packed products as a multiple of the chosen ones'.

    The two are timed in turn, so that a busy machine slows both.
    """
    shape = matrices[0].shape
    parts = matrices if form.packs_fast else [matrices[0][:SAMPLE_OUTPUTS]]
    packed = {part.data_ptr(): form(part, None) for part in parts}

    def by_packed(x: Tensor, weight_OI: Tensor, _bias_O: Tensor | None) -> Tensor:
        y: Tensor = packed[weight_OI.data_ptr()](x)
        return y

    ratios: list[float] = []
    for product, rows in zip(chosen, TIMED_ROWS, strict=True):
        if rows in form.compared_rows:
            times_s = _time_in_turns([by_packed, product], {shape: parts}, rows, turns=PACKED_TURNS)
            ratios.append(times_s[by_packed][shape] / times_s[product][shape])
    return sum(ratios) / len(ratios)


def _works(product: Product) -> bool:
    """Return whether this build of torch supports the product."""
    try:
        product(torch.zeros(1, 8), torch.zeros(8, 8), None)
    except (RuntimeError, AttributeError):
        return False
    return True


def _first_bytes(weights: Sequence[Tensor], limit_bytes: int) -> Sample:
    """Return the first weights up to a limit, and one weight of each further shape."""
    sample: dict[torch.Size, list[Tensor]] = {}
    used_bytes = 0
    for weight in weights:
        if used_bytes < limit_bytes or weight.shape not in sample:
            part = weight[:TALLEST]
            part = torch.ones(part.shape, dtype=part.dtype) if part.is_meta else part  # on the meta device: no values
            sample.setdefault(weight.shape, []).append(part)
            used_bytes += weight.nbytes
    return sample


def _time_in_turns(
    products: Sequence[Product], sample: Sample, rows: int, turns: int = TURNS
) -> dict[Product, dict[torch.Size, float]]:
    """Return, for each product and shape, the least seconds that one multiplication took.

    Whole passes over many weights are timed, as in decoding, or else they would lie in the processor's cache. The products take
    turns, as the first one meets matrices that are not in memory yet, and libraries that have compiled nothing.
    """
    best_s: dict[Product, dict[torch.Size, float]] = {product: {} for product in products}
    for _ in range(turns):
        for product, known_s in best_s.items():
            for shape, weights in sample.items():
                x_RI = torch.ones(rows, shape[1], dtype=weights[0].dtype)
                took_s = min(_time_product(product, weight_OI, x_RI) for weight_OI in weights)
                known_s[shape] = min(took_s, known_s.get(shape, took_s))
    return best_s


def _time_product(product: Product, weight_OI: Tensor, x_RI: Tensor) -> float:
    """Return the seconds of one product. With a single thread it is the thread's own time, so a busy machine chooses the same."""
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    begin_s = clock()
    product(x_RI, weight_OI, None)
    return clock() - begin_s
