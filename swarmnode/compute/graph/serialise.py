"""File of a graph: JSON that names operators and values, beside the weights as safetensors. No code, no pickle.

Everything is checked before it is used: sizes, names, that values exist before they are used, and that every operator is listed
in `graph.py`.
"""

from __future__ import annotations

import math
from functools import cached_property
from itertools import pairwise
from pathlib import Path

import msgspec
import torch

from swarmnode.compute.graph.boundary import Layout
from swarmnode.compute.graph.exporting.reader import Exported
from swarmnode.compute.graph.graph import (
    BUFFER,
    CONSTANT,
    FORMAT,
    PARAMETER,
    Constant,
    Graph,
    OperatorCall,
    Poly,
    Real,
    Ref,
    Size,
    TensorType,
    resolve,
    torch_constant,
)
from swarmnode.compute.model.checkpoint import SINGLE_FILE, Checkpoint
from swarmnode.errors import CheckpointError

GRAPH_FILE = "graph.json"
MAX_GRAPH_BYTES = 64 << 20
MAX_NODES = 1 << 17
MAX_WEIGHTS = 1 << 17
MAX_UNITS = 4096
MAX_INPUTS = 256
MAX_OUTPUTS = 256
MAX_ARGUMENTS = 64
MAX_LIST = 4096
MAX_RESULTS = 4096
MAX_DIMENSIONS = 16
MAX_DEGREE = 4
MAX_NUMBER = 1 << 62
MAX_TEXT = 1024
_KINDS = (PARAMETER, BUFFER, CONSTANT)
_REALS = ("inf", "-inf", "nan")
_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(Graph)


def write_graph(exported: Exported, folder: Path) -> None:
    """Write graph.json and model.safetensors into an existing folder. Raises CheckpointError if the graph is beyond the bounds."""
    from safetensors.torch import save_file

    raw = encode_graph(exported.graph)
    weights = {
        name: tensor.detach().clone(memory_format=torch.contiguous_format) for name, tensor in exported.weights.items()
    }
    save_file(weights, folder / SINGLE_FILE)
    (folder / GRAPH_FILE).write_bytes(raw)


def read_graph(folder: Path) -> Graph:
    """Read the graph in `folder`. Raises CheckpointError if it is missing, damaged, or asks for something that a graph may not."""
    file = folder / GRAPH_FILE
    try:
        with file.open("rb") as stream:
            raw = stream.read(MAX_GRAPH_BYTES + 1)
    except OSError as error:
        raise CheckpointError(f"{file}: not readable: {error}; check its name and permissions") from None
    try:
        return decode_graph(raw)
    except CheckpointError as error:
        raise CheckpointError(f"{file}: {error}") from None


def encode_graph(graph: Graph) -> bytes:
    """Encode a graph as JSON. Raises CheckpointError if it is beyond the bounds."""
    check_graph(graph)
    raw = msgspec.json.format(_encoder.encode(graph), indent=0)
    if len(raw) > MAX_GRAPH_BYTES:
        raise CheckpointError(
            f"a graph of {len(raw)} bytes is over the bound of {MAX_GRAPH_BYTES}; export a smaller module"
        )
    return raw


def decode_graph(raw: bytes) -> Graph:
    """Decode a graph and check it. Raises CheckpointError if it is damaged, invalid or too large."""
    if len(raw) > MAX_GRAPH_BYTES:
        raise CheckpointError(f"the graph has more than the bound of {MAX_GRAPH_BYTES} bytes; export a smaller module")
    try:
        graph = _decoder.decode(raw)
    except (msgspec.DecodeError, RecursionError, OverflowError, UnicodeDecodeError) as error:
        raise CheckpointError(f"the graph is damaged: {error}; fetch the file again") from None
    check_graph(graph)
    return graph


def _invalid(what: str) -> CheckpointError:
    return CheckpointError(f"{what}; export the module again")


def check_graph(graph: Graph) -> None:
    """Raise CheckpointError for the first fault of a graph."""
    rules = {
        f"to be of format {FORMAT}": graph.format == FORMAT,
        "a bounded number of inputs": 0 < len(graph.inputs) <= MAX_INPUTS,
        "a bounded number of weights": len(graph.weights) <= MAX_WEIGHTS,
        "a bounded number of nodes": 0 < len(graph.nodes) <= MAX_NODES,
        "a bounded number of units": graph.units <= MAX_UNITS,
        "units of at least one node": all(
            before < after for before, after in pairwise((0, *graph.cuts, len(graph.nodes)))
        ),
        "a batch of at least one sample": 0 < graph.batch <= MAX_NUMBER,
        "every weight once": len({weight.tensor for weight in graph.weights}) == len(graph.weights),
    }
    for rule, kept in rules.items():
        if not kept:
            raise _invalid(f"the graph is not valid: it needs {rule}")
    result_counts = _check_names(graph)
    for node in graph.nodes:
        _check_node(node, result_counts)
        result_counts[node.name] = len(node.types)
    kinds = {weight.name: weight.kind for weight in graph.weights}
    for move in graph.moves:
        _check_ref(move.value, result_counts)
        if kinds.get(move.buffer) != BUFFER:
            raise _invalid(f"the graph writes into {move.buffer[:MAX_TEXT]!r}, which is not a buffer")
    if (graph.loss is None) == (not graph.outputs) or len(graph.outputs) > MAX_OUTPUTS:
        raise _invalid(f"the graph needs a loss, or 1 to {MAX_OUTPUTS} outputs")
    names: dict[str, int] = {}
    for output in graph.outputs:
        _check_name(output.name, names)
        names[output.name] = 1
    for ref in graph.results:
        _check_ref(ref, result_counts)
        if ref.name in kinds:
            raise _invalid("the graph returns a weight as its result")
    if graph.loss is not None and graph.loss.name not in {node.name for node in graph.nodes}:
        raise _invalid("the graph's loss is not a result of an operator")


def _check_names(graph: Graph) -> dict[str, int]:
    """Return the values that exist from the start, with their number of results. Raises CheckpointError for invalid ones."""
    for weight in graph.weights:
        if weight.kind not in _KINDS or (weight.trained and weight.kind != PARAMETER):
            raise CheckpointError(
                f"the graph's weight {weight.tensor[:MAX_TEXT]!r} has an "
                "unknown kind; upgrade swarmnode, or export the module again"
            )
        if not all(isinstance(size, int) for size in weight.type.shape):
            raise _invalid(f"the graph's weight {weight.tensor[:MAX_TEXT]!r} depends on the batch")
        if weight.values and len(weight.values) != math.prod(weight.type.sizes(1)):
            raise _invalid(f"the graph has a wrong number of elements of {weight.tensor[:MAX_TEXT]!r}")
    known: dict[str, int] = {}
    for name, kind in graph.sources:
        _check_type(kind)
        _check_name(name, known)
        known[name] = 1
    return known


def _check_node(node: OperatorCall, result_counts: dict[str, int]) -> None:
    _check_name(node.name, result_counts)
    resolve(node.operator)
    if len(node.args) + len(node.kwargs) > MAX_ARGUMENTS or not 0 < len(node.types) <= MAX_RESULTS:
        raise _invalid(f"the graph's operator {node.name} has too many arguments or results")
    for argument in (*node.args, *node.kwargs.values()):
        if isinstance(argument, list) and len(argument) > MAX_LIST:
            raise CheckpointError(
                f"the graph's operator {node.name} has a list of {len(argument)} "
                "arguments, which is too long; export a smaller module"
            )
        for atom in argument if isinstance(argument, list) else (argument,):
            if isinstance(atom, Ref):
                _check_ref(atom, result_counts)
            elif isinstance(atom, Constant):
                torch_constant(atom.name)
            elif isinstance(atom, Poly):
                _check_size(atom)
            elif isinstance(atom, Real) and atom.text not in _REALS:
                raise _invalid("the graph has an invalid float")
            elif isinstance(atom, str) and len(atom) > MAX_TEXT:
                raise CheckpointError("the graph has a text that is too long; export the module with shorter names")
            elif isinstance(atom, float) and not math.isfinite(atom):
                raise _invalid("the graph has an infinite float or NaN as a plain number")
    for kind in node.types:
        if kind is not None:
            _check_type(kind)


def _check_ref(ref: Ref, result_counts: dict[str, int]) -> None:
    results = result_counts.get(ref.name, 0)
    if results == 0 or (ref.item is None) != (results == 1) or not 0 <= (ref.item or 0) < results:
        raise _invalid(f"the graph uses the value {ref.name[:MAX_TEXT]!r} before it exists")


def _check_name(name: str, result_counts: dict[str, int]) -> None:
    if not 0 < len(name) <= MAX_TEXT or not name.isprintable() or name in result_counts:
        raise _invalid(f"the graph has two values named {name[:MAX_TEXT]!r}, or the name is invalid")


def _check_type(kind: TensorType) -> None:
    if not isinstance(torch_constant(kind.dtype), torch.dtype) or len(kind.shape) > MAX_DIMENSIONS:
        raise _invalid("the graph has a value of an impossible type")
    for size in kind.shape:
        _check_size(size)


def _check_size(size: Size) -> None:
    numbers = (size,) if isinstance(size, int) else size.coefficients
    if not 0 < len(numbers) <= MAX_DEGREE + 1 or any(abs(number) > MAX_NUMBER for number in numbers):
        raise _invalid("the graph has an impossible size")


class GraphCheckpoint(Checkpoint):
    """Checkpoint of a graph: its tensors by name and by unit. It has no config and no family. Raises CheckpointError."""

    @cached_property
    def graph(self) -> Graph:
        """Graph of the checkpoint, checked. Raises CheckpointError if it is missing or invalid."""
        return read_graph(self.path)

    @cached_property
    def layout(self) -> Layout:
        """Layout: computation and weights of each unit. Raises CheckpointError if units cannot share a weight."""
        return Layout(self.graph)

    @property
    def units(self) -> int:
        """Number of units."""
        return self.graph.units

    @cached_property
    def float_dtypes(self) -> frozenset[str]:
        """Names of the dtypes of the graph's floating-point weights, in which it computes."""
        return frozenset(weight.type.dtype for weight in self.graph.weights if "float" in weight.type.dtype)

    def tensors_of(self, start: int, end: int) -> list[str]:
        """Return the names of the tensors that units [start, end) need."""
        held = {name for unit in self.layout.units[start:end] for name in unit.weights}
        return [weight.tensor for weight in self.graph.weights if weight.name in held]
