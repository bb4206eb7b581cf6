"""Rates: the speed of a machine at each kind of work, and the time that a piece of work takes.

Compute work: the demand of a computation on a machine, counted from the operators that torch dispatches, on fake tensors.

Products of matrices, convolutions and attention are counted in floating-point operations (a multiplication and an addition are
two), all other operators in bytes read and written. Views cost nothing but the call.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from swarmnode.compute.stopwatch import synchronize
from swarmnode.compute.training.randomness import CounterDropout

MATMUL, CONVOLUTION, ATTENTION = "matmul", "convolution", "attention"  # in floating-point operations
FLOPS = (MATMUL, CONVOLUTION, ATTENTION)
FILTERS = "filters"  # bytes of a convolution's weights, which libraries lay out anew in every call
PLAIN, LARGE = "plain", "large"  # bytes of operators that move and add: small enough for the caches, or not
SOFT, HARD = "soft", "hard"  # bytes of operators that compute functions: softmax and its like, tanh and its like
RANDOM, BATCH_NORM = "random", "batch_norm"  # bytes of operators that draw random numbers, and of batch norms
CALLS = "calls"
FRESH = "fresh"  # bytes written to memory that the process did not have before

_LARGE_BYTES = 24 << 20
_ATTENTION = "_scaled_dot_product"
_SOFT_NAMES = """
exp expm1 log log2 log1p sigmoid silu silu_backward gelu gelu_backward rsqrt softplus mish elu _softmax _softmax_backward_data
_safe_softmax _log_softmax _log_softmax_backward_data native_layer_norm native_layer_norm_backward native_group_norm
native_group_norm_backward
"""
_KINDS = {
    **dict.fromkeys(("mm", "addmm", "bmm", "baddbmm"), MATMUL),
    **dict.fromkeys(("convolution", "convolution_backward"), CONVOLUTION),
    **dict.fromkeys(("native_batch_norm", "native_batch_norm_backward"), BATCH_NORM),
    **dict.fromkeys(("native_dropout", "bernoulli", "bernoulli_", "normal_", "uniform_", "randn", "rand"), RANDOM),
    **dict.fromkeys(("tanh", "sin", "cos", "tan", "atan", "erf", "sinh", "cosh"), HARD),
    **dict.fromkeys(_SOFT_NAMES.split(), SOFT),
}
_FREE = frozenset({"detach", "alias", "_unsafe_view", "empty", "empty_like", "new_empty", "empty_strided"})
# These read as much as they write, not the whole table.
_PICKING = frozenset({"embedding", "index", "gather", "index_select"})


@dataclass(frozen=True)
class ComputeWork:
    """Amounts of work of a computation, such as operations or bytes moved, by their kind."""

    amounts: Mapping[str, float] = field(default_factory=dict)

    def __add__(self, other: ComputeWork) -> ComputeWork:
        kinds = {**self.amounts, **other.amounts}
        return ComputeWork({kind: self.amounts.get(kind, 0.0) + other.amounts.get(kind, 0.0) for kind in kinds})

    def __sub__(self, other: ComputeWork) -> ComputeWork:
        return self + ComputeWork({kind: -amount for kind, amount in other.amounts.items()})

    @property
    def flops(self) -> float:
        """Floating-point operations of products, convolutions and attention."""
        return sum(self.amounts.get(kind, 0.0) for kind in FLOPS)


def total(works: Iterable[ComputeWork]) -> ComputeWork:
    """Return the sum of several amounts of work."""
    return sum(works, ComputeWork())


class WorkCounter(TorchDispatchMode):
    """Counter of the work of the aten operators that are dispatched while it is entered. With fake tensors they cost nothing."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.amounts: dict[str, float] = {}

    @property
    def work(self) -> ComputeWork:
        """Work of the operators that ran within this counter."""
        return ComputeWork(dict(self.amounts))

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator and count it."""
        kwargs = kwargs or {}
        output = function(*args, **kwargs)
        if function.namespace == "aten":
            self._count(function, args, kwargs, output)
        return output

    def _count(self, function: Any, args: Any, kwargs: Any, output: Any) -> None:
        name = function._overloadpacket.__name__
        self._add(CALLS, 1)
        kind = ATTENTION if name.startswith(_ATTENTION) else _KINDS.get(name, PLAIN)
        if function.is_view or name in _FREE:
            return
        if kind == ATTENTION:
            self._add(kind, attention_flops(args, is_backward="backward" in name))
        elif kind in FLOPS:
            self._add(kind, flop_registry[function._overloadpacket](*args, **kwargs, out_val=output))
            if kind == CONVOLUTION:
                self._add(FILTERS, bytes_of(args[2] if name.endswith("backward") else args[1]))
        else:
            moved = bytes_of(output) + bytes_of(output if name in _PICKING else (args, kwargs))
            self._add(LARGE if kind == PLAIN and moved > _LARGE_BYTES else kind, moved)

    def _add(self, kind: str, amount: float) -> None:
        self.amounts[kind] = self.amounts.get(kind, 0.0) + amount


def attention_flops(args: Any, *, is_backward: bool) -> float:
    """Return the operations of fused attention of query_BHTD over key_BHSD: two products forward, five backward.

    The backward pass computes the attention weights again.
    """
    query, key, value = args[1:4] if is_backward else args[:3]
    pairs: float = 2.0 * query.shape[0] * query.shape[1] * query.shape[2] * key.shape[2]
    key_width: int = query.shape[3]
    value_width: int = value.shape[3]
    return pairs * (3 * key_width + 2 * value_width if is_backward else key_width + value_width)


def bytes_of(values: Any) -> int:
    """Return the bytes of all tensors in a tree of values."""
    return sum(value.numel() * value.element_size() for value in tree_leaves(values) if isinstance(value, Tensor))


MEASURING_BYTES = 96 << 20  # most memory of a measurement at a time, with its outputs and torch's own buffers
_TRIALS = 5
_FRESH_BLOCKS = 72  # of 1 MiB: more than the 64 that glibc keeps of freed memory


@dataclass(frozen=True)
class Rates:
    """Speeds of a device: amounts of work per second, by kind of work."""

    per_s: Mapping[str, float]

    def seconds(self, work: ComputeWork) -> float:
        """Return the seconds that the work takes."""
        return sum(amount / self.per_s[kind] for kind, amount in work.amounts.items())


REFERENCE = Rates(
    {
        CALLS: 3e5,
        PLAIN: 3e10,
        LARGE: 1e10,
        SOFT: 1e10,
        HARD: 5e9,
        RANDOM: 2e9,
        BATCH_NORM: 5e9,
        MATMUL: 1e11,
        CONVOLUTION: 1e11,
        FILTERS: 2e9,
        ATTENTION: 5e10,
        FRESH: 5e9,
    }
)
"""Rates of a middling processor, for decisions that must not depend on the machine that makes them"""


def measure_rates(
    device: torch.device | str = "cpu",
    autocast_dtype: torch.dtype | None = None,
    *,
    clock: Callable[[], float] = time.perf_counter,
) -> Rates:
    """Measure this machine's rates under its present load, with torch's present number of threads. Takes about a second.

    `autocast_dtype` is the dtype of autocast; None for no autocast.
    """
    device = torch.device(device)
    per_s: dict[str, float] = {}
    with torch.autocast(device.type, autocast_dtype, enabled=autocast_dtype is not None):
        for kind, trial, stands_for in _trials(device):
            with WorkCounter() as counter:
                if stands_for is None:
                    trial()
            work = counter.work if stands_for is None else stands_for
            other = Rates(per_s).seconds(ComputeWork({done: work.amounts.get(done, 0.0) for done in per_s}))
            seconds = []
            for _ in range(_TRIALS):
                start_s = clock()
                trial()
                synchronize(device)
                seconds.append(clock() - start_s)
            took_s = statistics.median(seconds)
            per_s[kind] = work.amounts[kind] / max(took_s - other, took_s / 100, 1e-9)
    return Rates(per_s)


def _trials(device: torch.device) -> Iterator[tuple[str, Callable[[], Any], ComputeWork | None]]:
    """Yield for each kind of work a trial that is mostly of that kind, and the work that it counts as.

    The work is None if the dispatched operators are to be counted. Later kinds' times exclude the parts of earlier kinds.
    """

    def normal(*shape: int, learns: bool = False) -> Tensor:
        return torch.randn(*shape, device=device, requires_grad=learns)

    def backward(output: Tensor, *inputs: Tensor) -> Any:
        return torch.autograd.grad(output, inputs, output.detach())

    tiny = torch.zeros(1, device=device)
    yield CALLS, lambda: [tiny + tiny for _ in range(1000)], None

    block = normal(1 << 18)  # 1 MiB, as activations are

    ring = [torch.empty_like(block) for _ in range(32)]  # more than caches hold, and no new memory is allocated
    yield PLAIN, functools.partial(_add_along, ring, block), None
    del ring
    fresh = ComputeWork({FRESH: _FRESH_BLOCKS * block.nbytes, PLAIN: 3 * _FRESH_BLOCKS * block.nbytes})
    yield FRESH, lambda: [block + block for _ in range(_FRESH_BLOCKS)], fresh
    large = normal(1 << 23)
    yield LARGE, functools.partial(torch.add, large, large), None
    del large  # not kept for the following trials
    yield SOFT, lambda: [torch.softmax(block.view(-1, 512), 1) for _ in range(20)], None
    yield HARD, lambda: [torch.tanh(block) for _ in range(5)], None

    def drop() -> list[Tensor]:
        with CounterDropout() as dropout:
            return [dropout.dropout(block) for _ in range(5)]

    yield RANDOM, drop, ComputeWork({RANDOM: 5 * (2 * block.nbytes + block.numel())})  # reads, writes and a mask

    images, moments = normal(8, 64, 16, 16, learns=True), torch.ones(64, device=device)

    def batch_norm() -> Tensor:
        return functional.batch_norm(images, moments.clone(), moments.clone(), training=True)

    yield BATCH_NORM, lambda: [backward(batch_norm(), images) for _ in range(5)], None

    matrix = normal(512, 512)
    yield MATMUL, lambda: [matrix @ matrix for _ in range(5)], None

    kernel = normal(64, 64, 3, 3, learns=True)
    yield CONVOLUTION, lambda: backward(functional.conv2d(images, kernel, padding=1), images, kernel), None

    small, filters = normal(2, 256, 4, 4, learns=True), normal(512, 256, 3, 3, learns=True)
    yield FILTERS, lambda: backward(functional.conv2d(small, filters, padding=1), small, filters), None

    query = normal(4, 8, 128, 64, learns=True)
    yield ATTENTION, lambda: backward(functional.scaled_dot_product_attention(query, query, query), query), None


def _add_along(ring: Sequence[Tensor], block: Tensor) -> None:
    for at, output in enumerate(ring):
        torch.add(ring[at - 1], block, out=output)
