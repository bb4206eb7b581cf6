"""Operations of a family's own forward for a span, as a list whose numbers of rows and positions are left open.

torch tells of each operator, and packed products, look-ups, caches and attention tell of themselves. The pass is recorded with two
sets of sizes. An integer that is the same in both is a constant; another one must be one of `sizes_of` in both, and gets its name.

Patterns of operations that ggml has as one node (norms, rotary embeddings, gated activations) become one operation.

Operations that need products or attention are `LATE`: a graph of ggml computes them (`span_graph.py`). Those that need positions or
sizes only are `EARLY`, such as rotary angles: torch computes them if the graph needs them. All others are constants.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from swarmnode.compute.model.span import ModelSpan
from swarmnode.compute.packing.ggml_matrix import GgmlMatrix, threads
from swarmnode.compute.serving.captured_decode import REFUSED
from swarmnode.compute.serving.cohort import AttentionCache, Windows

T = TypeVar("T")

CONSTANT, EARLY, INPUT, LATE = range(4)  # stages: an INPUT is computed by torch, and what needs it is LATE
COPIES = frozenset(
    {"to", "_to_copy", "contiguous", "clone", "alias", "detach", "type_as", "float", "dropout", "lift_fresh"}
)
"""Operators that give their first argument's values: the graph computes in float32, and writes over nothing"""
INPLACE = frozenset(
    {"add_", "mul_", "sub_", "div_", "clamp_", "triu_", "tril_", "fill_", "neg_", "masked_fill_", "scatter_"}
)
CHECKED_POSITIONS = (0, 1, 2, 3, 5, 17, 64, 251, 1023, 4095)
ANGLES = 2e-3  # most that a rotary embedding's cosine may differ: float32 rounds the angle of position 4,095 so
LONG_PAST = 8200  # columns before the second recorded pass: more than the chunks of attention in chunks


class CannotBeLowered(Exception):
    """The graph has no counterpart for something that the model computes: the span stays on torch's way."""


class OpenSize(NamedTuple):
    """Integer that depends on a pass: a name of `sizes_of`."""

    name: str


UNKNOWN = OpenSize("")


def sizes_of(rows: int, count: int, kept: int, past: int = 0) -> dict[str, int]:
    """Return the integers that depend on a pass of `rows` rows with `count` new positions, `kept` of them with logits."""
    return {
        "B": rows,
        "T": count,
        "K": kept,
        "BT": rows * count,
        "BK": rows * kept,
        "T-K": count - kept,
        "-K": -kept,
        "P": past,
        "P+T": past + count,
    }


@dataclass(eq=False)
class Operation:
    """Recorded operation. `inputs` are its arguments: operations stand for tensors there, and `OpenSize` for open integers.

    `pick` chooses among several results. `value` is the result of the first recorded pass: for constants it is the value itself.
    """

    name: str
    function: Callable[..., Any] | None
    inputs: tuple[Any, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)
    value: Any = None
    pick: int | None = None
    is_view: bool = False
    stage: int = CONSTANT

    def __repr__(self) -> str:
        return f"{self.name}{tuple(self.value.shape) if isinstance(self.value, Tensor) else ''}"

    def needs(self) -> Iterator[Operation]:
        """Yield the operations whose results this one reads."""
        yield from _parts((self.inputs, self.options), Operation)


def _parts(value: Any, kind: type[T]) -> Iterator[T]:
    """Yield the arguments of this kind, also those in lists."""
    if isinstance(value, kind):
        yield value
    elif isinstance(value, dict):
        yield from _parts(list(value.values()), kind)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _parts(each, kind)


def filled(value: Any, fill: Callable[[Any], Any]) -> Any:
    """Return arguments whose operations and open integers are replaced by `fill`."""
    if isinstance(value, Operation | OpenSize):
        return fill(value)
    if isinstance(value, list | tuple):
        return type(value)(filled(each, fill) for each in value)
    if isinstance(value, dict):
        return {name: filled(each, fill) for name, each in value.items()}
    return value


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
            raise CannotBeLowered("its products are no fast ones")
        value: Tensor = self._paused(lambda: function(x))
        return self._result(Operation("rows", function, (self.of(x),), value=value, stage=INPUT), value)

    def product(self, matrix: GgmlMatrix, x_RI: Tensor) -> Tensor:
        """Record the fast product (R, O) of a matrix."""
        value = self._paused(lambda: torch.zeros(len(x_RI), matrix.outputs))
        return self._result(Operation("product", None, (self.of(x_RI), matrix), value=value, stage=LATE), value)

    def chosen_products(self, weight: Any, bias: Tensor | None, x: Tensor, index_NK: Tensor, *, turned: bool) -> Tensor:
        """Record the products (N K, O) of rows with chosen experts. Raises CannotBeLowered if ggml has none."""
        if (isinstance(weight, Tensor) and turned) or not (isinstance(weight, Tensor) or weight.stacks):
            raise CannotBeLowered("its experts' matrices lie in a way that ggml does not multiply")
        made, read = [], (self.of(x), self.of(index_NK))
        for stack in [self.of(weight)] if isinstance(weight, Tensor) else weight.stacks:
            shape = index_NK.numel(), weight.shape[1] if isinstance(weight, Tensor) else stack.outputs
            value: Tensor = self._paused(lambda shape=shape: torch.zeros(shape))
            made.append(
                self._result(Operation("chosen_products", None, (*read, stack), value=value, stage=LATE), value)
            )
        y = made[0] if len(made) == 1 else torch.cat(made, dim=1)
        if bias is not None:
            inputs, value = (self.of(y), self.of(index_NK), self.of(bias)), self._paused(lambda: torch.zeros_like(y))
            return self._result(Operation("add_chosen", None, inputs, value=value, stage=LATE), value)
        return y

    def write(self, layer: int, keys: Tensor, values: Tensor, columns: int) -> tuple[Tensor, Tensor]:
        """Record that a layer's cache takes keys and values. Returns tensors that stand for all of its columns."""
        write = Operation("write", None, (self.of(keys), self.of(values), layer), value=(keys, values), stage=LATE)
        self.operations.append(write)

        def all_of(name: str, like: Tensor) -> Tensor:
            shape = *like.shape[:2], columns, like.shape[3]
            value: Tensor = self._paused(lambda: like.new_zeros(()).expand(shape))
            return self._result(Operation(name, None, (write,), stage=LATE), value)

        return all_of("keys", keys), all_of("values", values)

    def attention(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float) -> Tensor:
        """Record the attention (B, T, H, W) of queries (B, H, T, D) to a layer's cache."""
        keys, values = self.of(key), self.of(value)
        if (keys.name, values.name) != ("keys", "values") or keys.inputs[0] is not values.inputs[0]:
            raise CannotBeLowered("its attention reads something else than a layer's cache")
        y: Tensor = self._paused(lambda: torch.zeros(*query.transpose(1, 2).shape[:3], value.shape[3]))
        inputs = (self.of(query), keys.inputs[0])
        operation = Operation("attention", None, inputs, {"scale": scale, "mask": mask}, y, stage=LATE)
        return self._result(operation, y)


def reachable(left: list[Operation], stop: Callable[[Operation], bool] = lambda _: False) -> set[Operation]:
    """Return operations and all that they need; what those that `stop` need is left out."""
    found: set[Operation] = set()
    while left:
        operation = left.pop()
        if operation not in found:
            found.add(operation)
            if not stop(operation):
                left += operation.needs()
    return found


@dataclass
class SpanTrace:
    """Recorded operations of units [start, end) of a span, and what they give: None if only caches are written.

    `windows` has the window of each layer's attention, None if it sees everything. `between` are the hidden states that go from
    layer to layer: they are rounded to the model's number format, as on their way to another machine.
    """

    operations: list[Operation]
    result: Operation | None
    inputs: dict[str, Operation]
    windows: dict[int, int | None]
    between: set[Operation]

    def __repr__(self) -> str:
        return f"SpanTrace({len(self.operations)} operations, {len(self.windows)} layers)"

    def needed(self, stop: Callable[[Operation], bool]) -> set[Operation]:
        """Return the operations that the result and the writes to caches need; what those that `stop` need is left out."""
        left = [each for each in self.operations if each.name == "write"]
        left += [] if self.result is None else [self.result]
        return reachable(left, stop)

    def early(self, wanted: Sequence[Operation], given: Mapping[str, Tensor], sizes: Mapping[str, int]) -> list[Tensor]:
        """Return the values of operations that torch computes, for the inputs of a pass. Parts in common are computed once."""
        known: dict[Operation, Any] = {self.inputs[name]: value for name, value in given.items() if name in self.inputs}

        def value_of(item: Any) -> Any:
            if isinstance(item, OpenSize):
                return sizes[item.name]
            if item not in known:
                if item.function is None or item.stage == CONSTANT:
                    known[item] = item.value
                else:
                    result = item.function(*filled(item.inputs, value_of), **filled(item.options, value_of))
                    known[item] = result if item.pick is None else result[item.pick]
            return known[item]

        return [value_of(operation) for operation in wanted]


@torch.inference_mode()
def trace_span(span: ModelSpan, start: int, end: int, windows: Windows, *, is_empty: bool) -> SpanTrace:
    """Return the operations of units [start, end) of a span; `is_empty`: without any logits, so that only caches are written.

    Raises CannotBeLowered, or any error of the family's code.
    """
    longest = max((window.size for window in windows.values()), default=0)
    passes = []
    for rows, count, kept, past in ((2, 5, 3, longest + 90), (3, 11, 4, max(longest, LONG_PAST) + 203)):
        sizes = sizes_of(rows, count, kept, past)
        passes.append((_record(span, start, end, windows, sizes, is_empty=is_empty), sizes))
    first_trace, first_sizes = passes[0]
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
        if operation.function is not None or not operation.stage:
            before = [each.stage for each in operation.needs()]
            if any(stage >= INPUT for stage in before):
                operation.stage = LATE
            elif operation.stage != INPUT:
                is_open = any(_parts((operation.inputs, operation.options), OpenSize))
                operation.stage = EARLY if is_open else max(before, default=operation.stage)
        if operation.name == "embedding" and operation.stage < INPUT:
            operation.stage = INPUT
    for operation in first_trace.needed(lambda _: False):
        if UNKNOWN in _parts((operation.inputs, operation.options), OpenSize):
            raise CannotBeLowered(f"{operation.name} depends on more than the numbers of rows and positions")
    for operation in first:
        if operation.stage != CONSTANT and isinstance(operation.value, Tensor):
            operation.value = torch.empty_like(operation.value, device="meta")
    _fuse(first_trace)
    return first_trace


def _record(
    span: ModelSpan, start: int, end: int, windows: Windows, sizes: Mapping[str, int], *, is_empty: bool
) -> SpanTrace:
    """Record one pass, whose sizes are numbers."""
    rows, count, past = sizes["B"], sizes["T"], sizes["P"]
    recording = _Recording()
    cache = TracedPast(recording, windows, past)
    padding_R1 = 2 * torch.arange(rows)[:, None]  # the first row has none
    positions_RT = past + torch.arange(count) - padding_R1
    mask_RC = (torch.arange(past + count) >= padding_R1).to(torch.int64)
    x = torch.zeros(rows, count, dtype=torch.int64) if start == 0 else torch.zeros(rows, count, span.hidden_size)
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
            keep_last=0 if is_empty else sizes["K"],
            start=start,
            end=end,
        )
        result = None if is_empty else recording.of(output)
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


# -- larger operations


class Rope(NamedTuple):
    """Rotary embedding of the last dimension's halves: inverse frequencies, and the factor of the results."""

    inverse: Tensor
    factor: float


def _fuse(trace: SpanTrace) -> None:
    """Replace patterns of operations by one operation each: norms of the root of mean squares, rotary embeddings of halves, and
    gated activations. What nothing needs is left out."""
    ropes: dict[tuple[Operation, Operation], Rope | None] = {}
    for operation in trace.operations:
        if operation.stage != LATE:
            continue
        if operation.name == "product":  # it takes rows, whatever other dimensions they have
            x, matrix = operation.inputs
            while x.name in ("view", "reshape") and x.inputs[0].value.shape[-1] == matrix.inputs and x.stage == LATE:
                x = x.inputs[0]
            operation.inputs = x, matrix
        elif operation.name == "mul" and len(operation.inputs) == 2:
            for x, other in (operation.inputs, operation.inputs[::-1]):
                if not isinstance(x, Operation) or not isinstance(other, Operation):
                    continue
                epsilon = _mean_square_of(other, x)
                if epsilon is not None:
                    operation.name, operation.inputs = "rms_norm", (x, epsilon)
                    break
                name = activation(x)
                if name and other.stage == LATE and x.inputs[0].value.shape == other.value.shape:
                    operation.name, operation.inputs = "gated", (x.inputs[0], other, name)
                    break
        elif operation.name == "chunk" and operation.inputs[0].name == "cat":  # of what was joined before
            parts, axis = (*operation.inputs[0].inputs, 0)[:2]
            dims = operation.value.dim()
            same = {(part.stage, part.value.shape) for part in parts} == {(LATE, operation.value.shape)}
            if same and len(parts) == operation.inputs[1] and (*operation.inputs, 0)[2] % dims == axis % dims:
                operation.name, operation.inputs, operation.pick = "detach", (parts[operation.pick],), None
        elif operation.name == "add" and len(operation.inputs) == 2:
            _fuse_rope(trace, operation, ropes)
    needed = trace.needed(lambda each: each.stage != LATE)
    trace.operations = [operation for operation in trace.operations if operation in needed]


def activation(operation: Operation) -> str:
    """Return the name of an activation that ggml knows with a gate; empty for other operations."""
    if operation.name == "gelu" and operation.stage == LATE:
        approximate = operation.options.get("approximate", (*operation.inputs, "none")[1])
        return "gelu" if approximate == "tanh" else "gelu_erf"
    return operation.name if operation.name in ("silu", "relu") and operation.stage == LATE else ""


def _mean_square_of(factor: Operation, x: Operation) -> float | None:
    """Return the epsilon if `factor` is 1 / sqrt(mean(x^2) + epsilon) over the last dimension, else None."""
    if (factor.name == "pow" and factor.inputs[1] == -0.5) or factor.name == "rsqrt":
        total = factor.inputs[0]
        if total.name == "add" and isinstance(total.inputs[1], float) and total.inputs[0].name == "mean":
            mean = total.inputs[0]
            square, dims = mean.inputs[0], mean.inputs[1]
            is_last = list(dims) in ([-1], [x.value.dim() - 1]) and (*mean.inputs, False)[2]
            is_square = square.name == "pow" and square.inputs == (x, 2)
            is_square |= square.name == "mul" and square.inputs == (x, x)
            if is_last and is_square:
                return float(total.inputs[1])
    return None


def _fuse_rope(trace: SpanTrace, operation: Operation, ropes: dict[Any, Rope | None]) -> None:
    """Make an addition a rotary embedding if it is x cos + rotated(x) sin."""
    for straight, turned in (operation.inputs, operation.inputs[::-1]):
        if not all(isinstance(each, Operation) and each.name == "mul" for each in (straight, turned)):
            continue
        (x, cos), (rotated, sin) = _late_first(straight), _late_first(turned)
        if rotated is None or x is None or rotated.name != "cat" or len(rotated.inputs[0]) != 2:
            continue
        negative, first = rotated.inputs[0]
        half = x.value.shape[-1] // 2
        is_half = negative.name == "neg" and _is_slice(negative.inputs[0], x, half, 2 * half)
        if not (is_half and _is_slice(first, x, 0, half) and 2 * half == x.value.shape[-1]):
            continue
        tables = _table(cos), _table(sin)
        if None in tables:
            continue
        if tables not in ropes:
            ropes[tables] = _rope_of(trace, *tables)  # type: ignore[arg-type]
        if ropes[tables] is not None:
            operation.name, operation.inputs = "rope", (x, ropes[tables])
            return


def _late_first(product: Operation) -> tuple[Operation | None, Operation | None]:
    one, other = product.inputs
    if not (isinstance(one, Operation) and isinstance(other, Operation)):
        return None, None
    return (one, other) if other.stage < LATE else (other, one) if one.stage < LATE else (None, None)


def _table(factor: Operation | None) -> Operation | None:
    """Return what a factor (B, 1, T, D) of all heads is made of, (B, T, D); None if it has another shape."""
    if factor is None or factor.name != "unsqueeze" or factor.inputs[1] != 1 or factor.value.dim() != 4:
        return None
    table: Operation = factor.inputs[0]
    return table


def _is_slice(part: Operation, x: Operation, first: int, end: int) -> bool:
    """Return whether `part` is x[..., first:end]."""
    if part.name != "slice" or part.inputs[0] is not x:
        return False
    _, dim, begin, stop = (*part.inputs, 0, None, None)[:4]
    width = x.value.shape[-1]
    return dim in (-1, x.value.dim() - 1) and (begin or 0) == first and min(stop or width, width) == end


def _rope_of(trace: SpanTrace, cos: Operation, sin: Operation) -> Rope | None:
    """Return the rotary embedding whose cosines and sines (B, T, D) torch computes; None if they are something else."""
    positions_RT = torch.tensor([CHECKED_POSITIONS])
    given = {"positions": positions_RT, "mask": torch.ones(1, positions_RT.shape[1], dtype=torch.int64)}
    sizes = sizes_of(1, positions_RT.shape[1], 1)
    cos_TD, sin_TD = (table_BTD[0].double() for table_BTD in trace.early([cos, sin], given, sizes))
    width = cos_TD.shape[-1] // 2
    factor = float(cos_TD[0, 0])
    inverse_D = torch.atan2(sin_TD[1, :width], cos_TD[1, :width])
    for each in trace.operations:  # the family's own frequencies, if they are among its constants
        if each.stage == CONSTANT and isinstance(each.value, Tensor) and each.value.numel() == width:
            own_D = each.value.reshape(-1).double()
            if torch.allclose(own_D, inverse_D, rtol=1e-4, atol=1e-9):
                inverse_D = own_D
    angles_TD = positions_RT[0, :, None] * inverse_D.repeat(2)
    is_it = torch.allclose(cos_TD, factor * angles_TD.cos(), rtol=0, atol=ANGLES)
    is_it &= torch.allclose(sin_TD, factor * angles_TD.sin(), rtol=0, atol=ANGLES)
    return Rope(inverse_D, factor) if is_it and bool((inverse_D > 0).all()) else None
