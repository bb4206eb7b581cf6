"""GraphSegment: trains and serves units of a graph. It interprets: operators are looked up once, then called in order."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from swarmnode.compute.graph.boundary import batch_of, check_labels, described, text_of
from swarmnode.compute.graph.graph import Argument, Graph, OperatorCall, Poly, Ref, TensorType
from swarmnode.compute.graph.label_count import WeighedMeans
from swarmnode.compute.graph.layout import Layout, Unit, Value, taken
from swarmnode.compute.graph.operators import (
    argument_value,
    draws_by_device,
    gives_list,
    is_random,
    resolve,
    torch_constant,
)
from swarmnode.compute.graph.ranges import RangeCheck
from swarmnode.compute.graph.serialise import GraphCheckpoint
from swarmnode.compute.training.randomness import CounterDropout, reseed
from swarmnode.compute.training.saved_activations import is_finite
from swarmnode.compute.training.segment import Segment, Shares, Values
from swarmnode.errors import CheckpointError, ProtocolError


@dataclass(frozen=True)
class _Slot:
    """Number of the place where a value is stored while a piece of a graph computes."""

    number: int


@dataclass(frozen=True)
class _Call:
    """Operator with its arguments. `results`: its results and their slots; `done`: slots that no later call needs."""

    function: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    results: tuple[tuple[int | None, int], ...]
    done: tuple[int, ...]


@dataclass(frozen=True)
class _Program:
    """Unit, ready to run. `moves`: buffers and the slots of their new values."""

    calls: tuple[_Call, ...]
    moves: tuple[tuple[Tensor, int], ...]
    is_random: bool


class GraphSegment(Segment):
    """Units [start, end) of a graph. `weights` are by their names in the state dict; they are taken over, not copied.

    Without `counts_dropout`, dropout draws from torch's generators, as the module's own does.
    """

    def __init__(
        self,
        graph: Graph,
        weights: Mapping[str, Tensor],
        start: int,
        end: int,
        *,
        device: torch.device | str = "cpu",
        counts_dropout: bool = True,
    ) -> None:
        self.graph = graph
        self.layout = Layout(graph)
        self.start, self.end, self.units = start, end, graph.units
        self.device = torch.device(device)
        self._slots: dict[Ref, int] = {}
        self._ranges = RangeCheck()
        self._means = WeighedMeans(graph)
        self.means = len(self._means)
        self._dropout = CounterDropout() if counts_dropout else None
        self.is_portable = not any(draws_by_device(node.operator, node.args) for node in graph.nodes)
        held = {name for unit in self.layout.units[start:end] for name in unit.weights}
        self._weights = {weight.name: weight for weight in graph.weights if weight.name in held}
        self._tensors = {
            name: _as_weight(weights[weight.tensor].to(self.device), weight.trained, weight.type, weight.tensor)
            for name, weight in self._weights.items()
        }
        self._programs = {number: self._compile(self.layout.units[number], number) for number in range(start, end)}
        places = {self._slot(Ref(name)): tensor for name, tensor in self._tensors.items()}
        self._template: list[Any] = [places.get(slot) for slot in range(len(self._slots))]

    def __repr__(self) -> str:
        return f"GraphSegment([{self.start}:{self.end}) of {self.units} units on {self.device})"

    def parameters(self) -> Mapping[int, Mapping[str, nn.Parameter]]:
        """Return the trained parameters, see `Segment`. Parameters that the module's author froze are left out."""
        blocks: dict[int, dict[str, nn.Parameter]] = {}
        for name, tensor in self._tensors.items():
            if isinstance(tensor, nn.Parameter):
                blocks.setdefault(self.layout.blocks[name], {})[self._weights[name].tensor] = tensor
        return blocks

    def buffers(self) -> Mapping[int, Mapping[str, Tensor]]:
        """Return the buffers that training updates, see `Segment`."""
        units: dict[int, dict[str, Tensor]] = {}
        for name, unit in self.layout.blocks.items():
            if name in self._tensors and not self._weights[name].trained:
                units.setdefault(unit, {})[self._weights[name].tensor] = self._tensors[name]
        return units

    def forward(
        self, values: Values, start: int, end: int, seed: int, labels: Values = (), shares: Shares = ()
    ) -> Values:
        """Run layers [start, end), as `Segment.forward` describes. Raises ProtocolError for values that are not those of the
        boundary, or out of an operator's range."""
        boundary = self.layout.boundaries[start]
        batch = batch_of(self.layout, start, described(values))
        coming, tensors = boundary, values
        if end == self.units:
            check_labels(self.layout, described(labels), batch)
            coming, tensors = (*boundary, *self.layout.labels), (*values, *labels)
        slots = self._template.copy()
        for value, tensor in zip(coming, tensors, strict=True):
            slots[self._slots[value.ref]] = tensor if value.trained else tensor.detach().to(self.device)
        self._ranges.begin()
        self._means.begin(shares)
        for number in range(start, end):
            self._run(number, slots, batch, seed)
        passing = {value.ref: tensor for value, tensor in zip(coming, tensors, strict=True) if not value.trained}
        leaving = self.layout.boundaries[end]
        outputs = tuple(passing.get(value.ref, slots[self._slots[value.ref]]) for value in leaving)
        if not self._ranges.all_well() and is_finite(outputs):  # NaN is the caller's to see, which may know better
            raise ProtocolError(
                f"layers [{start}:{end}) of the graph cannot work with "
                "this batch: a number is out of range, or an assumption "
                "of the module does not hold"
            )
        return outputs

    def dummies(self, boundary: int, batch: int, sequence: int) -> tuple[Values, Values]:
        """Return made-up values: floats of usual size, all whole numbers 0. See `Segment`."""
        batch = batch if self.graph.any_batch else self.graph.batch
        chance = torch.Generator().manual_seed(boundary)

        def made_up(value: Value) -> Tensor:
            dtype, sizes = torch_constant(value.type.dtype), value.type.sizes(batch)
            return (torch.randn(sizes, generator=chance) if dtype.is_floating_point else torch.zeros(sizes)).to(dtype)

        return tuple(map(made_up, self.layout.boundaries[boundary])), tuple(map(made_up, self.layout.labels))

    def _run(self, number: int, slots: list[Any], batch: int, seed: int) -> None:
        program = self._programs[number]
        if program.is_random:
            reseed(seed, number, self.device)
        dropout = self._dropout if program.is_random else None
        if dropout is not None:
            dropout.begin(seed, number)
        try:
            with dropout or nullcontext():
                _interpret(program, slots, batch)
        except (IndexError, torch.linalg.LinAlgError) as error:
            raise ProtocolError(f"layer {number} of the graph cannot work with this batch: {error}") from error
        for buffer, slot in program.moves:
            buffer.data.copy_(slots[slot].detach())  # data: autograd must not see it as a change of kept graphs

    # -- programs

    def _compile(self, unit: Unit, number: int) -> _Program:
        """Assign slots to values and functions to names. A slot is freed after its last use in the units here."""
        leaving = {value.ref for boundary in self.layout.boundaries[number + 1 :] for value in boundary}
        later = {ref for following in self.layout.units[number + 1 : self.end] for ref in taken(following)}
        kept = leaving | later | {move.value for move in unit.moves} | {Ref(name) for name in unit.weights}
        for value in (*self.layout.boundaries[number], *self.layout.labels):
            self._slot(value.ref)
        last_use = {ref: node.name for node in unit.nodes for ref in node.refs() if ref not in kept}
        calls = []
        for node in unit.nodes:
            done = sorted({self._slot(ref) for ref in node.refs() if last_use.get(ref) == node.name})
            calls.append(self._compile_call(node, tuple(done)))
        return _Program(
            calls=tuple(calls),
            moves=tuple((self._tensors[move.buffer], self._slot(move.value)) for move in unit.moves),
            is_random=any(is_random(node.operator, node.args) for node in unit.nodes),
        )

    def _compile_call(self, node: OperatorCall, done: tuple[int, ...]) -> _Call:
        function = resolve(node.operator)
        if len(node.types) == 1:
            results: list[tuple[int | None, int]] = [(0 if gives_list(function) else None, self._slot(Ref(node.name)))]
        else:
            results = [(item, self._slot(Ref(node.name, item))) for item in range(len(node.types))]
        return _Call(
            function=self._means.guarded(node, self._ranges.guarded(node.operator, function)),
            args=tuple(map(self._compile_argument, node.args)),
            kwargs={key: self._compile_argument(argument) for key, argument in node.kwargs.items()},
            results=tuple(results),
            done=done,
        )

    def _compile_argument(self, argument: Argument) -> Any:
        """Return an argument with everything that is the same in every pass filled in."""
        if isinstance(argument, list):
            return [self._compile_argument(atom) for atom in argument]
        if isinstance(argument, Ref):
            return _Slot(self._slot(argument))
        return argument if isinstance(argument, Poly) else argument_value(argument, self.device)

    def _slot(self, ref: Ref) -> int:
        return self._slots.setdefault(ref, len(self._slots))


def load_segment(folder: Path, start: int, end: int, *, device: torch.device | str = "cpu") -> GraphSegment:
    """Load units [start, end) of the graph in `folder`. Raises CheckpointError."""
    checkpoint = GraphCheckpoint(folder)
    names = checkpoint.tensors_of(start, end)
    missing = [name for name in names if name not in checkpoint.entries]
    if missing:
        raise CheckpointError(
            f"{folder}: the graph needs the tensor {missing[0]}, which the weights lack; export the module again"
        )
    copies = {
        name: tensor.clone() for name, tensor in checkpoint.read(names).items()
    }  # training must not write into a mapped file
    return GraphSegment(checkpoint.graph, copies, start, end, device=device)


def _interpret(program: _Program, slots: list[Any], batch: int) -> None:
    for call in program.calls:
        args = [_fill(argument, slots, batch) for argument in call.args]
        kwargs = {key: _fill(argument, slots, batch) for key, argument in call.kwargs.items()}
        output = call.function(*args, **kwargs)
        for item, slot in call.results:
            slots[slot] = output if item is None else output[item]
        for slot in call.done:
            slots[slot] = None


def _fill(argument: Any, slots: list[Any], batch: int) -> Any:
    kind = type(argument)
    if kind is _Slot:
        return slots[argument.number]
    if kind is list:
        return [_fill(item, slots, batch) for item in argument]
    return argument.at(batch) if kind is Poly else argument


def _as_weight(tensor: Tensor, trained: bool, kind: TensorType, name: str) -> Tensor:
    if tuple(tensor.shape) != kind.shape or str(tensor.dtype) != f"torch.{kind.dtype}":
        (text,) = map(text_of, described([tensor]))
        raise CheckpointError(
            f"the tensor {name} is {text}, but the graph has {kind.dtype} {kind.shape}; export the module again"
        )
    return nn.Parameter(tensor) if trained else tensor
