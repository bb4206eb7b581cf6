"""WeighedMeans: in a pass of one microbatch, each mean over its labels counts by its share of the step's labels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from swarmnode.compute.graph.graph import Graph, OperatorCall
from swarmnode.compute.graph.label_count import MEANS, SUM, label_means
from swarmnode.compute.graph.operators import resolve
from swarmnode.compute.training.segment import Shares


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
