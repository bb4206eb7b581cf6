"""Operations of a span's forward as a graph, and patterns of them that ggml has as one node: norms, rotary embeddings of halves,
gated activations.

Operations that need products or attention are `LATE`: graphs of ggml compute them (`span_graph.py`), or torch between two graphs
(`torch_steps.py`). Those that need positions or sizes only are `EARLY`, such as rotary angles: torch computes them if the graph
needs them. All others are constants.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from swarmnode.compute.packing.ggml import BINARY, UNARY

T = TypeVar("T")

CONSTANT, EARLY, INPUT, LATE = range(4)  # stages: an INPUT is computed by torch, and what needs it is LATE
CHECKED_POSITIONS = (0, 1, 2, 3, 5, 17, 64, 251, 1023, 4095)
ANGLES = 2e-3  # most that a rotary embedding's cosine may differ: float32 rounds the angle of position 4,095 so


class OpenSize(NamedTuple):
    """Integer that depends on a pass: a name of `sizes_of`."""

    name: str


UNKNOWN = OpenSize("")
LAST = {OpenSize("T"): OpenSize("K"), OpenSize("BT"): OpenSize("BK")}
"""Numbers of all positions, and those of the ones with logits"""
BY_POSITION = frozenset({*UNARY, *BINARY, "product", "linear", "rms_norm", "layer_norm", "gated", "gelu", "pow"})
"""Operations that compute each position by itself, whatever lies before it"""
VIEWS = frozenset({"view", "reshape", "_unsafe_view"})


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
    `shape` is the value's, with names for open integers. An operation that `is_whole` is computed by torch, for all rows at once:
    its function gets the pass's cohort before the inputs.
    """

    name: str
    function: Callable[..., Any] | None
    inputs: tuple[Any, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)
    value: Any = None
    pick: int | None = None
    is_view: bool = False
    stage: int = CONSTANT
    is_whole: bool = False
    shape: tuple[int | OpenSize, ...] = ()

    def __repr__(self) -> str:
        return f"{self.name}{tuple(self.value.shape) if isinstance(self.value, Tensor) else ''}"

    def needs(self) -> list[Operation]:
        """Return the operations whose results this one reads."""
        return parts_of((self.inputs, self.options), Operation)


def parts_of(value: Any, kind: type[T]) -> list[T]:
    """Return the arguments of this kind, also those in lists."""
    if isinstance(value, kind):
        return [value]
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, list | tuple) or isinstance(value, OpenSize):
        return []
    return [part for each in value if each is not None for part in parts_of(each, kind)]


def filled(value: Any, fill: Callable[[Any], Any]) -> Any:
    """Return arguments whose operations and open integers are replaced by `fill`."""
    if isinstance(value, Operation | OpenSize):
        return fill(value)
    if isinstance(value, list | tuple):
        return type(value)(filled(each, fill) for each in value)
    if isinstance(value, dict):
        return {name: filled(each, fill) for name, each in value.items()}
    return value


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
    layer to layer: they are rounded to the model's number format, as on their way to another machine. `is_exact`: packed products
    are exact.
    """

    operations: list[Operation]
    result: Operation | None
    inputs: dict[str, Operation]
    windows: dict[int, int | None]
    between: set[Operation]
    is_exact: bool = False

    def __repr__(self) -> str:
        return f"SpanTrace({len(self.operations)} operations, {len(self.windows)} layers)"

    def without_result(self) -> SpanTrace:
        """Return the operations of a pass without logits: those that the writes to caches need."""
        emptied = replace(self, result=None)
        needed = emptied.needed(lambda each: each.stage != LATE)
        emptied.operations = [operation for operation in self.operations if operation in needed]
        return emptied

    def needed(self, stop: Callable[[Operation], bool]) -> set[Operation]:
        """Return the operations that the result and the writes to caches need; what those that `stop` need is left out."""
        left = [each for each in self.operations if each.name == "write"]
        left += [] if self.result is None else [self.result]
        return reachable(left, stop)

    def computed(self, wanted: Sequence[Any], known: Mapping[Operation, Tensor], sizes: Mapping[str, int]) -> list[Any]:
        """Return the values of operations that torch computes, from those that are known. Parts in common are computed once."""
        values: dict[Operation, Any] = dict(known)

        def value_of(item: Any) -> Any:
            if isinstance(item, OpenSize):
                return sizes[item.name]
            if item not in values:
                if item.function is None or item.stage == CONSTANT:
                    values[item] = item.value
                else:
                    result = item.function(*filled(item.inputs, value_of), **filled(item.options, value_of))
                    values[item] = result if item.pick is None else result[item.pick]
            return values[item]

        return [filled(item, value_of) for item in wanted]


# -- larger operations


class Rope(NamedTuple):
    """Rotary embedding of the last dimension's halves: inverse frequencies, and the factor of the results."""

    inverse: Tensor
    factor: float


def fuse(trace: SpanTrace) -> None:
    """Replace patterns of operations by one operation each: norms of the root of mean squares, rotary embeddings of halves, and
    gated activations. What nothing needs is left out.

    Beside exact products there are no rotary embeddings of ggml, whose angles differ from torch's in the last bits, and no GELU of
    ggml, which reads a table in float16."""
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
                    operation.name, operation.inputs, operation.function = "rms_norm", (x, epsilon), None
                    break
                name = activation(x)
                if (
                    name
                    and not (trace.is_exact and name == "gelu")
                    and other.stage == LATE
                    and x.inputs[0].value.shape == other.value.shape
                ):
                    operation.name, operation.inputs = "gated", (x.inputs[0], other, name)
                    operation.function = None
                    break
        elif operation.name == "chunk" and operation.inputs[0].name == "cat":  # of what was joined before
            parts, axis = (*operation.inputs[0].inputs, 0)[:2]
            dims = operation.value.dim()
            same = {(part.stage, part.value.shape) for part in parts} == {(LATE, operation.value.shape)}
            if same and len(parts) == operation.inputs[1] and (*operation.inputs, 0)[2] % dims == axis % dims:
                operation.name, operation.inputs, operation.pick = "detach", (parts[operation.pick],), None
        elif operation.name == "add" and len(operation.inputs) == 2 and not trace.is_exact:
            _fuse_rope(trace, operation, ropes)
    needed = trace.needed(lambda each: each.stage != LATE)
    trace.operations = [operation for operation in trace.operations if operation in needed]


def narrow(trace: SpanTrace) -> None:
    """Leave out positions without logits as early as possible: behind the last attention, instead of before the head."""
    users: dict[Operation, list[Operation]] = {}
    for operation in trace.operations:
        for need in operation.needs():
            users.setdefault(need, []).append(operation)
    cuts = {
        operation
        for operation in trace.operations
        if (operation.name, operation.stage) == ("slice", LATE)
        and operation.inputs[1:3] in ((1, OpenSize("T-K")), (1, OpenSize("-K")))
        and (*operation.inputs, None)[3] in (None, torch.iinfo(torch.int64).max, OpenSize("T"))
    }

    def has_positions(operation: Operation, *, apart: bool) -> bool:
        """Return whether all positions are a dimension: the second one, or, unless `apart`, the first one with the rows."""
        shape = operation.shape
        is_apart = shape[1:2] == (OpenSize("T"),) and LAST.keys().isdisjoint(shape[2:])
        return is_apart or (not apart and shape[:1] == (OpenSize("BT"),) and LAST.keys().isdisjoint(shape[1:]))

    last = {
        operation
        for operation in trace.operations
        if operation.stage == LATE and operation.name in BY_POSITION | VIEWS and has_positions(operation, apart=False)
    } - {trace.result}
    while wrong := {
        operation
        for operation in last
        if not all(user in last or user in cuts for user in users.get(operation, ()))
        or not all(
            need in last or LAST.keys().isdisjoint(need.shape) or has_positions(need, apart=True)
            for need in operation.needs()
        )
    }:
        last -= wrong
    parts: dict[Operation, Operation] = {}
    operations: list[Operation] = []

    def part_of(need: Any) -> Any:
        """Return what stands for an argument of an operation of `last`."""
        if isinstance(need, OpenSize):
            return LAST.get(need, need)
        if need in last or LAST.keys().isdisjoint(need.shape):
            return need
        if need not in parts:
            inputs, shape = (need, 1, OpenSize("T-K"), torch.iinfo(torch.int64).max), filled(need.shape, part_of)
            slices, value = torch.ops.aten.slice.Tensor, need.value[:, :1]
            parts[need] = Operation("slice", slices, inputs, value=value, is_view=True, stage=LATE, shape=shape)
            operations.append(parts[need])
        return parts[need]

    for operation in trace.operations:
        if operation in last:
            operation.inputs, operation.options = filled((operation.inputs, operation.options), part_of)
            operation.shape = filled(operation.shape, part_of)
        elif operation in cuts and operation.inputs[0] in last:
            operation.name, operation.function = "detach", torch.ops.aten.detach.default
            operation.inputs = operation.inputs[:1]
        operations.append(operation)
    trace.operations = operations


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
            operation.name, operation.inputs, operation.function = "rope", (x, ropes[tables]), None
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
    mask_RC = torch.ones(1, positions_RT.shape[1], dtype=torch.int64)
    inputs = {trace.inputs["positions"]: positions_RT, trace.inputs["mask"]: mask_RC}
    sizes = sizes_of(1, positions_RT.shape[1], 1)
    cos_TD, sin_TD = (table_BTD[0].double() for table_BTD in trace.computed([cos, sin], inputs, sizes))
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
