"""Means over labels in a graph's loss, and the number of labels that each of them counts in a batch.

A microbatch knows its own labels alone, but a step's mean is over the labels of all its microbatches. `LabelMean.shares` returns
the factors of the microbatches' means. They are exact if the loss is a sum of such means, each times a factor that the batch does
not change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
from torch import Tensor

from swarmnode.compute.graph.graph import (
    CONSTANT,
    Graph,
    OperatorCall,
    Poly,
    Ref,
    Weight,
    argument_value,
    is_random,
    resolve,
    torch_constant,
)
from swarmnode.compute.training.segment import Shares
from swarmnode.errors import UsageError

Batch = Mapping[str, Tensor]
"""Tensors of a batch by the names of the inputs in the module's code"""

MEAN, SUM = 1, 2  # reductions of torch's losses
_IGNORED = -100
MAX_TOLD = 1 << 16  # elements of a constant that labels are counted by
_DOUBLED = 1.5  # a count that grows with the samples is twice as large for each sample twice

MEANS = frozenset(
    {"cross_entropy_loss", "nll_loss", "nll_loss_nd", "nll_loss2d", "nll_loss_forward", "nll_loss2d_forward"}
)
_SAME = frozenset(
    {"clone", "alias", "detach", "reshape", "squeeze", "unsqueeze", "view", "_to_copy", "to", "type_as", "contiguous"}
    | {"expand", "nan_to_num", "neg", "add", "sub", "stack", "cat", "sum", "mean", "select", "slice", "unbind"}
)
"""Operators that may take a sum of means as an argument; each is linear in a finite sum."""
_DIVIDING = frozenset({"div", "divide", "true_divide"})
_SCALING = _DIVIDING | {"mul", "multiply"}
_ROUNDING = "Tensor_mode"


@dataclass(frozen=True)
class LabelMean:
    """Mean over `labels` that a `node` of the `graph` takes and the loss depends on.

    A label equal to `ignored` does not count. Any other counts as the element of `weight` for its class, or as 1 if `weight` is
    None. If `ignored` is None, the module divides by `labels` itself. `obstacle`: the first operator between the mean and the
    loss that is not linear in the mean; empty if there is none.
    """

    graph: Graph
    node: OperatorCall
    labels: Ref
    ignored: int | None
    weight: Ref | None
    obstacle: str

    @property
    def refs(self) -> tuple[Ref, ...]:
        """References to the values that decide how many labels count: the labels and, if there are any, the weights of classes."""
        return (self.labels,) if self.weight is None else (self.labels, self.weight)

    @property
    def inputs(self) -> list[str]:
        """The names of the inputs that tell how many labels count."""
        sources = _sources(self.graph, self.refs)
        return [item.argument for item in self.graph.inputs if item.name in sources]

    def count(self, batch: Batch) -> tuple[float, int]:
        """Return how many labels of a batch count, weighted by class if there is a `weight`, and how many there are.

        Raises UsageError if the labels cannot be computed from `batch`.
        """
        values = _evaluate(self.graph, self.refs, batch)
        labels = values[self.labels]
        if self.ignored is None:
            return float(labels.sum()), labels.numel()
        counted = labels != self.ignored
        if self.weight is None:
            return float(counted.sum()), labels.numel()
        weight = values[self.weight].double()
        return float(weight[labels[counted].clamp(0, len(weight) - 1)].sum()), labels.numel()

    def shares(self, microbatches: Sequence[Batch]) -> list[float]:
        """Return the factor of each microbatch's mean in the mean over all of them; 0 if none of its labels counts."""
        counts = [self.count(batch)[0] for batch in microbatches]
        usual = sum(counts) / len(counts)  # of a microbatch that has the factor 1
        if self.ignored is None and self.graph.any_batch:
            # The module itself counts: it may bound a count from below or take the mean of a mask. So the usual count follows
            # from all microbatches together.
            joint = {name: torch.cat([batch[name] for batch in microbatches]) for name in self.inputs}
            doubled = {name: torch.cat([value, value]) for name, value in joint.items()}
            whole, twice = self.count(joint)[0], self.count(doubled)[0]
            usual = whole / len(microbatches) if twice > _DOUBLED * whole else whole
        return [count / usual if usual else 0.0 for count in counts]

    def is_uneven(self, batches: Iterable[Batch]) -> bool:
        """Return whether microbatches may count unequal numbers of labels. Raises UsageError if all of them count none."""
        counted = there = 0.0
        for batch in batches:
            count, labels = self.count(batch)
            counted, there = counted + count, there + labels
        if not counted:
            raise UsageError("no sample of the data has a label that counts; check the labels")
        counts_alike = (
            self.weight is None and self.ignored is not None
        )  # each label as 1, unless it has the ignored value
        return not counts_alike or counted < there


def label_means(graph: Graph) -> tuple[LabelMean, ...]:
    """Return the means over labels that the loss adds up, in order. Empty if a unit before the last one computes one of them, as in
    graphs of earlier versions."""
    means = tuple(mean for mean in _find(graph) if not mean.obstacle)
    last = {node.name for node in graph.nodes[graph.cuts[-1] if graph.cuts else 0 :]}
    return means if all(mean.node.name in last for mean in means) else ()


def obstructed_means(graph: Graph) -> tuple[LabelMean, ...]:
    """Return the means over labels that the loss is not linear in (those with an `obstacle`)."""
    return tuple(mean for mean in _find(graph) if mean.obstacle)


def without_hidden_counts(graph: Graph, weights: Mapping[str, Tensor]) -> Graph:
    """Return the graph with the values of the constants that decide how much each label counts, such as class weights. A trainer
    counts labels by these, and has no weights to read them from.

    Raises UsageError if the data does not determine how many labels count, or if the loss is not linear in a mean
    weighted by classes. Also raises it if such a constant is not finite or has more than `MAX_TOLD` elements.
    """
    told: set[str] = set()
    for mean in _find(graph, constants_known=True):
        if mean.obstacle and mean.weight is not None:
            raise UsageError(
                f"the loss takes a mean weighted by classes through {mean.obstacle}: write it as a sum of means, so that the mean "
                "is over the labels of the whole step"
            )
        told |= _sources(graph, mean.refs)
    return msgspec.structs.replace(
        graph,
        weights=tuple(_with_values(one, weights[one.tensor]) if one.name in told else one for one in graph.weights),
    )


def _with_values(weight: Weight, tensor: Tensor) -> Weight:
    if tensor.numel() > MAX_TOLD or not tensor.isfinite().all():
        raise UsageError(
            f"the loss counts labels by {weight.tensor}: make its values finite, and at most {MAX_TOLD} of them"
        )
    return msgspec.structs.replace(weight, values=tuple(map(float, tensor.flatten().tolist())))


# -- the loss


def _find(graph: Graph, *, constants_known: bool = False) -> Iterator[LabelMean]:
    """Yield the means over labels that a graph's loss depends on. `constants_known`: treat all constants as known.

    Raises UsageError if `constants_known` and the number of labels that count depends on values that only a run
    of the graph computes.
    """
    if graph.loss is None:
        return
    flow = _Flow(graph, constants_known)
    for node in graph.nodes:
        if node.name not in flow.in_loss:
            continue
        base = node.operator.split(".")[1]
        refs = [argument for argument in node.args if isinstance(argument, Ref)]
        if base in MEANS:
            yield from _over_classes(flow, node)
        elif base in _DIVIDING and len(refs) == 2:
            is_scalar = all(kind is not None and all(size == 1 for size in kind.shape) for kind in node.types)
            if is_scalar and flow.divides(*refs) and not flow.obstacle(node):
                yield LabelMean(graph, node, refs[1], None, None, "")


def _over_classes(flow: _Flow, node: OperatorCall) -> Iterator[LabelMean]:
    given = arguments_of(node)
    labels, weight, reduction, ignored = (given[name] for name in ("target", "weight", "reduction", "ignore_index"))
    if reduction != MEAN or not isinstance(labels, Ref) or flow.is_float(labels) or not isinstance(ignored, int):
        return
    hidden = next((ref for ref in (labels, weight) if isinstance(ref, Ref) and ref.name in flow.hidden), None)
    if hidden is not None:
        if flow.constants_known and (hidden == weight or flow.has_argument(hidden, ignored)):
            raise UsageError(
                "the loss is a mean over labels that the module draws or computes from what it learns, so how many count is not "
                "known beforehand: give the labels with the data, or take the mean over all positions"
            )
        return
    if labels.name in flow.of_batch:
        yield LabelMean(flow.graph, node, labels, ignored, weight, flow.obstacle(node))


def arguments_of(node: OperatorCall) -> dict[str, Any]:
    """Return the arguments of a call by name, including the defaults of arguments that are not given."""
    arguments = resolve(node.operator)._schema.arguments  # type: ignore[attr-defined]
    defaults = {argument.name: argument.default_value for argument in arguments if argument.has_default_value()}
    return defaults | dict(zip((argument.name for argument in arguments), node.args, strict=False)) | node.kwargs


class _Flow:
    """Dependencies between the values of a graph, as sets of names.

    `of_batch`: values that depend on inputs or random numbers; `hidden`: values that depend on weights other than known constants,
    or on random numbers; `trained`: values that depend on trained weights; `in_loss`: values that the loss depends on.
    """

    def __init__(self, graph: Graph, constants_known: bool) -> None:
        self.graph, self.constants_known = graph, constants_known
        assert graph.loss is not None
        self.in_loss = _sources(graph, [graph.loss])
        self.trained = {weight.name for weight in graph.weights if weight.trained}
        told = {
            weight.name for weight in graph.weights if weight.kind == CONSTANT and (constants_known or weight.values)
        }
        self.of_batch = {item.name for item in graph.inputs}
        self.hidden = {weight.name for weight in graph.weights} - told
        self.users: dict[str, list[OperatorCall]] = {}
        self._types = {item.name: item.type for item in graph.inputs} | {one.name: one.type for one in graph.weights}
        for node in graph.nodes:
            taken = {ref.name for ref in node.refs()}
            draws = is_random(node.operator, node.args)
            for names, joins in ((self.of_batch, draws), (self.hidden, draws), (self.trained, False)):
                if joins or taken & names:
                    names.add(node.name)
            for name in taken:
                self.users.setdefault(name, []).append(node)
            if node.types[0] is not None:
                self._types[node.name] = node.types[0]

    def divides(self, whole: Ref, count: Ref) -> bool:
        """Return whether `whole` depends on trained weights, and `count` on the batch and known constants alone."""
        return whole.name in self.trained and count.name in self.of_batch and count.name not in self.hidden

    def is_float(self, ref: Ref) -> bool:
        return bool(torch_constant(self._types[ref.name].dtype).is_floating_point)

    def has_argument(self, ref: Ref, label: int) -> bool:
        """Return whether a node that `ref` depends on has the number `label` as an argument."""
        sources = _sources(self.graph, [ref])
        nodes = [node for node in self.graph.nodes if node.name in sources]
        return any(argument == label for node in nodes for argument in (*node.args, *node.kwargs.values()))

    def obstacle(self, node: OperatorCall) -> str:
        """Return the first operator on the way to the loss that is not linear in the node's value; empty if there is none."""
        left, seen = [node.name], set()
        while left:
            name = left.pop()
            for user in self.users.get(name, []):
                if user.name in seen or user.name not in self.in_loss:
                    continue
                seen.add(user.name)
                if not self._is_linear(user, name):
                    return user.operator
                left.append(user.name)
        return ""

    def _is_linear(self, node: OperatorCall, name: str) -> bool:
        base = node.operator.split(".")[1]
        if base in _SAME:
            return True
        others = [ref for ref in node.refs() if ref.name != name]
        place = node.args[0]
        is_first = isinstance(place, Ref) and place.name == name
        taken_once = len(others) == sum(1 for _ in node.refs()) - 1
        fixed = all(ref.name not in self.of_batch for ref in others)
        scales = base in _SCALING and not node.operator.endswith(_ROUNDING)
        return scales and taken_once and fixed and (is_first or base not in _DIVIDING)


# -- labels of a batch


def _sources(graph: Graph, refs: Iterable[Ref]) -> set[str]:
    """Return the names of `refs` and of all values that they depend on."""
    wanted = {ref.name for ref in refs}
    for node in reversed(graph.nodes):
        if node.name in wanted:
            wanted |= {ref.name for ref in node.refs()}
    return wanted


def _evaluate(graph: Graph, refs: Iterable[Ref], batch: Batch) -> dict[Ref, Any]:
    """Return the values of `refs` and all that they depend on. Raises UsageError if they cannot be computed."""
    sources = _sources(graph, refs)
    items = [item for item in graph.inputs if item.name in sources]
    values: dict[Ref, Any] = {Ref(item.name): batch[item.argument] for item in items}
    for weight in graph.weights:
        if weight.name in sources and weight.values:
            constant = torch.tensor(weight.values, dtype=torch_constant(weight.type.dtype))
            values[Ref(weight.name)] = constant.view(weight.type.sizes(graph.batch))
    told = (item.type.batch_of(tuple(batch[item.argument].shape)) for item in items if item.type.tells_batch)
    samples = next(told, graph.batch)

    def filled(argument: Any) -> Any:
        if isinstance(argument, list):
            return [filled(item) for item in argument]
        if isinstance(argument, Ref):
            return values[argument]
        return argument.at(samples) if isinstance(argument, Poly) else argument_value(argument, torch.device("cpu"))

    for node in graph.nodes:
        if node.name not in sources:
            continue
        kwargs = {key: filled(argument) for key, argument in node.kwargs.items()}
        try:
            output = resolve(node.operator)(*map(filled, node.args), **kwargs)
        except (RuntimeError, IndexError) as error:
            raise UsageError(f"the labels do not fit the model: {error}; check the labels in the data") from error
        parts = list(output) if isinstance(output, list | tuple) else [output]
        for item, part in enumerate(parts):
            values[Ref(node.name, item if len(node.types) > 1 else None)] = part
    return values


class WeighedMeans:
    """Means over labels of a graph's loss, during one pass at a time."""

    def __init__(self, graph: Graph) -> None:
        self._numbers = {mean.node.name: number for number, mean in enumerate(label_means(graph))}
        self._shares: Shares = ()

    def __len__(self) -> int:
        return len(self._numbers)

    def begin(self, shares: Shares) -> None:
        """Begin a pass with the means' shares, or without any, so that the means are as they are."""
        self._shares = shares

    def guarded(self, node: OperatorCall, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function of a node, times its share if it is a mean over labels. A mean over no labels is 0, not NaN."""
        number = self._numbers.get(node.name)
        if number is None:
            return function
        names = [argument.name for argument in resolve(node.operator)._schema.arguments]  # type: ignore[attr-defined]
        is_over_classes = node.operator.split(".")[1] in MEANS

        def call(*args: Any, **kwargs: Any) -> Any:
            if not self._shares:
                return function(*args, **kwargs)
            given, share = dict(zip(names, args, strict=False)) | kwargs, self._shares[number]
            if not share:
                given |= {"reduction": SUM} if is_over_classes else {"other": 1}
            output = function(**given)
            return (output[0] * share, *output[1:]) if isinstance(output, tuple) else output * share

        return call
