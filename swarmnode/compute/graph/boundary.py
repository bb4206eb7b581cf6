"""Check of tensors against the values of a graph's boundary, by their descriptions alone, and conversion of arrays to them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from swarmnode.codec.tensors import Codec, TensorInfo
from swarmnode.compress.codecs import DTYPE_OF, TORCH_DTYPE
from swarmnode.compute.graph.graph import Graph, GraphInput, Size, TensorType
from swarmnode.compute.graph.label_count import label_means, obstructed_means
from swarmnode.compute.graph.layout import Layout, Value
from swarmnode.compute.graph.operators import torch_constant
from swarmnode.compute.training.datasets.batches import ArrayBatches, Encode, LabelShares, token_batches
from swarmnode.data.arrays import load_arrays
from swarmnode.data.samples import ARRAYS_SUFFIX
from swarmnode.errors import CheckpointError, ProtocolError, UsageError

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
            fixed = "" if graph.any_batch else f", for it was exported for batches of {batch} only"
            raise UsageError(
                f"{item.argument!r} has the shape {tuple(value.shape)}, but the model takes {_shape_text(item)}{fixed}"
                + (f"; the batch is {batch} here" if graph.any_batch and len(values) > 1 else "")
            )
    return values


def output_arrays(graph: Graph, values: Sequence[Tensor]) -> dict[str, np.ndarray]:
    """Return the outputs by name as numpy arrays; bfloat16 is widened to float32."""
    by_ref = dict(zip(graph.results, values, strict=True))
    return {output.name: _as_array(by_ref[output.value]) for output in graph.outputs}


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


def _as_array(value: Tensor) -> np.ndarray:
    value = value.detach().cpu()
    return (value.float() if value.dtype is torch.bfloat16 else value).numpy()


def _shape_text(item: GraphInput) -> str:
    """Return the shape as a text, as "(batch, 3, 8)"."""

    def text(size: Size) -> str:
        return (
            str(size) if isinstance(size, int) else "batch" if size.coefficients == (0, 1) else "a size of the batch's"
        )

    return f"({', '.join(map(text, item.type.shape))})"


def described(values: Sequence[Tensor]) -> list[Described]:
    """Return the dtype and shape of each tensor."""
    return [(value.dtype, tuple(value.shape)) for value in values]


def told(infos: Sequence[TensorInfo]) -> list[Described]:
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
