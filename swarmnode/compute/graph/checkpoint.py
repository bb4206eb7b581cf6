"""A graph and its weights in a local folder, asked by unit as any other checkpoint."""

from __future__ import annotations

from functools import cached_property

from swarmnode.compute.graph.graph import Graph
from swarmnode.compute.graph.layout import Layout
from swarmnode.compute.graph.serialise import read_graph
from swarmnode.compute.model.checkpoint import Checkpoint


class GraphCheckpoint(Checkpoint):
    """What a Checkpoint is for a transformers model. It has no config and no family. Raises CheckpointError."""

    @cached_property
    def graph(self) -> Graph:
        """Checked before it is believed."""
        return read_graph(self.path)

    @cached_property
    def layout(self) -> Layout:
        """What each unit computes and holds."""
        return Layout(self.graph)

    @property
    def units(self) -> int:
        """Number of units."""
        return self.graph.units

    def tensors_of(self, start: int, end: int) -> list[str]:
        """Names of the tensors that units [start, end) need."""
        held = {name for unit in self.layout.units[start:end] for name in unit.weights}
        return [weight.tensor for weight in self.graph.weights if weight.name in held]
