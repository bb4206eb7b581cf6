"""Nodes of a graph of ggml for what depends on values: routers, chosen experts, and what torch computes between nodes.

A row's results do not depend on the other rows of a pass. ggml's products with chosen experts take at most as many rows at once as
leave each row's bits as they are (`GgmlStack.rows_at_once`).
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from swarmnode.compute.packing.ggml import (
    BUFFER_AT,
    DATA_AT,
    EXTRA_AT,
    FORMATS,
    I32,
    STRIDES_AT,
    Library,
    Operators,
    TorchStep,
    address_at,
    numbers_at,
)
from swarmnode.compute.packing.ggml_matrix import MANY_ROWS, GgmlStack
from swarmnode.compute.serving.span_trace import CONSTANT, LATE, CannotBeLowered, Operation, filled

F32, F16, I64 = FORMATS["F32"].number, FORMATS["F16"].number, 27
NUMBERS = {
    torch.float32: F32,
    torch.float16: F16,
    torch.bfloat16: FORMATS["BF16"].number,
    torch.int32: I32,
    torch.int64: I64,
}
DESCENDING = 1  # ggml's order of sorting
LARGEST = 3.4028234e38  # of float32
MOST_READ = 9  # tensors that one of ggml's nodes reads
BY_TORCH = frozenset(
    {
        "topk",
        "sort",
        "gather",
        "scatter",
        "masked_fill",
        "where",
        "eq",
        "ne",
        "ge",
        "gt",
        "le",
        "lt",
        "max",
        "amax",
        "argmax",
    }
    | {
        "zeros_like",
        "ones_like",
        "full_like",
        "bitwise_not",
        "logical_not",
        "logical_and",
        "logical_or",
        "to",
        "_to_copy",
    }
    | {
        "view",
        "reshape",
        "expand",
        "unsqueeze",
        "squeeze",
        "transpose",
        "permute",
        "flatten",
        "unflatten",
        "slice",
        "clone",
    }
)
"""Operators that torch computes within a graph if ggml has no counterpart: they give a row the same bits in any company"""
LARGEST_LOOK = 64  # rows of a pass whose choices of experts can be read


class Value(NamedTuple):
    """Result in a graph: a contiguous tensor of ggml, and its view as torch would have it, without memory."""

    base: int
    view: Tensor


class ChoiceNodes:
    """Part of `SpanGraph` that adds these nodes."""

    _ggml: Library
    _make: Operators
    _context: int
    _alive: list[Any]
    _views: dict[Any, int]
    _sizes: Mapping[str, int]
    _values: dict[Operation, Value]

    def __init__(self) -> None:
        self._faults: list[BaseException] = []
        self._chosen: list[Value] = []  # experts of the rows, by layer

    def _value(self, item: Operation) -> Value:
        raise NotImplementedError

    def _contiguous(self, value: Value) -> Value:
        raise NotImplementedError

    def _tensor(self, value: Value, view: Tensor | None = None) -> int:
        raise NotImplementedError

    def _node(self, tensor: int, view: Tensor) -> Value:
        raise NotImplementedError

    def _leaf(self, memory: Tensor) -> int:
        raise NotImplementedError

    def _by_torch(self, item: Operation) -> Value:
        """Return the result of an operation without counterpart: torch computes it within the graph, from what ggml computes.

        Raises CannotBeLowered if torch may give a row other bits in other company.
        """
        left, read, steps = [item], dict[Operation, Value](), dict[Operation, None]()
        while left:
            operation = left.pop()
            if operation.stage == CONSTANT:
                continue
            if operation in self._values or operation.stage != LATE:
                read[operation] = self._contiguous(self._value(operation))
            elif operation.name not in BY_TORCH or operation.function is None:
                raise CannotBeLowered(f"ggml does not compute {operation.name}")
            else:
                steps.pop(operation, None)
                steps[operation] = None
                left += operation.needs()
        order, sizes = [*reversed(steps)], self._sizes

        def compute(values: dict[Operation, Any]) -> Tensor:
            def value_of(part: Any) -> Any:
                if isinstance(part, Operation):
                    return part.value if part.stage == CONSTANT else values[part]
                return sizes[part.name]

            for step in order:
                assert step.function is not None
                result = step.function(*filled(step.inputs, value_of), **filled(step.options, value_of))
                values[step] = result if step.pick is None else result[step.pick]
            found: Tensor = values[item]
            return found

        view = compute({each: value.view for each, value in read.items()})
        if len(read) > MOST_READ or view.dtype not in (torch.float32, torch.int64) or view.dim() > 4:
            raise CannotBeLowered(f"ggml does not compute {item.name}")
        view = torch.empty(view.shape, dtype=view.dtype, device="meta")
        faults, values = self._faults, [*read.items()]

        def step(tensor: int, thread: int, _threads: int, _data: int) -> None:
            if thread:
                return
            try:
                result = _memory_of(tensor, view).zero_()
                given = {each: _memory_of(value.base, value.view).to(value.view.dtype) for each, value in values}
                result.copy_(compute(given))
            except BaseException as error:  # ggml's code has no way for it
                faults.append(error)

        function = TorchStep(step)
        self._alive.append(function)
        bases = (ctypes.c_void_p * len(values))(*(value.base for _, value in values))
        sizes_of_it = (*reversed(view.shape), 1, 1, 1, 1)[:4]
        number = F32 if view.is_floating_point() else I32
        tensor = self._make.custom(self._context, number, *sizes_of_it, bases, len(values), function, 1, None)
        return self._node(tensor, view)

    def _lower_softmax(self, operation: Operation) -> Value:
        x, dim = operation.inputs[:2]
        value = self._contiguous(self._value(x))
        if dim not in (-1, value.view.dim() - 1):
            raise CannotBeLowered("a softmax goes over another dimension than the last one")
        return self._node(self._make.softmax(self._context, self._tensor(value)), value.view)

    _lower__softmax = _lower_softmax

    def _lower_sum(self, operation: Operation) -> Value:
        x, dims, keeps = (*operation.inputs, None, False)[:3]
        value = self._contiguous(self._value(x))
        if dims is None or list(dims) not in ([-1], [value.view.dim() - 1]):
            raise CannotBeLowered("a sum goes over another dimension than the last one")
        view = torch.empty(*value.view.shape[:-1], 1, device="meta")
        made = self._node(self._make.sum_rows(self._context, self._tensor(value)), view)
        return made if keeps else Value(made.base, view.squeeze(-1))

    def _sorted(self, x: Operation) -> Value:
        """Return the numbers (..., E) of a row's elements, largest first. NaN counts as the largest number, as in torch."""
        key = "sorted", id(x)
        if key not in self._views:
            value = self._contiguous(self._value(x))
            copy = self._make.scale_bias(
                self._context, self._tensor(value), 1.0, 0.0
            )  # clamp writes over what it reads
            finite = self._make.clamp(
                self._context, copy, -LARGEST, LARGEST
            )  # ggml's sorting reads anywhere beside NaN
            self._views[key] = self._make.argsort(self._context, finite, DESCENDING)
        view = torch.empty(self._values[x].view.shape, dtype=torch.int64, device="meta")
        return self._node(self._views[key], view)

    def _lower_topk(self, operation: Operation) -> Value:
        x, count, dim, largest = (*operation.inputs, -1, True)[:4]
        if dim not in (-1, x.value.dim() - 1) or not operation.options.get("largest", largest):
            raise CannotBeLowered("it chooses the smallest ones, or not among a row's elements")
        numbers = self._sorted(x)
        chosen = Value(numbers.base, numbers.view[..., :count])
        return chosen if operation.pick else self._picked(self._value(x), chosen)

    def _lower_gather(self, operation: Operation) -> Value:
        x, dim, index = operation.inputs[:3]
        if dim not in (-1, x.value.dim() - 1) or index.stage != LATE:
            raise CannotBeLowered("it picks not among a row's elements")
        return self._picked(self._value(x), self._value(index))

    def _picked(self, x: Value, chosen: Value) -> Value:
        """Return the elements of each row of x (..., E) that are chosen (..., K)."""
        x = self._contiguous(x)
        table = self._tensor(x, x.view.view(-1, x.view.shape[-1], 1))
        numbers = self._tensor(chosen, chosen.view.flatten(0, -2))
        view = torch.empty(chosen.view.shape, device="meta")
        return self._node(self._make.get_rows(self._context, table, numbers), view)

    def _cuts(self, operation: Operation) -> int:
        """Return the most rows that one product with chosen experts takes."""
        stack = operation.inputs[2]
        return stack.rows_at_once() if isinstance(stack, GgmlStack) else MANY_ROWS

    def _lower_chosen_products(self, operation: Operation) -> Value:
        x, index, stack = operation.inputs
        value, chosen = self._contiguous(self._value(x)), self._value(index)
        if isinstance(stack, GgmlStack):
            count, outputs, inputs = stack.count, stack.outputs, stack.inputs
            weight = self._ggml.new_tensor_4d(self._context, stack.form.number, inputs, outputs, count, 1)
            numbers_at(weight + STRIDES_AT)[2] = stack.stride
            address_at(weight + DATA_AT).value = stack.address
            if stack.order is not None:
                address_at(weight + BUFFER_AT).value = stack.order.buffer
                address_at(weight + EXTRA_AT).value = stack.order.extra
            self._alive.append(stack)
        elif stack.stage == CONSTANT and stack.value.dtype in NUMBERS:
            count, outputs, inputs = stack.value.shape
            weight = self._leaf(stack.value.contiguous())
        else:
            raise CannotBeLowered("its experts' matrices are no weights")
        rows, among = chosen.view.shape
        x_RKI = value.view.view(rows, -1, inputs)
        self._note_chosen(index, chosen)
        result, step = 0, self._cuts(operation)
        for first in range(0, rows, step):
            part, numbers = x_RKI[first : first + step], chosen.view[first : first + step]
            tensor = self._ggml.multiply_chosen(
                self._context, weight, self._tensor(value, part), self._tensor(chosen, numbers)
            )
            result = self._make.concat(self._context, result, tensor, 2) if result else tensor
        return self._node(result, torch.empty(rows * among, outputs, device="meta"))

    def _note_chosen(self, index: Operation, chosen: Value) -> None:
        """Keep which experts few rows choose, for `chosen`."""
        if len(chosen.view) <= LARGEST_LOOK and ("chosen", index) not in self._views:
            self._make.keep(chosen.base)
            self._views["chosen", index] = chosen.base
            self._chosen.append(chosen)

    def chosen(self) -> list[Tensor]:
        """Return the experts (N, K) that the rows of the last pass chose, of each layer; empty for passes of many rows."""
        return [_memory_of(each.base, each.view) for each in self._chosen]

    def _lower_add_chosen(self, operation: Operation) -> Value:
        x, index, bias = operation.inputs
        value, chosen = self._contiguous(self._value(x)), self._value(index)
        rows, among = chosen.view.shape
        x_RKO = self._tensor(value, value.view.view(rows, among, -1))
        tensor = self._make.add_chosen(self._context, x_RKO, self._tensor(self._value(bias)), self._tensor(chosen))
        return self._node(tensor, value.view)


def _memory_of(tensor: int, view: Tensor) -> Tensor:
    """Return the memory of one of ggml's tensors as a tensor of torch, with the sizes and strides of a view: float32 or int32."""
    elements = 1 + sum((size - 1) * stride for size, stride in zip(view.shape, view.stride(), strict=True))
    kind: Any
    kind, dtype = (ctypes.c_float, torch.float32) if view.is_floating_point() else (ctypes.c_int32, torch.int32)
    memory = (kind * (view.storage_offset() + elements)).from_address(address_at(tensor + DATA_AT).value or 0)
    return torch.frombuffer(memory, dtype=dtype).as_strided(view.shape, view.stride(), view.storage_offset())
