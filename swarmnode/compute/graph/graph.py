"""Graph: a module's forward pass as a list of operators, from its inputs to its mean loss (in training mode) or to its outputs
(in evaluation mode). It is data, without code.

Every value has a name: an input's, a weight's or a node's. Sizes that grow with the batch are polynomials of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeGuard, Union

import msgspec

FORMAT = 1

PARAMETER = "parameter"
BUFFER = "buffer"  # changes in training
CONSTANT = "constant"

NAMED = "kwargs_"  # prefix of torch.export's name for an argument given by name


class Poly(msgspec.Struct, frozen=True, tag_field="is", tag="size"):
    """Integer that depends on the batch: c0 + c1 * batch + c2 * batch^2 ..."""

    coefficients: tuple[int, ...]

    def at(self, batch: int) -> int:
        """Return the value for a batch of `batch` samples."""
        return sum(coefficient * batch**power for power, coefficient in enumerate(self.coefficients))


Size = Union[int, Poly]


class Ref(msgspec.Struct, frozen=True, tag_field="is", tag="value"):
    """Reference to a value. `item` is its place among several results of a node; None if the node has one."""

    name: str
    item: int | None = None


class Real(msgspec.Struct, frozen=True, tag_field="is", tag="real"):
    """Float that JSON cannot write: "inf", "-inf" or "nan"."""

    text: str


class Constant(msgspec.Struct, frozen=True, tag_field="is", tag="torch"):
    """Dtype, memory format or layout of torch, by name."""

    name: str


class Here(msgspec.Struct, frozen=True, tag_field="is", tag="device"):
    """Placeholder, among an operator's arguments, for the device that the graph runs on."""


Atom = Union[None, bool, int, float, str, Ref, Poly, Real, Constant, Here]
Argument = Union[None, bool, int, float, str, Ref, Poly, Real, Constant, Here, list[Atom]]


class TensorType(msgspec.Struct, frozen=True):
    """Dtype and shape of a value in a graph; sizes may depend on the batch."""

    dtype: str
    shape: tuple[Size, ...]

    def sizes(self, batch: int) -> tuple[int, ...]:
        """Return the shape for a batch of `batch` samples."""
        return tuple(size_at(size, batch) for size in self.shape)

    @property
    def tells_batch(self) -> bool:
        """Whether a tensor's shape shows the size of the batch."""
        return any(map(_is_multiple, self.shape))

    def batch_of(self, shape: tuple[int, ...]) -> int:
        """Return the batch of a tensor of that shape. Only if `tells_batch`."""
        return next(
            actual // size.coefficients[1] for size, actual in zip(self.shape, shape, strict=True) if _is_multiple(size)
        )


class GraphInput(msgspec.Struct, frozen=True):
    """Input of the module. A graph lists its inputs in the order of a batch's values."""

    name: str
    type: TensorType

    @property
    def argument(self) -> str:
        """Name of the input in the module's own code, and of its array in the data."""
        return self.name.removeprefix(NAMED)


class Weight(msgspec.Struct, frozen=True):
    """A tensor of the weights' file. `tensor` is its name there and in the module's state dict.

    `values`: its elements, if labels are counted by them."""

    name: str
    tensor: str
    kind: str
    trained: bool
    type: TensorType
    values: tuple[float, ...] | msgspec.UnsetType = msgspec.UNSET


class OperatorCall(msgspec.Struct, frozen=True):
    """Call of an operator. `types` are those of its results; None for a result that is no tensor."""

    name: str
    operator: str
    args: tuple[Argument, ...]
    kwargs: dict[str, Argument]
    types: tuple[TensorType | None, ...]

    def refs(self) -> Iterator[Ref]:
        """Yield references to the values that the operator takes."""
        for argument in (*self.args, *self.kwargs.values()):
            for atom in argument if isinstance(argument, list) else (argument,):
                if isinstance(atom, Ref):
                    yield atom


class GraphOutput(msgspec.Struct, frozen=True):
    """Output of the module in evaluation mode, with its name for users."""

    name: str
    value: Ref


class BufferUpdate(msgspec.Struct, frozen=True):
    """Update of a buffer (its value's name) by a value, at the end of the pass."""

    buffer: str
    value: Ref


class Graph(msgspec.Struct, frozen=True):
    """Graph of a module's forward pass. `cuts` are the numbers of the nodes at which the units after the first begin.

    `batch` is the example's; unless `any_batch`, no other one works. A trained graph has a `loss`, a served graph has `outputs`.
    """

    inputs: tuple[GraphInput, ...]
    weights: tuple[Weight, ...]
    nodes: tuple[OperatorCall, ...]
    moves: tuple[BufferUpdate, ...]
    loss: Ref | None
    batch: int
    any_batch: bool
    cuts: tuple[int, ...] = ()
    format: int = FORMAT
    outputs: tuple[GraphOutput, ...] = ()

    def __repr__(self) -> str:
        batch = "any batch" if self.any_batch else f"batches of {self.batch}"
        return f"Graph({len(self.nodes)} nodes in {self.units} units, {len(self.weights)} weights, {batch})"

    @property
    def sources(self) -> tuple[tuple[str, TensorType], ...]:
        """Names and types of the values that exist before any node computes: inputs, then weights."""
        return tuple((item.name, item.type) for item in self.inputs) + tuple(
            (weight.name, weight.type) for weight in self.weights
        )

    @property
    def results(self) -> tuple[Ref, ...]:
        """Values that the graph returns: its loss, or its outputs, each value once."""
        wanted = [output.value for output in self.outputs] if self.loss is None else [self.loss]
        return tuple(dict.fromkeys(wanted))

    @property
    def units(self) -> int:
        """Number of units."""
        return len(self.cuts) + 1


def size_at(size: Size, batch: int) -> int:
    """Return a size for a batch of `batch` samples."""
    return size if isinstance(size, int) else size.at(batch)


def _is_multiple(size: Size) -> TypeGuard[Poly]:
    return isinstance(size, Poly) and len(size.coefficients) == 2 and size.coefficients[0] == 0 < size.coefficients[1]
