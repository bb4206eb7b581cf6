"""The data of a training, as its model takes it: text as tokens for a language model, named arrays for a graph."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from swarmnode.compute.graph.arrays import read_arrays
from swarmnode.compute.graph.graph import Graph, GraphInput
from swarmnode.compute.graph.layout import Layout
from swarmnode.compute.training.datasets.batches import ArrayBatches, TokenBatches
from swarmnode.compute.training.datasets.corpus import BYTE_VOCABULARY, Encode, read_corpus
from swarmnode.errors import UsageError


def token_batches(
    path: Path, vocabulary: int, encode: Encode | None = None, separator: int | None = None
) -> TokenBatches:
    """The text in a file or folder for a model of that vocabulary. Without `encode` each byte is a token.

    Raises UsageError where there is no text, or where it has tokens that the model does not know.
    """
    if encode is None and vocabulary < BYTE_VOCABULARY:
        raise UsageError(
            f"vocabulary mismatch: the swarm has no tokenizer, so each byte of the text is a token, and the model knows "
            f"{vocabulary} tokens, not {BYTE_VOCABULARY}"
        )
    return TokenBatches(read_corpus(path, encode, separator), vocabulary)


def array_batches(path: Path, graph: Graph) -> ArrayBatches:
    """The arrays of an .npz file that a graph's inputs name, one row a sample. Raises UsageError where they do not fit."""
    arrays = read_arrays(path)
    wanted = [item.argument for item in graph.inputs]
    missing = [name for name in wanted if name not in arrays]
    if missing:
        raise UsageError(
            f"{path} has no array {missing[0]!r}: the model takes {', '.join(wanted)}, "
            f"the file has {', '.join(sorted(arrays)) or 'none'}"
        )
    layout, argument_of = Layout(graph), {item.name: item.argument for item in graph.inputs}
    return ArrayBatches(
        {item.argument: _fitting(path, arrays[item.argument], item, graph.batch) for item in graph.inputs},
        *([argument_of[value.ref.name] for value in values] for values in (layout.boundaries[0], layout.labels)),
    )


def _fitting(path: Path, array: np.ndarray, item: GraphInput, batch: int) -> np.ndarray:
    """The array in the input's dtype."""
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
            f"the model's input {item.argument!r} is {item.type.dtype}, which numpy does not have"
        ) from None
    if array.dtype.kind != dtype.kind and not np.can_cast(array.dtype, dtype):
        raise UsageError(f"{path}: {item.argument!r} is of {array.dtype}, but the model takes {dtype}")
    return array.astype(dtype)
