"""Graph: a module's forward pass as a list of operators: in training mode from its inputs to its mean loss, or in evaluation mode
to its outputs. Data, no code.

Every value has a name: an input's, a weight's or a node's. Sizes that grow with the batch are polynomials of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeGuard, Union

import msgspec

FORMAT = 1

PARAMETER = "parameter"
BUFFER = "buffer"  # moves in training
CONSTANT = "constant"

NAMED = "kwargs_"  # torch.export's name for an argument that was given by name begins so


class Poly(msgspec.Struct, frozen=True, tag_field="is", tag="size"):
    """An integer that depends on the batch: c0 + c1 * batch + c2 * batch^2 ..."""

    coefficients: tuple[int, ...]

    def at(self, batch: int) -> int:
        """Its value for a batch of so many samples."""
        return sum(coefficient * batch**power for power, coefficient in enumerate(self.coefficients))


Size = Union[int, Poly]


class Ref(msgspec.Struct, frozen=True, tag_field="is", tag="value"):
    """A value; `item`: one of several that a node returns."""

    name: str
    item: int | None = None


class Real(msgspec.Struct, frozen=True, tag_field="is", tag="real"):
    """A float that JSON cannot write: "inf", "-inf" or "nan"."""

    text: str


class Constant(msgspec.Struct, frozen=True, tag_field="is", tag="torch"):
    """A dtype, memory format or layout of torch, by name."""

    name: str


class Here(msgspec.Struct, frozen=True, tag_field="is", tag="device"):
    """The device that the graph runs on."""


Atom = Union[None, bool, int, float, str, Ref, Poly, Real, Constant, Here]
Argument = Union[None, bool, int, float, str, Ref, Poly, Real, Constant, Here, list[Atom]]


class TensorType(msgspec.Struct, frozen=True):
    """dtype and shape of a value."""

    dtype: str
    shape: tuple[Size, ...]

    def sizes(self, batch: int) -> tuple[int, ...]:
        """The shape for a batch of so many samples."""
        return tuple(size_at(size, batch) for size in self.shape)

    @property
    def tells_batch(self) -> bool:
        """Whether the batch can be read off a tensor's shape."""
        return any(map(_is_multiple, self.shape))

    def batch_of(self, shape: tuple[int, ...]) -> int:
        """The batch of a tensor of that shape; only where `tells_batch`."""
        return next(
            actual // size.coefficients[1] for size, actual in zip(self.shape, shape, strict=True) if _is_multiple(size)
        )


class GraphInput(msgspec.Struct, frozen=True):
    """An input of the module, in the order in which the data has them."""

    name: str
    type: TensorType

    @property
    def argument(self) -> str:
        """What the module's own code calls it; an array of the data has this name."""
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
    """One call of an operator. `types`: of what it returns; None where that is no tensor."""

    name: str
    operator: str
    args: tuple[Argument, ...]
    kwargs: dict[str, Argument]
    types: tuple[TensorType | None, ...]

    def refs(self) -> Iterator[Ref]:
        """The values that it takes."""
        for argument in (*self.args, *self.kwargs.values()):
            for atom in argument if isinstance(argument, list) else (argument,):
                if isinstance(atom, Ref):
                    yield atom


class GraphOutput(msgspec.Struct, frozen=True):
    """An output of the module in evaluation mode, by the name under which people find it."""

    name: str
    value: Ref


class BufferUpdate(msgspec.Struct, frozen=True):
    """At the end of the pass, the buffer of that value name takes over a value."""

    buffer: str
    value: Ref


class Graph(msgspec.Struct, frozen=True):
    """See the module. `cuts`: the numbers of the nodes at which units begin, but for the first.

    `batch` is the example's; where `any_batch` is false, no other one works. A graph that is trained has a `loss`, one that is
    served has `outputs`.
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
        """Names and types of the values that are there before any node computes: inputs, then weights."""
        return tuple((item.name, item.type) for item in self.inputs) + tuple(
            (weight.name, weight.type) for weight in self.weights
        )

    @property
    def results(self) -> tuple[Ref, ...]:
        """What is left in the end, each value once."""
        wanted = [output.value for output in self.outputs] if self.loss is None else [self.loss]
        return tuple(dict.fromkeys(wanted))

    @property
    def units(self) -> int:
        """Number of units."""
        return len(self.cuts) + 1


def size_at(size: Size, batch: int) -> int:
    """A size for a batch of so many samples."""
    return size if isinstance(size, int) else size.at(batch)


def _is_multiple(size: Size) -> TypeGuard[Poly]:
    return isinstance(size, Poly) and len(size.coefficients) == 2 and size.coefficients[0] == 0 < size.coefficients[1]
