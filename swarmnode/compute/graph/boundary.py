"""Check of tensors against the values of a graph's boundary, by their descriptions alone, and conversion of arrays to them.

A layout: the computation and the weights of each unit of a cut graph, and the values that cross each boundary.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from swarmnode.codec.body import SHARED
from swarmnode.codec.tensors import Codec, TensorInfo
from swarmnode.compress.codecs import DTYPE_OF, TORCH_DTYPE
from swarmnode.compute.graph.graph import (
    BUFFER,
    CONSTANT,
    BufferUpdate,
    Graph,
    GraphInput,
    OperatorCall,
    Ref,
    TensorType,
    is_random,
    torch_constant,
)
from swarmnode.compute.graph.label_count import label_means, obstructed_means
from swarmnode.compute.training.datasets.batches import ArrayBatches, Encode, LabelShares, token_batches
from swarmnode.data.rows import load_arrays
from swarmnode.data.samples import ARRAYS_SUFFIX
from swarmnode.errors import CheckpointError, ProtocolError, UsageError

_NO_GRADIENT = frozenset({"aten.detach.default", "aten.detach_copy.default"})


@dataclass(frozen=True)
class Value:
    """Value that crosses a boundary. `trained`: it depends on trained weights, so its gradient comes back."""

    ref: Ref
    type: TensorType
    trained: bool


@dataclass(frozen=True)
class Unit:
    """Computation of one unit: its nodes, the names of the weights that it reads, and the updates of its buffers."""

    nodes: tuple[OperatorCall, ...]
    weights: tuple[str, ...]
    moves: tuple[BufferUpdate, ...]


class Layout:
    """Units of a graph. Raises CheckpointError if a weight is used by units that cannot share it.

    `boundaries[k]` are the values before unit k, the inputs first; the last boundary has only the results. `labels` are the inputs
    that the last unit takes, in a trained graph; they cross no boundary for its sake. A node that computes only from constants
    belongs to no unit: every unit that needs it computes it again.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self._trained = trained_values(graph)
        self._types = {Ref(item.name): item.type for item in graph.inputs} | value_types(graph.nodes)
        constants = constant_values(graph)
        self._unit_of = {
            node.name: bisect_right(graph.cuts, number)
            for number, node in enumerate(graph.nodes)
            if node.name not in constants
        }
        self.units = tuple(self._collect(constants))
        self.blocks = self._find_blocks()
        self.labels = self._find_labels()
        self.boundaries = tuple(self._boundaries())

    def __repr__(self) -> str:
        widths = [len(boundary) for boundary in self.boundaries]
        return f"Layout({len(self.units)} units, {min(widths)} to {max(widths)} values at a boundary)"

    def _collect(self, constants: set[str]) -> Iterable[Unit]:
        """Yield the units, each with the constant nodes that it needs."""
        weights = {weight.name for weight in self.graph.weights}
        own: list[list[OperatorCall]] = [[] for _ in range(self.graph.units)]
        for node in self.graph.nodes:
            if node.name not in constants:
                own[self._unit_of[node.name]].append(node)
        for number, nodes in enumerate(own):
            moves = tuple(move for move in self.graph.moves if self._unit_of.get(move.value.name) == number)
            needed = {ref.name for node in nodes for ref in node.refs()}
            for node in reversed(self.graph.nodes):
                if node.name in constants and node.name in needed:
                    needed |= {ref.name for ref in node.refs()}
            names = {node.name for node in nodes} | (needed & constants)
            used = needed | {move.buffer for move in moves}
            yield Unit(
                tuple(node for node in self.graph.nodes if node.name in names), tuple(sorted(used & weights)), moves
            )

    def _find_blocks(self) -> dict[str, int]:
        """Return the block of each trained weight and buffer, by name.

        Raises CheckpointError if several units use one, unless it is a trained weight of the first and the last.
        """
        last = self.graph.units - 1
        users: dict[str, list[int]] = {}
        for number, unit in enumerate(self.units):
            for name in unit.weights:
                users.setdefault(name, []).append(number)
        blocks: dict[str, int] = {}
        for weight in self.graph.weights:
            numbers = users.get(weight.name, [])
            if not numbers or not (weight.trained or weight.kind == BUFFER):
                continue
            if len(numbers) > 1 and not (weight.trained and numbers == [0, last]):
                raise CheckpointError(
                    f"{weight.tensor} is used by layers {numbers}; only the first "
                    "and the last layer may share a weight; use fewer --units"
                )
            blocks[weight.name] = numbers[0] if len(numbers) == 1 else SHARED
        return blocks

    def _find_labels(self) -> tuple[Value, ...]:
        """Return the inputs that the last unit takes as labels.

        Empty if nothing is trained, there is only one unit, or no other input shows the size of the batch.
        """
        inputs = [Ref(item.name) for item in self.graph.inputs]
        *others, last = map(values_taken, self.units)
        labels = [ref for ref in inputs if ref in last] if others and self.graph.loss is not None else []
        crossing = [ref for ref in inputs if ref not in labels or any(ref in taken for taken in others)]
        tells = not self.graph.any_batch or any(self._types[ref].tells_batch for ref in crossing)
        return self._values(labels if tells else [])

    def _boundaries(self) -> Iterable[tuple[Value, ...]]:
        made = {Ref(item.name): -1 for item in self.graph.inputs}
        labels = {value.ref for value in self.labels}
        used: dict[Ref, int] = {}
        for number, unit in enumerate(self.units):
            own = {node.name for node in unit.nodes}
            made.update({ref: number for ref in self._types if ref.name in own and ref.name in self._unit_of})
            is_last = number + 1 == self.graph.units
            used.update(dict.fromkeys(values_taken(unit) - labels if is_last else values_taken(unit), number))
        used.update(dict.fromkeys(self.graph.results, self.graph.units))
        crossing = [
            [ref for ref in self._types if ref in made and made[ref] < number <= used.get(ref, -1)]
            for number in range(self.graph.units)
        ]
        inputs = [Ref(item.name) for item in self.graph.inputs]
        crossing[0] = [ref for ref in inputs if ref in used or ref not in labels]
        if self.graph.any_batch:
            # An input crosses the boundaries up to the last one that would not show the size of the batch otherwise.
            teller = next((ref for ref in crossing[0] if self._types[ref].tells_batch), None)
            if teller is None:
                raise CheckpointError(
                    "no input of the graph has the size of the batch; export the module with batched inputs"
                )
            silent = [k for k, refs in enumerate(crossing) if not any(self._types[ref].tells_batch for ref in refs)]
            for refs in crossing[: max(silent, default=-1) + 1]:
                if teller not in refs:
                    refs.insert(0, teller)
        for crossed in (*crossing, self.graph.results):
            yield self._values(crossed)

    def _values(self, refs: Iterable[Ref]) -> tuple[Value, ...]:
        return tuple(
            Value(ref, kind, ref.name in self._trained and _is_differentiable(kind))
            for ref, kind in ((ref, self._types[ref]) for ref in refs)
        )


def values_taken(unit: Unit) -> set[Ref]:
    """Return the values that the nodes of a unit take."""
    return {ref for node in unit.nodes for ref in node.refs()}


def value_types(nodes: Iterable[OperatorCall]) -> dict[Ref, TensorType]:
    """Return the type of every tensor that `nodes` compute."""
    types: dict[Ref, TensorType] = {}
    for node in nodes:
        for item, kind in enumerate(node.types):
            if kind is not None:
                types[Ref(node.name, item if len(node.types) > 1 else None)] = kind
    return types


def trained_values(graph: Graph) -> set[str]:
    """Return the names of the values that depend on trained weights so that gradients reach these. Whole numbers take none."""
    trained = {weight.name for weight in graph.weights if weight.trained}
    whole = {ref for ref, kind in value_types(graph.nodes).items() if not _is_differentiable(kind)}
    for node in graph.nodes:
        if node.operator not in _NO_GRADIENT and any(ref.name in trained and ref not in whole for ref in node.refs()):
            trained.add(node.name)
    return trained


def _is_differentiable(kind: TensorType) -> bool:
    dtype: torch.dtype = torch_constant(kind.dtype)
    return dtype.is_floating_point or dtype.is_complex


def constant_values(graph: Graph) -> set[str]:
    """Return the names of the nodes that compute the same in every pass: positions, masks, tables."""
    known = {weight.name for weight in graph.weights if weight.kind == CONSTANT}
    nodes: set[str] = set()
    results = {ref.name for ref in graph.results}
    for node in graph.nodes:
        fixed = all(ref.name in known or ref.name in nodes for ref in node.refs())
        if fixed and not is_random(node.operator, node.args) and node.name not in results:
            nodes.add(node.name)
    return nodes


Described = tuple[torch.dtype, tuple[int, ...]]
"""Description of a tensor: its dtype and shape"""
ROWS = 1024  # rows whose labels are counted at a time


def read_arrays(path: Path, needed: Sequence[str] | None = None) -> Mapping[str, np.ndarray]:
    """Return the arrays `needed` of an .npz file by name, or all of them.

    Raises UsageError if there is no such file, its name has another ending, or as `load_arrays` does.
    """
    if not path.exists():
        raise UsageError(f"{path}: no such file; check its name")
    if not path.is_file() or path.suffix != ARRAYS_SUFFIX:
        raise UsageError(
            f"{path}: the data of a module is an {ARRAYS_SUFFIX} file (numpy.savez) of arrays by input name"
        )
    return load_arrays(path, needed)


def array_batches(path: Path, graph: Graph) -> ArrayBatches:
    """Return batches of the arrays in an .npz file that a graph's inputs name, one row a sample.

    Raises UsageError if they do not fit.
    """
    arrays = read_arrays(path, [item.argument for item in graph.inputs])
    taken = {item.argument: _fitting(path, arrays[item.argument], item, graph.batch) for item in graph.inputs}
    batches = ArrayBatches(taken, *_ends(graph))
    batches.weigh(_label_shares(path, graph, taken))
    return batches


def token_length(graph: Graph) -> int:
    """Return the number of tokens of a sample if the graph is a language model; 0 for any other graph."""
    rows = {item.argument: item.type.sizes(graph.batch)[1:] for item in graph.inputs if item.type.dtype == "int64"}
    lengths = {row[0] for row in rows.values() if len(row) == 1}
    return lengths.pop() if rows.keys() == {"input_ids", "labels"} and len(lengths) == 1 else 0


def token_windows(
    path: Path, graph: Graph, vocabulary: int, encode: Encode | None = None, separator: int | None = None
) -> ArrayBatches:
    """Return batches of the text in a file or folder: rows of `token_length` tokens, which are the labels as well.

    Raises UsageError as `token_batches` does, and if there is not one whole row.
    """
    ids_NT = token_batches(path, vocabulary, encode, separator).windows(token_length(graph))
    return ArrayBatches({item.argument: ids_NT for item in graph.inputs}, *_ends(graph))


def _ends(graph: Graph) -> tuple[list[str], list[str]]:
    """Return the names of the arrays that the first units take, and of those that the last one takes."""
    layout, argument_of = Layout(graph), {item.name: item.argument for item in graph.inputs}
    inputs, labels = (
        [argument_of[value.ref.name] for value in values] for values in (layout.boundaries[0], layout.labels)
    )
    return inputs, labels


def _label_shares(path: Path, graph: Graph, arrays: Mapping[str, np.ndarray]) -> list[LabelShares]:
    """Return the share function of each mean over labels in the loss; empty if all microbatches have equal shares.

    Raises UsageError if no label counts, or if label counts are uneven and the loss is not linear in their mean.
    """
    rows = ROWS if graph.any_batch else graph.batch
    samples = len(next(iter(arrays.values())))

    def batches(names: Sequence[str]) -> Iterator[dict[str, Tensor]]:
        for first in range(0, samples, rows):
            numbers = np.arange(first, first + rows if not graph.any_batch else min(first + rows, samples)) % samples
            yield {name: torch.from_numpy(arrays[name][numbers]) for name in names}

    for mean in obstructed_means(graph):
        if mean.is_uneven(batches(mean.inputs)):
            raise UsageError(
                f"{path} leaves labels out, and the loss takes their mean through {mean.obstacle}, so that it cannot be made of "
                "microbatches: found the swarm with a loss that is a sum of means, or give data without -100"
            )
    means = label_means(graph)
    uneven = [mean.is_uneven(batches(mean.inputs)) for mean in means]
    return [mean.shares for mean in means] if any(uneven) else []


def _fitting(path: Path, array: np.ndarray, item: GraphInput, batch: int) -> np.ndarray:
    """Return the array in the input's dtype. Raises UsageError if shape or dtype do not fit."""
    row = item.type.sizes(batch)[1:]
    if array.ndim == 0 or array.shape[1:] != row:
        raise UsageError(
            f"{path}: {item.argument!r} has the shape {array.shape}, but the model takes samples of shape {row}: "
            "the first dimension counts the samples"
        )
    try:
        dtype = np.dtype(item.type.dtype)
    except TypeError:
        raise UsageError(
            f"the model's input {item.argument!r} is {item.type.dtype}, "
            "which numpy does not have; export the module with another dtype"
        ) from None
    if array.dtype.kind != dtype.kind and not np.can_cast(array.dtype, dtype):
        raise UsageError(f"{path}: {item.argument!r} is of {array.dtype}, but the model takes {dtype}; convert it")
    return array.astype(dtype, copy=False)


def input_values(graph: Graph, arrays: Mapping[str, Any]) -> tuple[Tensor, ...]:
    """Return the inputs of a served graph, from arrays by name. Raises UsageError for the first array that does not fit."""
    wanted = [item.argument for item in graph.inputs]
    named = f"the model takes {', '.join(wanted)}, and was given {', '.join(sorted(arrays)) or 'nothing'}"
    for name in (*wanted, *arrays):
        if name not in arrays or name not in wanted:
            raise UsageError(f"{'there is no' if name in wanted else 'the model takes no'} array {name!r}: {named}")
    values = tuple(_as_tensor(arrays[item.argument], item) for item in graph.inputs)
    batch = _batch(graph, values)
    for item, value in zip(graph.inputs, values, strict=True):
        if tuple(value.shape) != item.type.sizes(batch):
            sizes = (
                str(size)
                if isinstance(size, int)
                else "batch"
                if size.coefficients == (0, 1)
                else "a size of the batch's"
                for size in item.type.shape
            )
            fixed = "" if graph.any_batch else f", for it was exported for batches of {batch} only"
            raise UsageError(
                f"{item.argument!r} has the shape {tuple(value.shape)}, but the model takes ({', '.join(sizes)}){fixed}"
                + (f"; the batch is {batch} here" if graph.any_batch and len(values) > 1 else "")
            )
    return values


def output_arrays(graph: Graph, values: Sequence[Tensor]) -> dict[str, np.ndarray]:
    """Return the outputs by name as numpy arrays; bfloat16 is widened to float32."""
    near = (value.detach().cpu() for value in values)
    wide = (value.float() if value.dtype is torch.bfloat16 else value for value in near)
    by_ref = dict(zip(graph.results, wide, strict=True))
    return {output.name: by_ref[output.value].numpy() for output in graph.outputs}


def _batch(graph: Graph, values: Sequence[Tensor]) -> int:
    """Return the batch size, from the first input that shows it. Raises UsageError if there are no samples."""
    batch = graph.batch
    for item, value in zip(graph.inputs, values, strict=True):
        if graph.any_batch and item.type.tells_batch and value.dim() == len(item.type.shape):
            batch = item.type.batch_of(tuple(value.shape))
            break
    if batch < 1:
        raise UsageError("the arrays hold no samples; give at least one")
    return batch


def _as_tensor(array: Any, item: GraphInput) -> Tensor:
    """Return an array as a tensor of the input's dtype. Floats may be rounded.

    Raises UsageError if it is no array, of another kind, holds NaN, or whole numbers beyond the dtype's range.
    """
    try:
        array = np.ascontiguousarray(array) if np.ndim(array) else np.asarray(array)
    except ValueError as error:
        raise UsageError(f"{item.argument!r} is not an array: {error}; give rows of equal length") from None
    dtype: torch.dtype = torch_constant(item.type.dtype)
    kinds = "f" if dtype.is_floating_point else "b" if dtype is torch.bool else "iub"
    if array.dtype.kind not in kinds:
        raise UsageError(f"{item.argument!r} is of {array.dtype}, but the model takes {item.type.dtype}; convert it")
    if kinds == "f" and np.isnan(array).any():
        raise UsageError(f"{item.argument!r} holds NaN; remove NaN from the data")
    if kinds == "iub" and array.size:
        least, most = int(array.min()), int(array.max())
        bounds = torch.iinfo(dtype)
        if least < bounds.min or most > bounds.max:
            raise UsageError(
                f"{item.argument!r} holds numbers that {item.type.dtype} does not have; give numbers in its range"
            )
    if array.dtype.kind == "u":
        array = array.astype(np.int64)  # torch has few operators for unsigned numbers
    if array.dtype.kind == "f" and array.dtype.itemsize > 8:
        array = array.astype(np.float64)
    return torch.from_numpy(array.copy()).to(dtype)


def described(values: Sequence[Tensor]) -> list[Described]:
    """Return the dtype and shape of each tensor."""
    return [(value.dtype, tuple(value.shape)) for value in values]


def descriptions_of(infos: Sequence[TensorInfo]) -> list[Described]:
    """Return the dtype and shape of each tensor that a peer sends, by its own description.

    Raises ProtocolError if it compresses one: the decompressed tensor might take any memory.
    """
    if any(info.codec != Codec.NONE for info in infos):
        raise ProtocolError("the values of a pass must be sent uncompressed")
    return [(TORCH_DTYPE[info.dtype], info.shape) for info in infos]


def batch_of(layout: Layout, number: int, values: Sequence[Described]) -> int:
    """Return the batch size of the values before unit `number`. Raises ProtocolError if they do not fit that boundary."""
    batch = layout.graph.batch
    if layout.graph.any_batch:
        for value, (_, shape) in zip(layout.boundaries[number], values, strict=False):
            if value.type.tells_batch and len(shape) == len(value.type.shape):
                batch = value.type.batch_of(shape)
                break
    check_values(layout, number, values, batch)
    return batch


def check_values(layout: Layout, number: int, values: Sequence[Described], batch: int) -> None:
    """Raise ProtocolError if `values` do not fit the boundary before unit `number` for a batch of `batch` samples."""
    if batch < 1:
        raise ProtocolError("a batch has no samples")
    _check(layout.boundaries[number], values, batch, f"at boundary {number}", any_batch=layout.graph.any_batch)


def check_labels(layout: Layout, labels: Sequence[Described], batch: int) -> None:
    """Raise ProtocolError if `labels` are not those that the last unit takes for `batch` samples."""
    _check(layout.labels, labels, batch, "among the labels", any_batch=layout.graph.any_batch)


def _check(wanted: Sequence[Value], values: Sequence[Described], batch: int, where: str, *, any_batch: bool) -> None:
    if len(values) != len(wanted):
        raise ProtocolError(f"{len(values)} values {where} of the graph; it needs {len(wanted)}")
    for value, (dtype, shape) in zip(wanted, values, strict=True):
        text = text_of((dtype, shape))
        if len(shape) != len(value.type.shape) or not _fits(dtype, value.type.dtype):
            raise ProtocolError(f"{value.ref.name} is {text} {where}, not {value.type}")
        sizes = value.type.sizes(batch)
        if shape != sizes:
            hint = "" if any_batch else f" (the module was exported for batches of {batch} only)"
            raise ProtocolError(f"{value.ref.name} is {text} {where}, not {sizes}{hint}")


def check_travel(layout: Layout) -> None:
    """Raise CheckpointError if a value crosses a boundary in a dtype that frames do not carry."""
    for number, boundary in enumerate(layout.boundaries):
        for value in boundary:
            if wire_dtype(value.type) not in DTYPE_OF:
                raise CheckpointError(
                    f"{value.ref.name} at boundary {number} is {value.type.dtype}, "
                    "which cannot be sent to other peers; convert it in the module"
                )


def wire_dtype(kind: TensorType) -> torch.dtype:
    """Return the dtype of a value in transit: uint8 for booleans, else its own."""
    dtype: torch.dtype = torch_constant(kind.dtype)
    return torch.uint8 if dtype is torch.bool else dtype


def to_wire(values: Sequence[Tensor]) -> list[Tensor]:
    """Return the values as they are sent: booleans as uint8, others unchanged."""
    return [value.to(torch.uint8) if value.dtype is torch.bool else value for value in values]


def from_wire(layout: Layout, number: int, values: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return the values of a boundary in the graph's own dtypes, after transit."""
    wanted = (torch_constant(value.type.dtype) for value in layout.boundaries[number])
    return tuple(value.to(dtype) for value, dtype in zip(values, wanted, strict=True))


def text_of(described: Described) -> str:
    """Describe a tensor as in "float32 (2, 3)"."""
    dtype, shape = described
    return f"{str(dtype).removeprefix('torch.')} {shape}"


def _fits(dtype: torch.dtype, wanted: str) -> bool:
    """Return whether a dtype fits: floats of any precision (autocast may change it), and uint8 for booleans, fit as well."""
    own = torch_constant(wanted)
    if not isinstance(own, torch.dtype):
        return False
    both_floats = dtype.is_floating_point and own.is_floating_point
    return dtype == own or both_floats or (own is torch.bool and dtype is torch.uint8)
