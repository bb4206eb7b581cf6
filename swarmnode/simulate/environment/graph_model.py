"""Model of a module's graph for simulated training: size and work of its units, and bytes that pass between them. A sample counts
as a token, so a microbatch has a sequence length of 1."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from swarmnode.codec.body import SHARED
from swarmnode.errors import UsageError
from swarmnode.simulate.environment.model import Model

if TYPE_CHECKING:
    from swarmnode.compute.graph.graph import Graph

FLOAT_BYTES = 4
RANKS_TO_WIDTH = 1.25  # a matrix of w x 4 w has 4/5 w parameters for each row and column


@dataclass(frozen=True, kw_only=True)
class GraphModel(Model):
    """Model of a graph for microbatches of `samples` samples.

    `forward_bytes` and `backward_bytes`: per unit, the values that enter it from the unit before, and their gradients.
    `unit_seconds`: per unit, forward and backward pass on the reference machine. `flops`, `moved_bytes` (of operators that are
    not limited by arithmetic) and `calls` (of operators): sums over all units, forward and backward. `width`: the width w of
    matrices w x 4 w with as many parameters per row and column as the graph's own matrices.
    """

    samples: int
    forward_bytes: tuple[int, ...]
    backward_bytes: tuple[int, ...]
    unit_seconds: tuple[float, ...]
    flops: float
    moved_bytes: float
    calls: float
    width: int

    @classmethod
    def of_graph(cls, graph: Graph, name: str, samples: int) -> GraphModel:
        """Build the model of a graph that is cut into units. Raises UsageError if the graph has another fixed batch than
        `samples`."""
        from swarmnode.compute.graph.costs.estimate import entering_bytes, estimate_units, usual_width
        from swarmnode.compute.graph.costs.rates import REFERENCE
        from swarmnode.compute.graph.costs.work import CALLS, FLOPS, total
        from swarmnode.compute.graph.layout import Layout

        if not graph.any_batch and samples != graph.batch:
            raise UsageError(
                f"{name} works with microbatches of {graph.batch} samples alone, not {samples}: see --batch"
            )
        layout, estimates = Layout(graph), estimate_units(graph, samples)
        shapes = {weight.name: weight.type.sizes(samples) for weight in graph.weights if weight.trained}
        trained = [[shapes[name] for name in unit.weights if name in shapes] for unit in layout.units]
        parameters = tuple(sum(map(math.prod, held)) for held in trained)
        work = total(part for unit in estimates for part in (unit.forward, unit.backward))
        return cls(
            name,
            parameters,
            parameters,
            (0,) * graph.units,
            usual_width(layout),
            sum(math.prod(shapes[name]) for name, block in layout.blocks.items() if block == SHARED and name in shapes),
            samples=samples,
            forward_bytes=entering_bytes(layout, samples),
            backward_bytes=entering_bytes(layout, samples, back=True),
            unit_seconds=tuple(unit.seconds(REFERENCE) for unit in estimates),
            flops=work.flops,
            moved_bytes=sum(amount for kind, amount in work.amounts.items() if kind not in (*FLOPS, CALLS)),
            calls=work.amounts.get(CALLS, 0.0),
            width=_width([shape for held in trained for shape in held if len(shape) > 1]),
        )

    @property
    def has_tokens(self) -> bool:
        """False: a graph is trained with samples."""
        return False

    @property
    def inner_layers(self) -> range:
        """Empty range: no unit of a graph is known to be a layer."""
        return range(0)

    @property
    def matrix_width(self) -> int:
        """Width of the matrices that stand for the graph's own, `width`."""
        return self.width

    @cached_property
    def unit_layers(self) -> tuple[float, ...]:
        """Work of each unit, relative to the unit with the median time."""
        middle_s = sorted(self.unit_seconds)[self.units // 2]
        return tuple(seconds / middle_s for seconds in self.unit_seconds)

    def input_bytes(self, samples: int, sequence: int) -> int:
        """Return the bytes of a microbatch of `samples` samples that a trainer sends to the first unit."""
        return self.forward_bytes[0] * samples // self.samples

    def crossing(self, unit: int, samples: int, sequence: int, *, back: bool = False) -> tuple[int, ...]:
        """Return the shape (samples, values of 4 bytes) of the values that enter `unit` from the unit before; `back`: of their
        gradients."""
        size_bytes = self.backward_bytes[unit] if back else self.forward_bytes[unit]
        return samples, max(1, size_bytes // (self.samples * FLOAT_BYTES))


def load_model(source: str | Path, samples: int) -> Model:
    """Load the model that `--model` names.

    `source` is a transformers config, a graph that `create --module` wrote (or the folder of either), a GGUF file, a folder with
    packed weights, or a module itself: a factory "package.module:function" or an exported program "file.pt2". `samples` is the size
    of a graph's microbatches. Raises UsageError or CheckpointError if the model cannot be read or split.
    """
    from swarmnode.compute.graph.exporting.source import PROGRAM_SUFFIX, export_source, module_name
    from swarmnode.compute.graph.partition import partition
    from swarmnode.compute.graph.serialise import GRAPH_FILE, read_graph

    path = Path(source)
    folder = path.parent if path.name == GRAPH_FILE else path
    if (folder / GRAPH_FILE).is_file():
        return GraphModel.of_graph(read_graph(folder), folder.resolve().name, samples)
    if path.suffix == PROGRAM_SUFFIX or (":" in str(source) and not path.exists()):
        return GraphModel.of_graph(partition(export_source(str(source)).graph).graph, module_name(str(source)), samples)
    return Model.load(path)


def _width(shapes: list[tuple[int, ...]]) -> int:
    """Return the width w of matrices w x 4 w with as many parameters per row and column as `shapes` have; 1 if there are none."""
    sides = sum(shape[0] + math.prod(shape[1:]) for shape in shapes)
    return max(1, round(RANKS_TO_WIDTH * sum(map(math.prod, shapes)) / sides)) if sides else 1
