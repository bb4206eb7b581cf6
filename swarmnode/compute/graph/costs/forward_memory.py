"""What memory a forward pass takes while it runs, before it is run: the most that its values need together."""

from __future__ import annotations

from swarmnode.compute.graph.costs.estimate import type_bytes
from swarmnode.compute.graph.graph import Ref
from swarmnode.compute.graph.layout import Layout, value_types


def forward_bytes(layout: Layout, start: int, end: int, batch: int) -> int:
    """Of a pass through units [start, end) for so many samples, its inputs too. Every value counts as memory of its own, also a
    view of another: that is more than it takes, and never less but for what operators use inside."""
    nodes = [node for unit in layout.units[start:end] for node in unit.nodes]
    sizes = {value.ref: type_bytes(value.type, batch) for value in layout.boundaries[start]}
    made = {ref: type_bytes(kind, batch) for ref, kind in value_types(nodes).items()}
    leaving = {value.ref for value in layout.boundaries[end]}
    last = {ref: number for number, node in enumerate(nodes) for ref in node.refs()}
    held = peak = sum(sizes.values())
    for number, node in enumerate(nodes):
        results = (
            [Ref(node.name)] if len(node.types) == 1 else [Ref(node.name, item) for item in range(len(node.types))]
        )
        for ref in results:
            sizes[ref] = made.get(ref, 0)
            held += sizes[ref]
        peak = max(peak, held)
        for ref in {ref for ref in (*node.refs(), *results) if last.get(ref, number) == number} - leaving:
            held -= sizes.pop(ref, 0)
    return peak
