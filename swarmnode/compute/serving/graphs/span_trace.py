"""Operations of a family's own forward for a span, as a list whose numbers of rows and positions are left open.

torch tells of each operator, and packed products, look-ups, caches and attention tell of themselves. The pass is recorded with two
sets of sizes. An integer that is the same in both is a constant; another one must be one of `sizes_of` in both, and gets its name.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from swarmnode.compute.model.attention import attending_by_position
from swarmnode.compute.model.span import ModelSpan
from swarmnode.compute.packing.ggml_graph import CannotBeLowered
from swarmnode.compute.packing.ggml_matrix import GgmlMatrix, GgmlStack, threads
from swarmnode.compute.serving.cohort import AttentionCache, Windows
from swarmnode.compute.serving.graphs.operations import (
    CONSTANT,
    EARLY,
    INPUT,
    LATE,
    UNKNOWN,
    OpenSize,
    Operation,
    SpanTrace,
    fuse,
    narrow,
    parts_of,
    sizes_of,
)

COPIES = frozenset(
    {"to", "_to_copy", "contiguous", "clone", "alias", "detach", "type_as", "float", "dropout", "lift_fresh"}
)
"""Operators that give their first argument's values: the graph computes in float32, and writes over nothing"""
REFUSED = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.nondeterministic_seeded)
INPLACE = frozenset(
    {"add_", "mul_", "sub_", "div_", "clamp_", "triu_", "tril_", "fill_", "neg_", "masked_fill_", "scatter_"}
)
LONG_PAST = 8200  # columns before the second recorded pass: more than the chunks of attention in chunks


def _multiply_chosen(x: Tensor, index_NK: Tensor, stack: GgmlStack) -> Tensor:
    return stack.multiply(x, index_NK)


class TracedPast(AttentionCache):
    """Cache of a recorded pass: `past` columns before it, without buffers."""

    def __init__(self, trace: _Recording, windows: Windows, past: int) -> None:
        super().__init__(windows, past)
        self._trace, self.past = trace, past

    def first_kept(self, layer: int) -> int:
        """Return the column at which the layer's buffers begin."""
        window = self.windows.get(layer)
        return 0 if window is None else max(0, self.past - window.retained)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Record that keys and values are written, and return tensors that stand for all of the layer."""
        columns = self.get_mask_sizes(key_states.shape[2], layer_idx)[0]
        return self._trace.write(layer_idx, key_states, value_states, columns)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the number of columns in use."""
        return self.past

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Return (columns in the buffers, the first of them)."""
        first = self.first_kept(layer_idx)
        return self.past + query_length - first, first

    is_compileable = False
    is_initialized = True


class _Recording(TorchDispatchMode):
    """Recorder of one pass. Products and attention are not computed: only shapes matter."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations: list[Operation] = []
        self._of: dict[int, Operation] = {}  # by the tensor's id
        self._alive: list[Tensor] = []
        self._stale: set[int] = set()
        self._is_paused = False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __enter__(self) -> _Recording:
        threads().recorder = self
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        threads().recorder = None

    def add_input(self, name: str, value: Tensor, stage: int) -> Tensor:
        """Let a tensor be an input of the pass."""
        return self._result(Operation(name, None, value=value, stage=stage), value)

    def of(self, value: Tensor) -> Operation:
        """Return the operation that gave a tensor; a constant if none did. Raises CannotBeLowered if it was written over."""
        if id(value) in self._stale:
            raise CannotBeLowered("it writes into a part of a tensor")
        if id(value) not in self._of:
            self.add_input("constant", value, CONSTANT)
        return self._of[id(value)]

    def _result(self, operation: Operation, value: Tensor) -> Tensor:
        self.operations.append(operation)
        self._of[id(value)] = operation
        self._alive.append(value)
        return value

    def __torch_dispatch__(
        self, function: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        if self._is_paused:
            return function(*args, **given)
        name = function._schema.name.split("::")[1]
        is_dropout = "dropout" in name and not (len(args) > 2 and args[1] and args[2])
        if any(tag in function.tags for tag in REFUSED) and name not in ("index", "embedding") and not is_dropout:
            raise CannotBeLowered(f"{name} depends on values, or on random numbers")
        result = function(*args, **given)
        if function._schema.is_mutable:
            if name not in INPLACE:
                raise CannotBeLowered(f"{name} writes over a tensor")
            written = args[0]
            inputs = self._ref((args, given))
            storage = written.untyped_storage()._cdata
            self._stale |= {id(e) for e in self._alive if e is not written and e.untyped_storage()._cdata == storage}
            packet = getattr(torch.ops.aten, name[:-1])
            overload = getattr(packet, function._overloadname)
            self._result(Operation(name[:-1], overload, inputs[0], inputs[1], written), written)
            return result
        inputs, options = self._ref((args, given))
        first = args[0] if args and isinstance(args[0], Tensor) else None
        several = isinstance(result, list | tuple)
        for pick, value in enumerate(result if several else [result]):
            if not isinstance(value, Tensor) or any(value is each for each in args):
                continue
            if name in COPIES and value.is_floating_point() and first is not None and first.is_floating_point():
                self._of[id(value)] = self.of(first)
                self._alive.append(value)
                continue
            is_view = first is not None and value.untyped_storage()._cdata == first.untyped_storage()._cdata
            self._result(Operation(name, function, inputs, options, value, pick if several else None, is_view), value)
        return result

    def _ref(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self.of(value)
        if isinstance(value, list | tuple):
            return type(value)(self._ref(each) for each in value)
        if isinstance(value, dict):
            return {name: self._ref(each) for name, each in value.items()}
        return value

    def _paused(self, make: Callable[[], Any]) -> Any:
        self._is_paused, threads().recorder = True, None
        try:
            return make()
        finally:
            self._is_paused, threads().recorder = False, self

    def calling(self, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """Record a look-up of rows. Raises CannotBeLowered for a product that takes several steps."""
        if function.__name__ != "rows":
            raise CannotBeLowered("its products are none of ggml")
        value: Tensor = self._paused(lambda: function(x))
        return self._result(Operation("rows", function, (self.of(x),), value=value, stage=INPUT), value)

    def product(self, matrix: GgmlMatrix, x_RI: Tensor) -> Tensor:
        """Record ggml's product (R, O) of a matrix."""
        value = self._paused(lambda: torch.zeros(len(x_RI), matrix.outputs))
        return self._result(Operation("product", None, (self.of(x_RI), matrix), value=value, stage=LATE), value)

    def by_torch(self, name: str, function: Callable[..., Tensor], inputs: Sequence[Any], like: Tensor) -> Tensor:
        """Record that torch computes function(cohort, *inputs) between two graphs, and return a tensor that stands for the result,
        which has the shape and dtype of `like`. The function must give a position the same bits in any company."""
        value = self._paused(lambda: torch.zeros_like(like))
        parts = self._ref(tuple(inputs))
        return self._result(Operation(name, function, parts, value=value, stage=LATE, is_whole=True), value)

    def chosen_products(
        self, weight: Any, bias: Tensor | None, x: Tensor, index_NK: Tensor, *, is_transposed: bool
    ) -> Tensor:
        """Record the products (N K, O) of rows with the matrices of experts that they choose. Raises CannotBeLowered if ggml has no
        such products."""
        if isinstance(weight, Tensor):
            if is_transposed:
                raise CannotBeLowered("its experts' matrices are not packed, and lie transposed")
            stacks: list[Any] = [self.of(weight)]
        else:
            stacks = weight.stacks
        if not stacks:
            raise CannotBeLowered("its experts are packed in a way that ggml does not multiply")
        made = []
        for stack in stacks:
            outputs = weight.shape[1] if isinstance(weight, Tensor) else stack.outputs
            function = None if isinstance(weight, Tensor) else _multiply_chosen
            value = self._paused(functools.partial(torch.zeros, *index_NK.shape, outputs))
            inputs = self.of(x), self.of(index_NK), stack
            operation = Operation("chosen_products", function, inputs, value=value, stage=LATE)
            made.append(self._result(operation, value).view(-1, outputs))
        y = made[0] if len(made) == 1 else torch.cat(made, dim=1)
        if bias is None:
            return y
        value = self._paused(lambda: torch.zeros_like(y))
        inputs = self.of(y), self.of(index_NK), self.of(bias)
        return self._result(Operation("add_chosen", None, inputs, value=value, stage=LATE), value)

    def write(self, layer: int, keys: Tensor, values: Tensor, columns: int) -> tuple[Tensor, Tensor]:
        """Record that a layer's cache takes keys and values. Returns tensors that stand for all of its columns."""
        write = Operation("write", None, (self.of(keys), self.of(values), layer), value=(keys, values), stage=LATE)
        self.operations.append(write)

        def all_of(name: str, like: Tensor) -> Tensor:
            shape = *like.shape[:2], columns, like.shape[3]
            value: Tensor = self._paused(lambda: like.new_zeros(()).expand(shape))
            return self._result(Operation(name, None, (write,), stage=LATE), value)

        return all_of("keys", keys), all_of("values", values)

    def attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        scale: float,
        softcap: float,
        sinks: Tensor | None,
    ) -> Tensor:
        """Record the attention (B, T, H, W) of queries (B, H, T, D) to a layer's cache, with sinks (H)."""
        keys, values = self.of(key), self.of(value)
        if (keys.name, values.name) != ("keys", "values") or keys.inputs[0] is not values.inputs[0]:
            raise CannotBeLowered("its attention reads something else than a layer's cache")
        y: Tensor = self._paused(lambda: torch.zeros(*query.transpose(1, 2).shape[:3], value.shape[3]))
        inputs = (self.of(query), keys.inputs[0], *([] if sinks is None else [self.of(sinks)]))
        options = {"scale": scale, "softcap": softcap, "mask": mask}
        operation = Operation("attention", None, inputs, options, y, stage=LATE)
        return self._result(operation, y)


@torch.inference_mode()
def trace_span(span: ModelSpan, start: int, end: int, windows: Windows) -> SpanTrace:
    """Return the operations of units [start, end) of a span.

    Raises CannotBeLowered, or any error of the family's code.
    """
    longest = max((window.size for window in windows.values()), default=0)
    passes = []
    for rows, count, kept, past in ((2, 5, 3, longest + 90), (3, 11, 4, max(longest, LONG_PAST) + 203)):
        most = past if span.position_limit is None else span.position_limit - count  # a table has no more positions
        sizes = sizes_of(rows, count, kept, min(past, most))
        with attending_by_position(span.model):
            passes.append((_record(span, start, end, windows, sizes), sizes))
    first_trace, first_sizes = passes[0]
    first_trace.is_exact = not span.has_same_bits
    second_trace, second_sizes = passes[1]
    first, second = first_trace.operations, second_trace.operations
    if len(first) != len(second) or first_trace.windows != second_trace.windows:
        raise CannotBeLowered("it computes something else for other numbers of positions")
    places = {operation: place for place, operation in enumerate(second)}
    own = {operation: place for place, operation in enumerate(first)}

    def joined(one: Any, other: Any) -> Any:
        """Return an argument of both passes, with names for integers that differ."""
        if isinstance(one, Operation):
            if own[one] != places.get(other):
                raise CannotBeLowered("its operations read other results for other numbers of positions")
            return one
        if isinstance(one, list | tuple):
            return type(one)(joined(*pair) for pair in zip(one, other, strict=True))
        if isinstance(one, dict):
            return {name: joined(value, other[name]) for name, value in one.items()}
        if isinstance(one, int) and not isinstance(one, bool) and one != other:
            for name, size in first_sizes.items():
                if (size, second_sizes[name]) == (one, other):
                    return OpenSize(name)
            return UNKNOWN
        return one

    for operation, other in zip(first, second, strict=True):
        if operation.name != other.name:
            raise CannotBeLowered("it computes something else for other numbers of positions")
        if operation.name == "attention":
            other.options["mask"] = operation.options["mask"] = None
        operation.inputs = joined(operation.inputs, other.inputs)
        operation.options = joined(operation.options, other.options)
        if isinstance(operation.value, Tensor):
            operation.shape = joined(tuple(operation.value.shape), tuple(other.value.shape))
        if operation.function is not None or not operation.stage:
            before = [each.stage for each in operation.needs()]
            if any(stage >= INPUT for stage in before):
                operation.stage = LATE
            elif operation.stage != INPUT:
                is_open = any(parts_of((operation.inputs, operation.options), OpenSize))
                operation.stage = EARLY if is_open else max(before, default=operation.stage)
        if operation.name == "embedding" and operation.stage < INPUT:
            operation.stage = INPUT
    for operation in first_trace.needed(lambda _: False):
        names = {size.name for size in parts_of((operation.inputs, operation.options), OpenSize)}
        if UNKNOWN.name in names or (operation.stage == LATE and not names.isdisjoint(("P", "P+T"))):
            raise CannotBeLowered(f"{operation.name} depends on more than the numbers of rows and positions")
    for operation in first:
        if operation.stage != CONSTANT and isinstance(operation.value, Tensor):
            operation.value = torch.empty_like(operation.value, device="meta")
    fuse(first_trace)
    narrow(first_trace)
    return first_trace


def _record(span: ModelSpan, start: int, end: int, windows: Windows, sizes: Mapping[str, int]) -> SpanTrace:
    """Record one pass, whose sizes are numbers."""
    rows, count, past = sizes["B"], sizes["T"], sizes["P"]
    recording = _Recording()
    cache = TracedPast(recording, windows, past)
    padding_R1 = 2 * torch.arange(rows)[:, None]  # the first row has none
    positions_RT = past + torch.arange(count) - padding_R1
    mask_RC = (torch.arange(past + count) >= padding_R1).to(torch.int64)
    x = torch.zeros(rows, count, dtype=torch.int64) if start == 0 else torch.zeros(rows, count, span.width)
    between: list[Tensor] = []

    def leave(_module: Any, inputs: tuple[Any, ...], output: Any) -> None:
        between.extend((inputs[0], output[0] if isinstance(output, tuple) else output))

    hooks = [layer.register_forward_hook(leave) for layer in span.stack.children()]
    with contextlib.ExitStack() as stack:
        for hook in hooks:
            stack.callback(hook.remove)
        stack.enter_context(recording)
        given = {"positions": (positions_RT, EARLY), "mask": (mask_RC, EARLY)}
        given["x"] = (x.to(span.dtype) if start else x, INPUT if start else EARLY)
        inputs = {name: recording.of(recording.add_input(name, *each)) for name, each in given.items()}
        output = span.forward(
            given["x"][0],
            cache=cache,
            attention_mask=mask_RC,
            position_ids=positions_RT,
            keep_last=sizes["K"],
            start=start,
            end=end,
        )
        result = recording.of(output)
    seen: dict[int, int | None] = {}
    columns_C, queries_T1 = torch.arange(past + count), past + torch.arange(count)[:, None]
    causal_RTC = (columns_C <= queries_T1) & (columns_C >= padding_R1[:, :, None])
    for operation in recording.operations:
        if operation.name != "attention":
            continue
        layer = operation.inputs[1].inputs[2]
        mask = operation.options["mask"]
        if mask is None:
            raise CannotBeLowered("its attention has no mask")
        first = cache.first_kept(layer)
        allowed_RTC = (mask[:, 0] == 0).expand(rows, -1, -1)
        window = windows.get(layer)
        for size in (None,) if window is None else (window.size, None):
            wanted_RTC = causal_RTC if size is None else causal_RTC & (columns_C > queries_T1 - size)
            if torch.equal(allowed_RTC, wanted_RTC[:, :, first:]):
                seen[layer] = size
                break
        else:
            raise CannotBeLowered("its attention has a mask of another kind")
    return SpanTrace(recording.operations, result, inputs, seen, {recording.of(hidden) for hidden in between})
