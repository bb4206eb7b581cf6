"""What passes between the units of a graph, as bytes."""

from __future__ import annotations

from swarmnode.compute.graph.costs.estimate import values_bytes
from swarmnode.compute.graph.layout import Layout

FLOAT32_BYTES = 4


def entering_bytes(layout: Layout, samples: int, *, back: bool = False) -> tuple[int, ...]:
    """Per unit, of what enters it from the unit before it; `back`: of the gradients that go back there."""
    return tuple(
        values_bytes((value for value in values if value.trained or not back), samples)
        for values in layout.boundaries[: layout.graph.units]
    )


def usual_width(layout: Layout) -> int:
    """Float32 values of one sample that pass between two units: at the boundary that is in the middle by size. 0 where there is
    but one unit."""
    samples = layout.graph.batch
    between = sorted(entering_bytes(layout, samples)[1:])
    return max(1, between[len(between) // 2] // (samples * FLOAT32_BYTES)) if between else 0
