"""Nodes of a graph of ggml for products, and for what depends on values: routers, and products with chosen experts.

A row's results do not depend on the other rows of a pass. ggml's products with chosen experts take at most as many rows at once as
leave each row's bits as they are (`GgmlStack.rows_at_once`).
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from swarmnode.compute.packing.ggml import (
    ACTIVATIONS,
    CALLED,
    DATA_AT,
    STRIDES_AT,
    Format,
    Library,
    address_at,
    numbers_at,
)
from swarmnode.compute.packing.ggml_graph import NUMBERS, CannotBeLowered, GraphTensors, GraphValue
from swarmnode.compute.packing.ggml_matrix import MANY_ROWS, PARTS, STEP, ActivationParts, GgmlMatrix, GgmlStack, put_at
from swarmnode.compute.serving.graphs.operations import CONSTANT, LATE, Operation

CHOICES = frozenset({"topk", "gather", "chosen_products", "add_chosen", "detach"})
"""Operations on whole numbers that ggml has"""
DESCENDING = 1  # ggml's order of sorting
LARGEST = 3.4028234e38  # of float32
LARGEST_LOOK = 64  # rows of a pass whose choices of experts can be read


class ChoiceNodes(GraphTensors):
    """Part of `SpanGraph` that adds these nodes."""

    _values: dict[Operation, GraphValue]

    def __init__(self, ggml: Library, nodes: int) -> None:
        super().__init__(ggml, nodes)
        self._splits: dict[tuple[str, int, int], ActivationParts] = {}  # by format, rows and inputs
        self._failed: list[Exception] = []  # what a function that ggml called raised
        self._chosen: list[GraphValue] = []  # experts of the rows, by layer

    def _value(self, item: Operation) -> GraphValue:
        raise NotImplementedError

    def _lower_product(self, operation: Operation) -> GraphValue:
        x, matrix = operation.inputs
        assert isinstance(matrix, GgmlMatrix)
        value = self._contiguous(self._value(x))
        rows = value.view.numel() // matrix.inputs
        count = PARTS * rows if matrix.is_exact else rows
        shape = (count, 1, matrix.inputs) if matrix.multiplies_rows_apart(count) else (count, matrix.inputs)
        weight = self._ggml.new_tensor(self._context, matrix.form.number, matrix.inputs, matrix.outputs)
        put_at(weight, matrix.address, matrix.order)
        self._alive.append(matrix)
        if not matrix.is_exact:
            tensor = self._ggml.multiply(self._context, weight, self._tensor(value, value.view.view(shape)))
            return self._node(tensor, torch.empty(rows, matrix.outputs, device="meta"))
        parts = self._parts(value, ACTIVATIONS[matrix.form.activations], rows, shape)
        made = GraphValue(self._ggml.multiply(self._context, weight, parts), torch.empty(0, device="meta"))
        parts_PRO = torch.empty(PARTS, rows, matrix.outputs, device="meta")
        *others, tensor = (self._tensor(made, part_RO) for part_RO in parts_PRO)
        for other in reversed(others):
            rest = self._make.scale_bias(self._context, tensor, 1 / STEP, 0.0)
            tensor = self._make.by_name["add"](self._context, other, rest)
        return self._node(tensor, torch.empty(rows, matrix.outputs, device="meta"))

    def _parts(self, value: GraphValue, form: Format, rows: int, shape: tuple[int, ...]) -> int:
        """Return the node with the parts of activations (R, I), as an exact product takes them. Python computes it."""
        key = "parts", value.base, form.name, shape
        if key in self._views:
            return self._views[key]
        inputs, failed = shape[-1], self._failed
        source = self._tensor(value, value.view.view(rows, inputs))
        if (form.name, rows, inputs) not in self._splits:
            self._splits[form.name, rows, inputs] = ActivationParts(self._ggml, form, rows, inputs)
        parts, view = self._splits[form.name, rows, inputs], torch.empty(rows, inputs, device="meta")

        @torch.inference_mode()
        def split(node: int, thread: int, *_: Any) -> None:
            if thread:  # ggml calls this in each thread
                return
            try:
                parts_PRB = parts.fill(memory_of(source, view))
                ctypes.memmove(address_at(node + DATA_AT).value or 0, parts_PRB.data_ptr(), parts_PRB.nbytes)
            except Exception as error:  # ggml takes none
                failed.append(error)

        sizes, called = (*reversed(shape), 1, 1, 1)[:4], CALLED(split)
        node: int = self._make.call(
            self._context, form.number, *sizes, (ctypes.c_void_p * 1)(source), 1, called, 1, None
        )
        self._alive.append(called)
        self._views[key] = node
        return node

    def _lower_linear(self, operation: Operation) -> GraphValue:
        x, weight, bias = (*operation.inputs, None)[:3]
        if weight.stage != CONSTANT or weight.value.dtype not in NUMBERS:
            raise CannotBeLowered("it multiplies with a matrix that is no weight")
        value, matrix_OI = self._contiguous(self._value(x)), weight.value.contiguous()
        outputs, inputs = matrix_OI.shape
        rows_R1I = value.view.view(-1, 1, inputs)  # each for itself: ggml adds in another order beside others
        tensor = self._ggml.multiply(self._context, self._leaf(matrix_OI), self._tensor(value, rows_R1I))
        if bias is not None:
            tensor = self._make.by_name["add"](self._context, tensor, self._tensor(self._value(bias)))
        return self._node(tensor, torch.empty(*value.view.shape[:-1], outputs, device="meta"))

    def _lower_softmax(self, operation: Operation) -> GraphValue:
        x, dim = operation.inputs[:2]
        value = self._contiguous(self._value(x))
        if dim not in (-1, value.view.dim() - 1):
            raise CannotBeLowered("a softmax goes over another dimension than the last one")
        return self._node(self._make.softmax(self._context, self._tensor(value)), value.view)

    _lower__softmax = _lower_softmax

    def _lower_sum(self, operation: Operation) -> GraphValue:
        x, dims, keeps = (*operation.inputs, None, False)[:3]
        value = self._contiguous(self._value(x))
        if dims is None or list(dims) not in ([-1], [value.view.dim() - 1]):
            raise CannotBeLowered("a sum goes over another dimension than the last one")
        view = torch.empty(*value.view.shape[:-1], 1, device="meta")
        made = self._node(self._make.sum_rows(self._context, self._tensor(value)), view)
        return made if keeps else GraphValue(made.base, view.squeeze(-1))

    def _sorted(self, x: Operation) -> GraphValue:
        """Return the numbers (..., E) of a row's elements, largest first. NaN counts as the largest number, as in torch."""
        key = "sorted", id(x)
        if key not in self._views:
            value = self._contiguous(self._value(x))
            # ggml's sorting reads anywhere beside NaN. Clamping removes NaN, and writes over its input.
            copy = self._make.scale_bias(self._context, self._tensor(value), 1.0, 0.0)
            finite = self._make.clamp(self._context, copy, -LARGEST, LARGEST)
            self._views[key] = self._make.argsort(self._context, finite, DESCENDING)
        view = torch.empty(self._values[x].view.shape, dtype=torch.int64, device="meta")
        return self._node(self._views[key], view)

    def _lower_topk(self, operation: Operation) -> GraphValue:
        x, count, dim, largest = (*operation.inputs, -1, True)[:4]
        if dim not in (-1, x.value.dim() - 1) or not operation.options.get("largest", largest):
            raise CannotBeLowered("it chooses the smallest ones, or not among a row's elements")
        numbers = self._sorted(x)
        chosen = GraphValue(numbers.base, numbers.view[..., :count])
        return chosen if operation.pick else self._picked(self._value(x), chosen)

    def _lower_gather(self, operation: Operation) -> GraphValue:
        x, dim, index = operation.inputs[:3]
        if dim not in (-1, x.value.dim() - 1) or index.stage != LATE:
            raise CannotBeLowered("it picks not among a row's elements")
        return self._picked(self._value(x), self._value(index))

    def _picked(self, x: GraphValue, chosen: GraphValue) -> GraphValue:
        """Return the elements of each row of x (..., E) that are chosen (..., K)."""
        x = self._contiguous(x)
        table = self._tensor(x, x.view.view(-1, x.view.shape[-1], 1))
        numbers = self._tensor(chosen, chosen.view.flatten(0, -2))
        view = torch.empty(chosen.view.shape, device="meta")
        return self._node(self._make.get_rows(self._context, table, numbers), view)

    def _lower_chosen_products(self, operation: Operation) -> GraphValue:
        x, index, stack = operation.inputs
        value, chosen = self._contiguous(self._value(x)), self._value(index)
        are_many = len(chosen.view) > LARGEST_LOOK
        if are_many and isinstance(stack, GgmlStack) and stack.is_faster_by_expert(chosen.view.numel()):
            raise CannotBeLowered("torch multiplies expert by expert")
        if isinstance(stack, GgmlStack):
            count, outputs, inputs = stack.count, stack.outputs, stack.inputs
            weight = self._ggml.new_tensor_4d(self._context, stack.form.number, inputs, outputs, count, 1)
            numbers_at(weight + STRIDES_AT)[2] = stack.stride
            put_at(weight, stack.address, stack.order)
            self._alive.append(stack)
        elif stack.stage == CONSTANT and stack.value.dtype in NUMBERS:
            count, outputs, inputs = stack.value.shape
            weight = self._leaf(stack.value.contiguous())
        else:
            raise CannotBeLowered("its experts' matrices are no weights")
        rows, among = chosen.view.shape
        x_RKI = value.view.view(rows, -1, inputs)
        self._note_chosen(index, chosen)
        result, step = 0, stack.rows_at_once() if isinstance(stack, GgmlStack) else MANY_ROWS
        for first in range(0, rows, step):
            part, numbers = x_RKI[first : first + step], chosen.view[first : first + step]
            tensor = self._ggml.multiply_chosen(
                self._context, weight, self._tensor(value, part), self._tensor(chosen, numbers)
            )
            result = self._make.concat(self._context, result, tensor, 2) if result else tensor
        return self._node(result, torch.empty(rows, among, outputs, device="meta"))

    def _note_chosen(self, index: Operation, chosen: GraphValue) -> None:
        """Keep which experts few rows choose, for `chosen`."""
        if len(chosen.view) <= LARGEST_LOOK and ("chosen", index) not in self._views:
            self._make.keep(chosen.base)
            self._views["chosen", index] = chosen.base
            self._chosen.append(chosen)

    def _note_on_disk(self, step: Operation) -> None:
        """Keep which experts few rows choose, for `chosen`, if torch computes them because some lie on the disk."""
        if step.name == "experts_on_disk" and len((chosen := self._values[step.inputs[1]]).view) <= LARGEST_LOOK:
            self._chosen.append(chosen)

    def chosen(self) -> list[Tensor]:
        """Return the experts (N, K) that the rows of the last pass chose, of each layer; empty for passes of many rows."""
        return [memory_of(each.base, each.view) for each in self._chosen]

    def _lower_add_chosen(self, operation: Operation) -> GraphValue:
        x, index, bias = operation.inputs
        value, chosen = self._contiguous(self._value(x)), self._value(index)
        rows, among = chosen.view.shape
        x_RKO = self._tensor(value, value.view.view(rows, among, -1))
        tensor = self._make.add_chosen(self._context, x_RKO, self._tensor(self._value(bias)), self._tensor(chosen))
        return self._node(tensor, value.view)


def memory_of(tensor: int, view: Tensor) -> Tensor:
    """Return the memory of one of ggml's tensors as a tensor of torch, with the sizes and strides of a view: float32 or int32."""
    elements = 1 + sum((size - 1) * stride for size, stride in zip(view.shape, view.stride(), strict=True))
    kind, dtype = (ctypes.c_float, torch.float32) if view.is_floating_point() else (ctypes.c_int32, torch.int32)
    count = int(view.storage_offset()) + int(elements)
    memory = (kind * count).from_address(address_at(tensor + DATA_AT).value or 0)
    return torch.frombuffer(memory, dtype=dtype).as_strided(view.shape, view.stride(), view.storage_offset())
