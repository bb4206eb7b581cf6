"""Model of a simulated swarm: parameters, work and cache of its units, derived from a config alone.

Model of a module's graph for simulated training: size and work of its units, and bytes that pass between them. A sample counts
as a token, so a microbatch has a sequence length of 1.
"""

from __future__ import annotations

import copy
import math
import tempfile
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swarmnode.codec.body import SHARED
from swarmnode.compute.capacity.capacity import STATE_BYTES, TRAINING_BYTES, UnitSizes, units_that_fit, usable_bytes
from swarmnode.compute.capacity.expert_tiers import active_experts
from swarmnode.errors import UsageError
from swarmnode.plan.expert_groups import ExpertMixture
from swarmnode.plan.view import Span
from swarmnode.swarm.storage.content import GGUF_SUFFIX, PACKED_NAME

if TYPE_CHECKING:
    from swarmnode.compute.graph.graph import Graph
    from swarmnode.compute.model.checkpoint import Checkpoint


WEIGHT_BYTES = 2  # bf16 or fp16, as GPUs serve and train
PARAMETER_BYTES = 4  # float32, as training begins
ID_BYTES = 8  # of a token id
CONFIG_NAME = "config.json"


@dataclass(frozen=True)
class Model:
    """Sizes of a model, per unit (embedding, layers, head).

    `parameters` counts all parameters of a unit, `active` those that one token uses (of a mixture's experts only some),
    `cache_bytes` the KV cache of one token. `hidden` is the width of the values between units. `shared` counts the parameters
    of the matrix that embedding and head share if they are tied, else it is 0; they count in both units.
    `routed` counts the parameters of experts that a router chooses, `active_experts` of `experts` for a token; all 0 without any.
    `packed_bytes` are those of each unit's weights if the model's files have them packed, else empty; simulated nodes that serve
    keep them packed, too. `wide` is the hidden size inside units if a bottleneck makes the values between them narrower, else 0.
    `layer_ends` has for each unit the end of the numbers of its layers; it is empty for a graph.
    `packed` is the checkpoint of such files, else None.
    """

    name: str
    parameters: tuple[int, ...]
    active: tuple[int, ...]
    cache_bytes: tuple[int, ...]
    hidden: int
    shared: int = 0
    packed_bytes: tuple[int, ...] = ()
    routed: tuple[int, ...] = ()
    experts: int = 0
    active_experts: int = 0
    packed: Checkpoint | None = field(default=None, repr=False, compare=False)
    wide: int = 0
    layer_ends: tuple[int, ...] = ()

    @classmethod
    def load(cls, path: str | Path) -> Model:
        """Load the model of a transformers config (a config.json or a folder with it) or of packed weights (a GGUF file or a folder
        with packed.json). Raises UsageError if there is no such file, CheckpointError if it cannot be read or split."""
        path = Path(path)
        if (path.is_dir() and (path / PACKED_NAME).is_file()) or path.name.endswith(GGUF_SUFFIX):
            return cls._of_packed(path)
        path = path / CONFIG_NAME if path.is_dir() else path
        if not path.is_file():
            raise UsageError(
                f"{path}: no such file; --model takes a config.json of transformers, a graph.json, or a folder with one"
            )
        from swarmnode.compute.model.checkpoint import load_config

        config = load_config(path)
        name = path.parent.name if path.name == CONFIG_NAME else path.stem
        return cls.of_config(config, name or config.model_type)

    @classmethod
    def _of_packed(cls, path: Path) -> Model:
        """Load a model whose weights are packed. Raises UsageError, CheckpointError."""
        from swarmnode.compute.capacity.capacity import unit_sizes
        from swarmnode.compute.model.checkpoint import Checkpoint
        from swarmnode.founding.model_source import outline

        with tempfile.TemporaryDirectory(prefix="swarmnode-simulate-") as folder:
            checkpoint = outline(str(path), Path(folder))[0]
            assert isinstance(checkpoint, Checkpoint)  # packed weights are those of language models
            model = cls.of_config(checkpoint.config, path.name.removesuffix(GGUF_SUFFIX))
            sizes = unit_sizes(checkpoint, dtype=checkpoint.dtype, keeps_packed=True)
        return replace(model, packed_bytes=sizes.weight_bytes, packed=checkpoint)

    @classmethod
    def of_config(cls, config: Any, name: str) -> Model:
        """Build the model of a transformers config object. Raises CheckpointError if it cannot be split."""
        from swarmnode.compute.model.family import family_of

        family = family_of(config)
        experts, active_experts = _experts(config)
        parameters, routed, shared = _count(family)
        share = active_experts / experts if experts else 1.0
        active = (count - chosen + share * chosen for count, chosen in zip(parameters, routed, strict=True))
        cache = (family.planned_bytes_per_token(unit, WEIGHT_BYTES) for unit in range(family.units))
        ends = tuple(family.layers_of(unit, unit + 1).stop for unit in range(family.units))
        sizes = (tuple(parameters), tuple(map(int, active)), tuple(cache), family.width, shared)
        wide = 0 if family.bottleneck is None else int(config.hidden_size)
        return cls(
            name,
            *sizes,
            routed=tuple(routed),
            experts=experts,
            active_experts=active_experts,
            wide=wide,
            layer_ends=ends,
        )

    def mixture(self, weight_bytes: float = WEIGHT_BYTES) -> ExpertMixture | None:
        """Return the mean sizes of the layers with experts, with parameters of `weight_bytes` in memory; None without such layers.

        Raises UsageError if more experts are active than a layer has.
        """
        layers = [unit for unit, count in enumerate(self.routed) if count]
        if not (layers and self.experts):
            return None
        routed = sum(self.routed) / len(layers)
        dense = sum(self.parameters[unit] for unit in layers) / len(layers) - routed
        shape = (len(layers), self.matrix_width, self.experts, self.active_experts)
        return ExpertMixture(*shape, routed / self.experts, dense, weight_bytes)

    @property
    def units(self) -> int:
        """Number of units."""
        return len(self.parameters)

    @property
    def has_tokens(self) -> bool:
        """Whether its samples are sequences of tokens, as a language model's are."""
        return True

    @property
    def counted(self) -> str:
        """Word for the counted training data: "tokens" or "samples"."""
        return "tokens" if self.has_tokens else "samples"

    def layer_numbers(self, span: Span) -> range:
        """Return the numbers of the transformer layers in the units of `span`; empty for a graph."""
        ends = (0, *self.layer_ends)
        return range(ends[span.start], ends[span.end]) if self.layer_ends else range(0)

    @property
    def matrix_width(self) -> int:
        """Width w of the matrices whose gradients are averaged; all are taken to be w x 4 w."""
        return self.wide or self.hidden

    def input_bytes(self, samples: int, sequence: int) -> int:
        """Return the bytes of a microbatch that a trainer sends: the token ids of `samples` sequences of `sequence` tokens."""
        return samples * sequence * ID_BYTES

    def crossing(self, unit: int, samples: int, sequence: int, *, back: bool = False) -> tuple[int, ...]:
        """Return the shape of a microbatch's values that enter `unit` from the unit before; `back`: of their gradients."""
        return samples, sequence, self.hidden

    @cached_property
    def layer_parameters(self) -> int:
        """Active parameters of the unit of median size, which is a layer."""
        return sorted(self.active)[self.units // 2]

    @cached_property
    def serving_sizes(self) -> UnitSizes:
        """Bytes of each unit for inference: weights, and cache of one token."""
        weights = self.packed_bytes or tuple(count * WEIGHT_BYTES for count in self.parameters)
        return UnitSizes(weights, self.cache_bytes)

    @cached_property
    def training_sizes(self) -> UnitSizes:
        """Bytes of each unit for training: parameters, gradients and AdamW's two moments."""
        return UnitSizes(tuple(count * TRAINING_BYTES for count in self.parameters), (0,) * self.units)

    def capacity_units(self, memory_bytes: int, *, trains: bool, cache_tokens: int) -> int:
        """Return the largest number of consecutive units that fit wherever in the model they begin, as live nodes count; 0 if
        none fits."""
        sizes = self.training_sizes if trains else self.serving_sizes
        if sizes.need_bytes(0, self.units, cache_tokens) <= usable_bytes(memory_bytes):
            return self.units
        fitting = [units_that_fit(sizes, memory_bytes, cache_tokens, start=start) for start in range(self.units)]
        return next(
            (
                count
                for count in range(min(max(fitting), self.units - 1), 0, -1)
                if all(fitting[start] >= count for start in range(self.units - count + 1))
            ),
            0,
        )

    def free_bytes(self, memory_bytes: int, span: Span, sizes: UnitSizes) -> float:
        """Return the free bytes for caches beside the units of `span`; 0 if the span does not fit."""
        return max(0, usable_bytes(memory_bytes) - sizes.need_bytes(span.start, span.end, 0))

    def loaded_bytes(self, span: Span, *, trains: bool, learnt: bool) -> int:
        """Return the bytes that a peer downloads to hold `span`. With `trains` these are parameters in float32 and, if
        `learnt`, AdamW's two moments."""
        if not trains:
            return sum(self.serving_sizes.weight_bytes[span.start : span.end])
        return (STATE_BYTES if learnt else PARAMETER_BYTES) * sum(self.parameters[span.start : span.end])

    def block_parameters(self, block: int) -> int:
        """Return the parameters of one block of gradients: a unit without the shared matrix, or the shared matrix alone
        (SHARED)."""
        if block == SHARED:
            return self.shared
        return self.parameters[block] - (self.shared if block in (0, self.units - 1) else 0)

    def layers(self, span: Span) -> float:
        """Return the work of `span` as a number of layers."""
        return self._layers_before[span.end] - self._layers_before[span.start]

    @property
    def unit_layers(self) -> tuple[float, ...]:
        """Work of each unit, in layers. Looking up an embedding is hardly any work; it counts as a hundredth of a layer."""
        first = 1.0 if self.wide else 0.01  # with a bottleneck the first unit has as many layers as others
        return (first, *(count / self.layer_parameters for count in self.active[1:]))

    @cached_property
    def _layers_before(self) -> tuple[float, ...]:
        """Work of all units before each unit, in layers; the last entry is the whole model's."""
        return tuple(accumulate(self.unit_layers, initial=0.0))


def _count(family: Any) -> tuple[list[int], list[int], int]:
    """Return per unit all parameters and those of routed experts, and the number of shared ones.

    The model is built on the meta device, without memory for weights.
    """
    import torch
    from transformers.initialization import no_init_weights

    with torch.device("meta"), no_init_weights():
        model = family.model_class(copy.deepcopy(family.config))
    model.tie_weights()
    parameters, routed = [0] * family.units, [0] * family.units
    for name, parameter in model.named_parameters():
        for unit in family.units_of_tensor(name):
            parameters[unit] += parameter.numel()
            routed[unit] += parameter.numel() if ".experts." in name else 0
    # two projections, one at either end, and behind the first one the anchors
    if (narrow := family.bottleneck) is not None:
        hidden, last = int(family.config.hidden_size), family.units - 1
        anchors = narrow.anchor * (int(family.config.vocab_size) + hidden * (narrow.anchor < hidden))
        for unit in range(family.units):
            parameters[unit] += narrow.rank * hidden * (2 - (unit in (0, last))) + anchors * (unit > 0)
    shared = model.get_input_embeddings().weight.numel() if family.tied else 0
    return parameters, routed, shared


EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")


def _experts(config: Any) -> tuple[int, int]:
    """Return the experts of a layer and those that a token uses, all of them if the config does not say; 0 without any."""
    experts = next(filter(None, (getattr(config, name, None) for name in EXPERTS)), None)
    return (int(experts), active_experts(config) or int(experts)) if experts else (0, 0)


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
        from swarmnode.compute.graph.boundary import Layout
        from swarmnode.compute.graph.costs.estimate import entering_bytes, estimate_units, usual_width
        from swarmnode.compute.graph.costs.rates import CALLS, FLOPS, REFERENCE, total

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
    from swarmnode.compute.graph.exporting.module_export import PROGRAM_SUFFIX, export_source, module_name
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
