"""How many labels the mean loss of a microbatch is the mean of, where a graph's loss leaves some out: what is padding, or -100."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from swarmnode.compute.graph.graph import Graph, OperatorCall, Poly, Ref
from swarmnode.compute.graph.operators import argument_value, is_random, resolve
from swarmnode.errors import UsageError

LabelCount = Callable[[Mapping[str, Tensor]], float]
"""From a batch, by the names that the module's code has for its inputs, to how many labels count."""

_MEAN, _IGNORED = 1, -100  # defaults of torch's losses over classes
_CLASSES = frozenset({"cross_entropy_loss", "nll_loss", "nll_loss_nd", "nll_loss2d"})
_FORWARD = frozenset({"nll_loss_forward", "nll_loss2d_forward"})
_SAME = frozenset(
    {"clone", "alias", "reshape", "squeeze", "unsqueeze", "view", "_to_copy", "to", "type_as", "contiguous"}
)
_LINEAR = frozenset({"mul", "div", "neg"})
_SUMS = frozenset({"add", "sub"})


def label_count(graph: Graph) -> tuple[LabelCount, int | None, frozenset[str]] | None:
    """Return how to count the labels of a batch, the label that is left out (None: the module divides by their number itself), and
    the inputs that tell; None if the loss is no mean over labels of which some
    are left out, or is made of several."""
    found = list(_means(graph)) if graph.loss is not None else []
    if len(found) != 1:
        return None
    ref, ignored = found[0]
    nodes = _ancestors(graph, ref)
    if nodes is None:
        return None
    names = {item.name: item.argument for item in graph.inputs}
    taken = {one.name for node in nodes for one in node.refs()} | {ref.name}

    def count(batch: Mapping[str, Tensor]) -> float:
        value = _evaluate(graph, nodes, {name: batch[argument] for name, argument in names.items()})[ref]
        return float(value.sum() if ignored is None else (value != ignored).sum())

    return count, ignored, frozenset(argument for name, argument in names.items() if name in taken)


def _means(graph: Graph) -> Iterable[tuple[Ref, int | None]]:
    """The losses over classes that are added up in the graph's: (labels, the one that is left out), or, of a mean that divides by
    how many there are, (how many, None)."""
    by_name = {node.name: node for node in graph.nodes}
    assert graph.loss is not None
    left = [graph.loss]
    while left:
        node = by_name.get(left.pop().name)
        if node is None:
            continue
        base = node.operator.split(".")[1]
        refs = [argument for argument in node.args if isinstance(argument, Ref)]
        if base in _CLASSES | _FORWARD:
            left_out = (None, _MEAN, _IGNORED)[len(node.args) - 2 :]
            labels, weight, reduction, ignored = (*node.args, *left_out)[1:5]
            if isinstance(labels, Ref) and weight is None and reduction == _MEAN and isinstance(ignored, int):
                yield labels, ignored
        elif base == "div" and len(refs) == 2 and _ancestors(graph, refs[1]):
            yield refs[1], None
        elif base in _SAME | _SUMS or (base in _LINEAR and len(refs) == 1):
            left += refs


def _ancestors(graph: Graph, ref: Ref) -> list[OperatorCall] | None:
    """The nodes that a value follows from, in order; None where it takes a weight or a draw."""
    weights, wanted, nodes = {weight.name for weight in graph.weights}, {ref.name}, []
    for node in reversed(graph.nodes):
        if node.name in wanted:
            if is_random(node.operator, node.args):
                return None
            nodes.append(node)
            wanted |= {one.name for one in node.refs()}
    inputs = {item.name for item in graph.inputs}
    return None if wanted & weights or not wanted & inputs else nodes[::-1]


def _evaluate(graph: Graph, nodes: Iterable[OperatorCall], inputs: Mapping[str, Tensor]) -> dict[Ref, Any]:
    """All values that these nodes compute. Raises UsageError where they cannot."""
    values: dict[Ref, Any] = {Ref(name): tensor for name, tensor in inputs.items()}
    told = (item.type.batch_of(tuple(inputs[item.name].shape)) for item in graph.inputs if item.type.tells_batch)
    batch = next(told, graph.batch)

    def filled(argument: Any) -> Any:
        if isinstance(argument, list):
            return [filled(item) for item in argument]
        if isinstance(argument, Ref):
            return values[argument]
        return argument.at(batch) if isinstance(argument, Poly) else argument_value(argument, torch.device("cpu"))

    for node in nodes:
        kwargs = {key: filled(argument) for key, argument in node.kwargs.items()}
        try:
            output = resolve(node.operator)(*map(filled, node.args), **kwargs)
        except (RuntimeError, IndexError) as error:
            raise UsageError(f"the labels do not fit the model: {error}") from error
        parts = list(output) if isinstance(output, list | tuple) else [output]
        for item, part in enumerate(parts):
            values[Ref(node.name, item if len(node.types) > 1 else None)] = part
    return values
