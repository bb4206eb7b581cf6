"""Layout: the computation and the weights of each unit of a cut graph, and the values that cross each boundary."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from swarmnode.codec.body import SHARED
from swarmnode.compute.graph.graph import BUFFER, CONSTANT, BufferUpdate, Graph, OperatorCall, Ref, TensorType
from swarmnode.compute.graph.operators import is_random, torch_constant
from swarmnode.errors import CheckpointError

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
        self._unit_of = {node.name: unit for node, unit in _units_of(graph) if node.name not in constants}
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
        *others, last = map(taken, self.units)
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
            used.update(dict.fromkeys(taken(unit) - labels if is_last else taken(unit), number))
        used.update(dict.fromkeys(self.graph.results, self.graph.units))
        crossing = [
            [ref for ref in self._types if ref in made and made[ref] < number <= used.get(ref, -1)]
            for number in range(self.graph.units)
        ]
        inputs = [Ref(item.name) for item in self.graph.inputs]
        crossing[0] = [ref for ref in inputs if ref in used or ref not in labels]
        self._carry_batch(crossing)
        for refs in [*crossing, self.graph.results]:
            yield self._values(refs)

    def _values(self, refs: Iterable[Ref]) -> tuple[Value, ...]:
        return tuple(
            Value(ref, kind, ref.name in self._trained and _takes_gradient(kind))
            for ref, kind in ((ref, self._types[ref]) for ref in refs)
        )

    def _carry_batch(self, crossing: list[list[Ref]]) -> None:
        """Let an input cross the boundaries up to the last one that would not show the size of the batch otherwise.

        Raises CheckpointError if no input shows it.
        """
        if not self.graph.any_batch:
            return
        teller = next((ref for ref in crossing[0] if self._types[ref].tells_batch), None)
        if teller is None:
            raise CheckpointError(
                "no input of the graph has the size of the batch; export the module with batched inputs"
            )
        silent = [k for k, refs in enumerate(crossing) if not any(self._types[ref].tells_batch for ref in refs)]
        for refs in crossing[: max(silent, default=-1) + 1]:
            if teller not in refs:
                refs.insert(0, teller)


def taken(unit: Unit) -> set[Ref]:
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
    whole = {ref for ref, kind in value_types(graph.nodes).items() if not _takes_gradient(kind)}
    for node in graph.nodes:
        if node.operator not in _NO_GRADIENT and any(ref.name in trained and ref not in whole for ref in node.refs()):
            trained.add(node.name)
    return trained


def _takes_gradient(kind: TensorType) -> bool:
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


def _units_of(graph: Graph) -> Iterable[tuple[OperatorCall, int]]:
    cuts = iter((*graph.cuts, len(graph.nodes)))
    cut, unit = next(cuts), 0
    for number, node in enumerate(graph.nodes):
        if number == cut:
            cut, unit = next(cuts), unit + 1
        yield node, unit
