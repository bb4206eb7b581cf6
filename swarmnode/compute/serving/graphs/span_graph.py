"""Passes of packed models on the CPU as one graph of ggml for a span: one call for all layers.

The graph is made of what the family's own forward computes (`span_trace.py`), for a number of rows and of positions. Norms, rotary
embeddings and gated activations become one node each. Queries of all rows and positions are computed alike, each by itself: so a
position has the same bits alone, in any company, in a prompt and in a replay, with any number of threads.

Keys and values are written into the buffers of the pass's cohort, at columns that are inputs of the graph, and attention reads
these buffers under a mask. So a graph serves all cohorts of its number of rows, and all of their steps.
"""

from __future__ import annotations

import itertools
import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from swarmnode.compute.packing.ggml import (
    BINARY,
    DATA_AT,
    SIZES_AT,
    STRIDES_AT,
    UNARY,
    address_at,
    aligned,
    library,
    numbers_at,
)
from swarmnode.compute.packing.ggml_graph import F16, F32, NEOX, NUMBERS, CannotBeLowered, GraphValue
from swarmnode.compute.packing.ggml_matrix import threads
from swarmnode.compute.serving.cohort import Cohort
from swarmnode.compute.serving.graphs.graph_choices import CHOICES, ChoiceNodes
from swarmnode.compute.serving.graphs.operations import (
    CONSTANT,
    LATE,
    OpenSize,
    Operation,
    SpanTrace,
    activation,
    filled,
    reachable,
    sizes_of,
)
from swarmnode.compute.serving.graphs.torch_steps import TorchStep

COLUMN, HEAD, ROW, NOWHERE = range(4)  # strides of a cohort's buffer
SIDE_BY_SIDE = 32  # queries: ggml computes more of them in blocks, with other bits
QUERIES, COLUMNS = 128, 64  # queries of a prompt that look back over equally many columns, a multiple of COLUMNS


def _memory(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return memory of a value that a graph and something else use: in float32, or in whole numbers of 32 bits."""
    memory = aligned(4 * math.prod(shape)).view(torch.float32 if dtype.is_floating_point else torch.int32)
    return memory.view(shape)


class _Follower(NamedTuple):
    """Tensor of ggml in the buffers of a cohort: the keys (`which` 0) or values of a layer, from a row on. `steps` are the strides
    of its dimensions besides the first. Its columns are those that the new positions up to `end` see; all if that is None."""

    tensor: int
    layer: int
    which: int
    steps: tuple[int, int, int]
    row: int
    end: int | None = None


class SpanGraph(ChoiceNodes):
    """Graph of a span for `rows` rows and `count` positions; the last `kept` ones of each row have logits.

    What ggml has no counterpart for splits it: torch computes that between two graphs.

    Raises CannotBeLowered if torch cannot compute such an operation position by position.
    """

    def __init__(self, trace: SpanTrace, rows: int, count: int, kept: int, dtype: torch.dtype) -> None:
        ggml = library()
        assert ggml is not None
        parts = rows * -(-count // QUERIES) if count >= SIDE_BY_SIDE else 1  # of attention
        nodes = 6 * len(trace.operations) + 8 * parts * len(trace.windows) + 128
        super().__init__(ggml, nodes)
        self._trace, self._dtype = trace, dtype
        self.rows, self.count = rows, count
        self._sizes = sizes_of(rows, count, kept)
        self._values: dict[Operation, GraphValue] = {}
        self._followers: list[_Follower] = []
        self._shapes: dict[int, list[tuple[int, int]]] = {}  # heads and width of a layer's keys, and of its values
        # Columns that are written, and masks of parts of the queries, by the window of attention.
        self._masks: dict[int | None, tuple[dict[tuple[int, int, int], int], Tensor]] = {}
        self._early: list[tuple[Operation, Tensor]] = []
        self._columns: dict[int | None, tuple[int, Tensor]] = {}
        self._seen: dict[tuple[int | None, int], int] = {}  # columns that positions up to a place see, as they are set
        self._positions: tuple[int, Tensor] | None = None
        self._bound: Callable[[], Cohort | None] = lambda: None
        self._allocator: int | None = None
        self._graph = 0
        self._graphs: list[int] = []
        self._steps: list[TorchStep] = []
        self._shared: dict[Operation, Tensor] = {}  # values that a graph and something else use
        left = [operation for operation in trace.operations if operation.stage == LATE]
        while left or not self._graphs:
            self._graph = self._new_graph(nodes)
            self._graphs.append(self._graph)
            later: dict[Operation, bool] = {}  # what waits for torch; whether torch computes it next
            for operation in left:
                if ggml.used_bytes(self._context) > self._size - (32 + 6 * parts) * ggml.tensor_overhead():
                    raise CannotBeLowered("it needs more nodes than were expected")  # ggml would end the process
                if later and any(each in later for each in operation.needs()):
                    later[operation] = False
                elif not self._lower(operation):
                    later[operation] = True
                elif operation in trace.between and dtype != torch.float32:
                    self._values[operation] = self._rounded(self._values[operation])
            left = self._add_step(later)
        self._result: GraphValue | None = None
        if trace.result is not None:
            result = self._contiguous(self._value(trace.result))
            if self._views.get(("made", result.base)) is None:  # torch's, or an input's
                result = self._node(self._make.cont(self._context, result.base), result.view)
            self._result, self._out = result, result.base
            self._out_at = address_at(self._out + DATA_AT)
            self._out_memory = aligned(4 * self._result.view.numel())
            self._out_at.value = self._out_memory.data_ptr()
            ggml.expand(self._graph, self._out)
        self._allocator = self._make.new_allocator(self._make.cpu_memory())
        for allocate in (self._make.reserve, self._make.allocate):  # all graphs use the same memory, one after another
            if not all(allocate(self._allocator, graph) for graph in self._graphs):
                raise CannotBeLowered("there is no memory for its values")
        self.nbytes = self._size + self._make.allocated_bytes(self._allocator, 0)
        read = reachable([operation for operation, _ in self._early])
        self._reads_mask = trace.inputs["mask"] in read
        self._views.clear()
        self._values.clear()

    def __del__(self) -> None:
        if getattr(self, "_allocator", None):
            self._make.free_allocator(self._allocator)
        super().__del__()

    # -- building

    def _add_step(self, later: Mapping[Operation, bool]) -> list[Operation]:
        """End a graph with what torch computes behind it, and return the remaining operations.

        Values of the graph that are needed afterwards get memory of their own."""
        if not later:
            return []
        step = [operation for operation, is_next in later.items() if is_next]
        step = [operation for operation in step if operation.is_whole][:1] or step
        left = [operation for operation in later if operation not in step]
        needed = {each for operation in later for each in operation.needs()} | {self._trace.result}
        for operation, value in list(self._values.items()):
            if operation.stage != LATE or operation in self._shared or operation.name == "write":
                continue
            if operation in needed:
                own = self._node(self._make.cont(self._context, self._tensor(value)), value.view).base
                memory = _memory(value.view.shape, operation.value.dtype)
                address_at(own + DATA_AT).value = memory.data_ptr()
                self._ggml.expand(self._graph, own)
                self._share(operation, memory)
            else:
                del self._values[operation]
        self._note_on_disk(step[0])
        read = {each for operation in left for each in operation.needs()} | {self._trace.result}
        outputs = [operation for operation in step if operation in read]
        self._steps.append(TorchStep(self._trace, step, outputs, self._sizes))
        for operation in outputs:
            if operation.value.dtype is not torch.bool:
                if any(isinstance(size, OpenSize) and size.name not in self._sizes for size in operation.shape):
                    raise CannotBeLowered(f"the size of {operation!r} is not known before it is computed")
                shape = filled(operation.shape, lambda size: self._sizes[size.name])
                self._share(operation, _memory(shape, operation.value.dtype))
        return left

    def _share(self, operation: Operation, memory: Tensor) -> None:
        self._shared[operation] = memory
        dtype = torch.float32 if memory.is_floating_point() else torch.int64
        self._values[operation] = GraphValue(self._leaf(memory), torch.empty(memory.shape, dtype=dtype, device="meta"))

    def _value(self, item: Operation) -> GraphValue:
        """Return an operation's result in the graph: an input or a constant that is needed for the first time is added to it."""
        if item not in self._values:
            if item.stage == LATE:
                raise CannotBeLowered(f"ggml does not compute {item.name}")
            if item.stage == CONSTANT:
                value = item.value.float().contiguous()
                tensor = self._leaf(value)
            else:
                shape = filled(self._shape_of(item), lambda size: self._sizes[size.name])
                value = aligned(4 * math.prod(shape)).view(torch.float32).view(shape)
                tensor = self._leaf(value)
                self._early.append((item, value))
            self._values[item] = GraphValue(tensor, torch.empty(value.shape, device="meta"))
        return self._values[item]

    def _shape_of(self, item: Operation) -> tuple[int, ...]:
        """Return the shape of an early operation's result: computed once with zeros."""
        rows, count = self.rows, self.count
        x_of = self._trace.inputs["x"].value
        zeros_RT = torch.zeros(rows, count, dtype=torch.int64)
        x = torch.zeros(rows, count, x_of.shape[-1]) if x_of.is_floating_point() else zeros_RT
        values = {"x": x, "positions": zeros_RT, "mask": torch.ones(rows, 1, dtype=torch.int64)}
        known = {self._trace.inputs[name]: value for name, value in values.items()}
        return tuple(self._trace.computed([item], known, self._sizes)[0].shape)

    def _lower(self, operation: Operation) -> bool:
        """Add an operation to the graph. Returns False if ggml has no counterpart."""
        special = getattr(self, f"_lower_{operation.name}", None)
        needs = operation.needs()
        numbers = [each for each in needs if isinstance(each.value, Tensor) and not each.value.is_floating_point()]
        has_numbers = numbers or (isinstance(operation.value, Tensor) and not operation.value.is_floating_point())
        is_known = operation.name in CHOICES or operation.is_view
        if operation.is_whole or (has_numbers and not (is_known and all(each.stage == LATE for each in numbers))):
            return False
        try:
            if special is not None:
                self._values[operation] = special(operation)
            elif operation.is_view or operation.name in ("view", "reshape", "_unsafe_view", "flatten", "unflatten"):
                self._values[operation] = self._lower_view(operation)
            elif operation.name in UNARY and operation.function is not None:
                self._values[operation] = self._unary(UNARY[operation.name], operation.inputs[0])
            elif operation.name in BINARY:
                self._values[operation] = self._binary(operation)
            else:
                return False
        except CannotBeLowered:
            if operation.function is None:
                raise
            return False
        return True

    def _rounded(self, value: GraphValue) -> GraphValue:
        """Return a value in float32 that is rounded to the model's number format."""
        tensor = self._make.cast(self._context, self._contiguous(value).base, NUMBERS[self._dtype])
        return self._node(self._make.cast(self._context, tensor, F32), torch.empty(value.view.shape, device="meta"))

    def _lower_view(self, operation: Operation) -> GraphValue:
        inputs = operation.inputs[1:]
        value = self._value(operation.inputs[0])
        rest = filled(inputs, lambda size: self._sizes[size.name])
        options = filled(operation.options, lambda size: self._sizes[size.name])
        assert operation.function is not None
        for is_contiguous in (False, True):
            value = self._contiguous(value) if is_contiguous else value
            try:
                found = operation.function(value.view, *rest, **options)
            except RuntimeError:
                continue
            view = found if operation.pick is None else found[operation.pick]
            if view.dim() and view.shape[-1] > 1 and view.stride(-1) != 1:
                continue  # ggml's rows are dense
            if view.untyped_storage()._cdata == value.view.untyped_storage()._cdata:
                return GraphValue(value.base, view)
        raise CannotBeLowered(f"ggml does not compute {operation.name}")

    def _unary(self, name: str, item: Operation) -> GraphValue:
        tensor, view = self._in_rows(self._value(item))
        return self._node(self._make.by_name[name](self._context, tensor), view)

    def _lower_pow(self, operation: Operation) -> GraphValue:
        x, exponent = operation.inputs
        if exponent not in (2, 3):
            raise CannotBeLowered(f"ggml does not compute a power of {exponent}")
        tensor, view = self._in_rows(self._value(x))
        power = tensor
        for _ in range(int(exponent) - 1):
            power = self._make.by_name["mul"](self._context, power, tensor)
        return self._node(power, view)

    def _lower_gelu(self, operation: Operation) -> GraphValue:
        if activation(operation) == "gelu_erf" or not self._trace.is_exact:
            return self._unary(activation(operation), operation.inputs[0])
        (x, view), context, make = (
            self._in_rows(self._contiguous(self._value(operation.inputs[0]))),
            self._context,
            self._make,
        )
        factor = math.sqrt(2 / math.pi)  # x / 2 (1 + tanh(factor (x + 0.044715 x^3)))
        inner = make.scale_bias(context, make.by_name["mul"](context, x, x), 0.044715 * factor, factor)
        turned = make.by_name["tanh"](context, make.by_name["mul"](context, inner, x))
        return self._node(make.by_name["mul"](context, make.scale_bias(context, turned, 0.5, 0.5), x), view)

    def _lower_rms_norm(self, operation: Operation) -> GraphValue:
        tensor, view = self._in_rows(self._value(operation.inputs[0]))
        return self._node(self._make.rms_norm(self._context, tensor, operation.inputs[1]), view)

    def _lower_layer_norm(self, operation: Operation) -> GraphValue:
        given = operation.inputs
        x, shape, weight, bias, epsilon = (*given, *(None, None, None, None, 1e-5)[len(given) :])[:5]
        if len(shape) != 1:
            raise CannotBeLowered("a norm goes over several dimensions")
        tensor, view = self._in_rows(self._value(x))
        tensor = self._make.norm(self._context, tensor, epsilon)
        for name, part in (("mul", weight), ("add", bias)):
            if part is not None:
                tensor = self._make.by_name[name](self._context, tensor, self._tensor(self._value(part)))
        return self._node(tensor, view)

    def _lower_gated(self, operation: Operation) -> GraphValue:
        gate, up, name = operation.inputs
        one, other = self._value(gate), self._value(up)
        if one.view.stride() != other.view.stride():
            one, other = self._contiguous(one), self._contiguous(other)
        (tensor, view), (up_tensor, _) = self._in_rows(one), self._in_rows(other)
        return self._node(self._make.gated[name](self._context, tensor, up_tensor), view)

    def _binary(self, operation: Operation) -> GraphValue:
        name = BINARY[operation.name]
        x, y = operation.inputs[:2]
        if operation.options.get("alpha", (*operation.inputs, 1)[2] if len(operation.inputs) > 2 else 1) != 1:
            raise CannotBeLowered("it adds a multiple")
        if not isinstance(x, Operation) or (x.stage == CONSTANT and x.value.numel() == 1):
            if name in ("sub", "div"):
                raise CannotBeLowered("it subtracts from a number, or divides one")
            x, y = y, x
        if isinstance(y, Operation) and y.stage == CONSTANT and y.value.numel() == 1:
            y = float(y.value)
        if not isinstance(y, Operation):
            factor, bias = {"add": (1.0, y), "sub": (1.0, -y), "mul": (y, 0.0), "div": (1 / y, 0.0)}[name]
            value = self._value(x)
            reach = 1 + sum((n - 1) * by for n, by in zip(value.view.shape, value.view.stride(), strict=True))
            # ggml ends the process if rows lie apart.
            tensor, view = self._in_rows(value if reach == value.view.numel() else self._contiguous(value))
            return self._node(self._make.scale_bias(self._context, tensor, factor, bias), view)
        one, other = self._value(x), self._value(y)
        shape = (
            one.view.shape
            if one.view.shape == other.view.shape
            else torch.broadcast_shapes(one.view.shape, other.view.shape)
        )
        if shape != one.view.shape:
            if name in ("sub", "div") or shape != other.view.shape:
                raise CannotBeLowered("both sides of an operation are repeated")
            one, other = other, one
        function = self._make.by_name[name]
        (tensor, view), dims = self._in_rows(one), one.view.dim()
        if one.view.shape == other.view.shape and one.view.stride() == other.view.stride():
            return self._node(function(self._context, tensor, self._in_rows(other)[0]), view)
        if other.view.numel() == other.view.shape[-1]:  # one row for all
            return self._node(function(self._context, tensor, self._tensor(other, other.view.reshape(-1))), view)
        wide = other.view[(None,) * (dims - other.view.dim())]
        tensor = function(self._context, self._tensor(one), self._tensor(other, wide))
        return self._node(tensor, torch.empty(shape, device="meta"))

    def _lower_cat(self, operation: Operation) -> GraphValue:
        parts, dim = (*operation.inputs, 0)[:2]
        values = [self._value(part) for part in parts]
        dims = values[0].view.dim()
        dim %= dims
        tensor = self._tensor(values[0])
        for value in values[1:]:
            tensor = self._make.concat(self._context, tensor, self._tensor(value), dims - 1 - dim)
        shape = [*values[0].view.shape]
        shape[dim] = sum(value.view.shape[dim] for value in values)
        return self._node(tensor, torch.empty(shape, device="meta"))

    def _lower_rope(self, operation: Operation) -> GraphValue:
        x, rope = operation.inputs
        value = self._value(x)
        rows, heads, count, width = value.view.shape
        x_BTHD = value.view.transpose(1, 2)
        try:
            flat = x_BTHD.view(rows * count, heads, width)
        except RuntimeError:
            value = self._contiguous(GraphValue(value.base, x_BTHD))
            flat = value.view.view(rows * count, heads, width)
        if self._positions is None:
            positions_N = torch.zeros(rows * count, dtype=torch.int32)
            self._positions = self._leaf(positions_N), positions_N
        key = "rope", id(rope)
        if key not in self._views:
            self._views[key] = self._leaf((1 / rope.inverse).float().contiguous())
        tensor = self._make.rope(
            self._context,
            self._tensor(value, flat),
            self._positions[0],
            self._views[key],
            *(width, NEOX, 0),
            *(1.0, 1.0, 0.0, rope.factor, 32.0, 1.0),
        )
        return self._node(tensor, torch.empty(rows, count, heads, width, device="meta").transpose(1, 2))

    def _lower_detach(self, operation: Operation) -> GraphValue:
        return self._value(operation.inputs[0])

    def _lower_write(self, operation: Operation) -> GraphValue:
        keys, values, layer = operation.inputs
        window = self._trace.windows.get(layer)
        if window not in self._columns:
            columns_T = torch.zeros(self.count, dtype=torch.int64)
            self._columns[window] = self._leaf(columns_T), columns_T
        for which, part in enumerate((keys, values)):
            value = self._value(part)
            rows, heads, count, width = value.view.shape
            self._shapes.setdefault(layer, []).append((heads, width))
            buffer = self._ggml.new_tensor_4d(self._context, NUMBERS[self._dtype], width, count, heads, rows)
            address_at(buffer + DATA_AT).value = self._placeholder()
            columns = self._columns[window][0]
            tensor = self._make.set_rows(self._context, buffer, self._tensor(value), columns)
            self._ggml.expand(self._graph, tensor)
            self._followers += [_Follower(each, layer, which, (COLUMN, HEAD, ROW), 0) for each in (buffer, tensor)]
        return GraphValue(0, torch.empty(0, device="meta"))

    def _placeholder(self) -> int:
        """Return an address for tensors that have none yet, so that ggml gives them no memory."""
        if ("placeholder",) not in self._views:
            memory = aligned(64)
            self._alive.append(memory)
            self._views["placeholder",] = memory.data_ptr()
        return self._views["placeholder",]

    def _lower_attention(self, operation: Operation) -> GraphValue:
        """Add attention in parts. Each query is a row of its own there. A part has queries q (X, heads, Y, width), the number of
        its keys' rows and heads with the strides between them, a row of the cohort, and its mask."""
        query, write, *sinks = operation.inputs
        layer = write.inputs[2]
        value = self._value(query)
        rows, heads, count, width = value.view.shape
        (groups, _), (_, value_width) = self._shapes[layer]
        parts: list[tuple[Tensor, tuple[int, int], tuple[int, int, int], int, tuple[int, int, int]]] = []
        if rows > 1 and 1 < count < SIDE_BY_SIDE:  # few queries of each row, side by side
            parts.append((value.view, (rows, groups), (COLUMN, HEAD, ROW), 0, (rows, count, 0)))
        else:
            value = self._contiguous(GraphValue(value.base, value.view.transpose(1, 2)))
            q_BTHD = value.view.view(rows, count, heads, width)
            if count == rows == 1:
                # A lone query's columns would be shared out among threads: so its heads are rows, or it comes twice.
                apart, each = (groups, heads // groups) if groups > 1 else (heads, 1)
                step = HEAD if groups > 1 else NOWHERE
                if sinks or heads == 1:  # sinks go by heads
                    apart, each, step = 2, heads, NOWHERE
                    twice = self._make.concat(self._context, value.base, value.base, 1)
                    value = self._node(twice, torch.empty(2, heads, width, device="meta"))
                q = value.view.view(apart, each, 1, width)
                parts.append((q, (apart, groups if sinks else 1), (COLUMN, HEAD, step), 0, (1, 1, 0)))
            elif count == 1:
                parts.append((q_BTHD.transpose(1, 2), (rows, groups), (COLUMN, HEAD, ROW), 0, (rows, 1, 0)))
            else:
                for row, first in itertools.product(range(rows), range(0, count, QUERIES)):
                    q = q_BTHD[row, first : first + QUERIES, :, None]
                    place = row * count + first
                    parts.append((q, (len(q), groups), (COLUMN, HEAD, NOWHERE), row, (len(q), 1, place)))
        result = 0
        for q, (batch, among), steps, row, of_mask in parts:
            k, v = (
                self._ggml.new_tensor_4d(self._context, NUMBERS[self._dtype], each, 1, among, batch)
                for each in (width, value_width)
            )
            place = of_mask[2] - row * count
            end = place + len(q) if len(parts) > 1 else count
            for which, tensor in enumerate((k, v)):
                address_at(tensor + DATA_AT).value = self._placeholder()
                self._followers.append(_Follower(tensor, layer, which, steps, row, end))
            tensor = self._ggml.attend(
                self._context,
                self._tensor(value, q),
                *(k, v, self._mask(self._trace.windows[layer], of_mask)),
                *(operation.options["scale"], 0.0, operation.options["softcap"]),
            )
            if sinks:
                if self._ggml.add_sinks is None:
                    raise CannotBeLowered("this build of ggml has no attention with sinks")
                self._ggml.add_sinks(tensor, self._value(sinks[0]).base)
            if len(parts) > 1 and width == value_width:  # into a copy of the queries
                result = result or self._make.cont(self._context, value.base)
                by_query = 4 * heads * width
                strides = 4 * width, by_query, by_query, (row * count + place) * by_query
                result = self._make.set_inplace(self._context, result, tensor, *strides)
            else:
                result = self._make.concat(self._context, result, tensor, 3) if result else tensor
        return self._node(result, torch.empty(rows, count, heads, value_width, device="meta"))

    def _mask(self, window: int | None, part: tuple[int, int, int]) -> int:
        """Return the mask of attention with this window for a part of the queries: (rows, queries side by side, first one)."""
        masks = self._masks.setdefault(window, ({}, torch.empty(0)))[0]
        if part not in masks:
            masks[part] = self._ggml.new_tensor_4d(self._context, F16, 1, part[1], 1, part[0])
            address_at(masks[part] + DATA_AT).value = self._placeholder()
        return masks[part]

    # -- running

    def run(
        self, cohort: Cohort, x: Tensor, most_threads: int | None = None, *, is_checked: bool = False
    ) -> Tensor | None:
        """Compute a pass of the cohort, which writes behind its end. Returns the result, None if there is none.

        `is_checked` looks whether what torch computes of it is the same for all positions at once: else it raises CannotBeLowered.
        Raises RuntimeError if ggml fails.
        """
        if self._bound() is not cohort:
            self._bind(cohort)
        positions_RT = cohort.position_ids(self.count)
        if self._positions is not None:
            self._positions[1].copy_(positions_RT.reshape(-1))
        inputs = self._trace.inputs
        values = {inputs["x"]: x, inputs["positions"]: positions_RT}
        if self._reads_mask:
            mask_RC = cohort.attention_mask(self.count)
            ones = torch.ones(self.rows, cohort.end + self.count, dtype=torch.int64) if mask_RC is None else mask_RC
            values[inputs["mask"]] = ones
        for (window, end), seen in self._seen.items():
            columns = -(-(cohort.end + end - cohort.first_kept(self._layer_of(window))) // COLUMNS) * COLUMNS
            if columns != seen:
                self._see(cohort, window, end, columns)
        early = self._trace.computed([operation for operation, _ in self._early], values, self._sizes)
        for (_, memory), value in zip(self._early, early, strict=True):
            memory.copy_(value)
        queries_T1 = torch.arange(cohort.end, cohort.end + self.count)[:, None]
        for window, (_, columns_T) in self._columns.items():
            columns_T.copy_(queries_T1[:, 0] - cohort.first_kept(self._layer_of(window)))
        for window, (_, mask_NC) in self._masks.items():
            first = cohort.first_kept(self._layer_of(window))
            columns_C = torch.arange(first, first + mask_NC.shape[1])
            seen_TC = columns_C <= queries_T1
            if window is not None:
                seen_TC &= columns_C > queries_T1 - window
            mask_RTC = mask_NC.view(self.rows, self.count, -1)
            if any(cohort.first_columns):
                seen_RTC = seen_TC & (columns_C >= torch.tensor(cohort.first_columns)[:, None, None])
            else:
                seen_RTC = seen_TC[None]
            mask_RTC.copy_(torch.where(seen_RTC, 0.0, -math.inf))
        result = None
        if self._result is not None:
            result = torch.empty(self._result.view.shape)
            self._out_at.value = result.data_ptr()
        cohort.dirty_end = max(cohort.dirty_end, cohort.end + self.count)
        values.update(self._shared)
        for graph, step in itertools.zip_longest(self._graphs, self._steps):
            threads().compute_graph(graph, most_threads)
            if self._failed:
                raise RuntimeError("activations could not be split for exact products") from self._failed.pop()
            if step is not None:
                step.run(cohort, values, is_checked=is_checked)
                for operation in step.outputs:
                    if operation in self._shared:
                        values[operation] = self._shared[operation].copy_(values[operation])
        return result if result is None else result.to(self._dtype)

    def _see(self, cohort: Cohort, window: int | None, end: int, columns: int) -> None:
        """Let attention of the positions up to `end` read the first `columns` columns of the buffers, or all if there are fewer."""
        self._seen[window, end] = columns
        for follower in self._followers:
            if follower.end == end and self._trace.windows.get(follower.layer) == window:
                most = cohort.columns_in(follower.layer)
                numbers_at(follower.tensor + SIZES_AT)[1] = min(columns, most)

    def _layer_of(self, window: int | None) -> int:
        """Return a layer whose attention has this window."""
        return next(layer for layer in self._shapes if self._trace.windows.get(layer) == window)

    def _bind(self, cohort: Cohort) -> None:
        """Let the graph use the buffers of a cohort, which are made if its layers have none yet."""
        for layer, shapes in self._shapes.items():
            if layer not in cohort.buffers:
                keys, values = (torch.empty(1, heads, 1, width, dtype=self._dtype) for heads, width in shapes)
                cohort.buffers[layer] = cohort.store.allocate(keys, values, self.rows, cohort.columns_in(layer))
        for tensor, layer, which, steps, row, end in self._followers:
            if end is not None:
                self._seen[self._trace.windows.get(layer), end] = 0
            buffer = cohort.buffers[layer][which]
            size, (by_row, by_head, by_column, _) = buffer.element_size(), buffer.stride()
            strides = size * by_column, size * by_head, size * by_row, 0
            address_at(tensor + DATA_AT).value = buffer.data_ptr() + row * strides[ROW]
            numbers_at(tensor + SIZES_AT)[1] = buffer.shape[2]
            numbers_at(tensor + STRIDES_AT)[1:4] = [strides[step] for step in steps]
        for window, (masks, _) in self._masks.items():
            columns = cohort.columns_in(self._layer_of(window))
            mask_NC = torch.empty(self.rows * self.count, columns, dtype=torch.float16)
            self._masks[window] = masks, mask_NC
            for (_, beside, first), tensor in masks.items():
                address_at(tensor + DATA_AT).value = mask_NC[first].data_ptr()
                numbers_at(tensor + SIZES_AT)[0] = columns
                by_query = 2 * columns
                numbers_at(tensor + STRIDES_AT)[1:4] = [by_query, by_query * beside, by_query * beside]
        self._bound = weakref.ref(cohort)
