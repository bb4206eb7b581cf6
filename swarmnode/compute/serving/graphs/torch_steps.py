"""Operations that torch computes between two graphs of ggml, as ggml has no counterpart for them.

torch's sums and vector loops give a row other bits beside other rows. So a step computes each position of each row by itself, with
tensors of the same shapes as for a lone position. An operation that is recorded as a whole (`Operation.is_whole`) gets all rows at
once, and is responsible for equal bits itself. So do operations that round nothing, or each element by itself.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from swarmnode.compute.packing.ggml_graph import CannotBeLowered
from swarmnode.compute.serving.cohort import Cohort
from swarmnode.compute.serving.graphs.operations import (
    LATE,
    OpenSize,
    Operation,
    SpanTrace,
    filled,
    reachable,
    sizes_of,
)

ALONE = sizes_of(1, 1, 1)
CLOSE = {"rtol": 1e-3, "atol": 1e-4}  # of a position computed alone to the same one among others
EXACT = frozenset(
    {"_to_copy", "add", "amax", "argmax", "bitwise_not", "chosen_products", "clone", "div", "eq", "expand"}
    | {"flatten", "full_like", "gather", "ge", "gt", "le", "logical_and", "logical_not"}
    | {"logical_or", "lt", "masked_fill", "max", "mul", "ne", "neg", "one_hot", "ones_like"}
    | {"permute", "reshape", "scatter", "slice", "sort", "squeeze", "sub", "to"}
    | {"topk", "transpose", "unflatten", "unsqueeze", "view", "where", "zeros_like"}
)
"""Operators that give a row the same bits in any company"""
PLACES, LAST_PLACES = ("B", "T", "BT"), ("B", "K", "BK")


class TorchStep:
    """Operations that torch computes for passes of one size; their `sizes` are those of `sizes_of`.

    `inputs` are the operations whose values a step reads: results of graphs, of earlier steps, and inputs of the pass. `outputs`
    are those that are read elsewhere.

    Raises CannotBeLowered if torch cannot compute them either, or not position by position.
    """

    def __init__(
        self, trace: SpanTrace, operations: Sequence[Operation], outputs: Sequence[Operation], sizes: Mapping[str, int]
    ) -> None:
        self._trace, self._operations, self.outputs, self._sizes = trace, operations, outputs, sizes
        own = set(operations)
        read = reachable(list(operations), lambda each: each.stage == LATE and each not in own) - own
        self.inputs = [each for each in read if each.stage == LATE or each in trace.inputs.values()]
        places = {size.name for each in (*self.inputs, *outputs) for size in each.shape if isinstance(size, OpenSize)}
        if any(operation.function is None for operation in operations):
            raise CannotBeLowered(f"neither ggml nor torch computes a part of {self!r} by itself")
        is_exact = all(operation.name in EXACT for operation in operations)
        is_by_position = places <= set(PLACES) or places <= set(LAST_PLACES)
        if not (operations[0].is_whole or is_exact or is_by_position):
            raise CannotBeLowered(f"torch cannot compute {self!r} position by position")
        self._count = sizes["K" if places & {"K", "BK"} else "T"]
        self._computed = (
            self._as_a_whole if operations[0].is_whole else self._together if is_exact else self._by_position
        )

    def __repr__(self) -> str:
        return f"TorchStep({', '.join(operation.name for operation in self._operations)})"

    def run(self, cohort: Cohort, values: dict[Operation, Tensor], *, is_checked: bool = False) -> None:
        """Compute the outputs from the values of all inputs, and add them to `values`.

        `is_checked` compares those of single positions with those of all positions at once. Raises CannotBeLowered if these are
        others, as a position then depends on its company.
        """
        inputs = {each: values[each] for each in self.inputs}
        for each, value in inputs.items():
            if not value.is_floating_point():
                inputs[each] = value.to(each.value.dtype)  # ggml's numbers have 32 bits
        results = self._computed(cohort, inputs)
        values.update(zip(self.outputs, results, strict=True))
        if is_checked and self._computed == self._by_position:
            for each, result, other in zip(self.outputs, results, self._together(cohort, inputs), strict=True):
                if not torch.allclose(result.double(), other.double(), **CLOSE):  # type: ignore[arg-type]
                    raise CannotBeLowered(f"a position of {each!r} depends on other ones")

    def _as_a_whole(self, cohort: Cohort, inputs: dict[Operation, Tensor]) -> list[Tensor]:
        whole = self._operations[0]
        assert whole.function is not None
        given = self._trace.computed(list(whole.inputs), inputs, self._sizes)
        return [whole.function(cohort, *given) for _ in self.outputs]

    def _together(self, _cohort: Cohort, inputs: dict[Operation, Tensor]) -> list[Tensor]:
        return self._trace.computed(self.outputs, inputs, self._sizes)

    def _by_position(self, _cohort: Cohort, inputs: dict[Operation, Tensor]) -> list[Tensor]:
        results = [
            torch.empty(filled(each.shape, lambda size: self._sizes[size.name]), dtype=each.value.dtype)
            for each in self.outputs
        ]
        for row, at in itertools.product(range(self._sizes["B"]), range(self._count)):
            alone = {each: self._at(each, value, row, at) for each, value in inputs.items()}
            parts = self._trace.computed(self.outputs, alone, ALONE)
            for each, result, part in zip(self.outputs, results, parts, strict=True):
                self._at(each, result, row, at).copy_(part)
        return results

    def _at(self, operation: Operation, value: Tensor, row: int, at: int) -> Tensor:
        """Return the part of an operation's value that belongs to one position of a row."""
        for dim, size in enumerate(operation.shape):
            if isinstance(size, OpenSize):
                place = row if size.name == "B" else at if size.name in "TK" else row * self._count + at
                value = value.narrow(dim, place, 1)
        return value
