"""Compute work: the demand of a computation on a machine, counted from the operators that torch dispatches, on fake tensors.

Products of matrices, convolutions and attention are counted in floating-point operations (a multiplication and an addition are
two), all other operators in bytes read and written. Views cost nothing but the call.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

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
_PICKING = frozenset(
    {"embedding", "index", "gather", "index_select"}
)  # they read as much as they write, not the whole table


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
