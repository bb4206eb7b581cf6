"""The model that a simulated swarm works on: what its units weigh, compute and remember, from a config alone."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any

from swarmnode.codec.body import SHARED
from swarmnode.compute.capacity.memory import STATE_BYTES, TRAINING_BYTES, UnitSizes, units_that_fit, usable_bytes
from swarmnode.errors import UsageError
from swarmnode.plan.view import Span

WEIGHT_BYTES = 2  # bf16 or fp16, as GPUs serve and train
PARAMETER_BYTES = 4  # float32, as training begins
ID_BYTES = 8  # of a token
CONFIG_NAME = "config.json"


@dataclass(frozen=True)
class Model:
    """Per unit (embedding, layers, head): `parameters`, those of them that a token meets (`active`: of a mixture's experts
    only some), and the bytes that the KV cache keeps of a token. `hidden`: width of what passes between units. `shared`: parameters
    of the matrix that both ends share, if they are tied; they count in both."""

    name: str
    parameters: tuple[int, ...]
    active: tuple[int, ...]
    cache_bytes: tuple[int, ...]
    hidden: int
    shared: int = 0

    @classmethod
    def load(cls, path: str | Path) -> Model:
        """The model of a transformers config: a config.json, or a folder with one. Raises UsageError, CheckpointError."""
        path = Path(path)
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
    def of_config(cls, config: Any, name: str) -> Model:
        """The model of a transformers config object. Raises CheckpointError where it cannot be split."""
        from swarmnode.compute.model.family import family_of

        family = family_of(config)
        parameters, active, shared = _count(family, _active_share(config))
        cache = (family.cache_elements_per_token(unit) * WEIGHT_BYTES for unit in range(family.units))
        return cls(name, tuple(parameters), tuple(map(int, active)), tuple(cache), int(config.hidden_size), shared)

    @property
    def units(self) -> int:
        """How many units it has."""
        return len(self.parameters)

    @property
    def has_tokens(self) -> bool:
        """Whether its samples are sequences of them, as a language model's are."""
        return True

    @property
    def counted(self) -> str:
        """What is counted of what it is trained with."""
        return "tokens" if self.has_tokens else "samples"

    @property
    def inner_layers(self) -> range:
        """The units that are layers: neither embedding nor head."""
        return range(1, self.units - 1)

    @property
    def matrix_width(self) -> int:
        """Of the matrices whose gradients are averaged, which are taken to be of this x 4 times this."""
        return self.hidden

    def input_bytes(self, samples: int, sequence: int) -> int:
        """Of a microbatch, as a trainer sends it: token ids."""
        return samples * sequence * ID_BYTES

    def crossing(self, unit: int, samples: int, sequence: int, *, back: bool = False) -> tuple[int, ...]:
        """Shape of the values of a microbatch that enter a unit from the one before it; `back`: of their gradients."""
        return samples, sequence, self.hidden

    @cached_property
    def layer_parameters(self) -> int:
        """Active parameters of the unit that is in the middle by size: a layer."""
        return sorted(self.active)[self.units // 2]

    @cached_property
    def serving_sizes(self) -> UnitSizes:
        """Bytes for inference."""
        return UnitSizes(tuple(count * WEIGHT_BYTES for count in self.parameters), self.cache_bytes)

    @cached_property
    def training_sizes(self) -> UnitSizes:
        """Bytes for training: parameters, gradients and AdamW's two memories."""
        return UnitSizes(tuple(count * TRAINING_BYTES for count in self.parameters), (0,) * self.units)

    def capacity_units(self, memory_bytes: int, *, trains: bool, cache_tokens: int) -> int:
        """Units that fit wherever in the model they lie, as live nodes count; 0 where not one does."""
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
        """What is left beside a span, for caches."""
        return max(0, usable_bytes(memory_bytes) - sizes.need_bytes(span.start, span.end, 0))

    def loaded_bytes(self, span: Span, *, trains: bool, learnt: bool) -> int:
        """What a peer gets from others to hold a span; in training parameters in float32 and, once something is learnt, AdamW's two
        memories."""
        trained_bytes = STATE_BYTES if learnt else PARAMETER_BYTES
        return (trained_bytes if trains else WEIGHT_BYTES) * sum(self.parameters[span.start : span.end])

    def block_parameters(self, block: int) -> int:
        """Of one block of gradients: a unit without what the ends share, or that (SHARED)."""
        if block == SHARED:
            return self.shared
        return self.parameters[block] - (self.shared if block in (0, self.units - 1) else 0)

    def layers(self, span: Span) -> float:
        """The active parameters of a span, as a number of layers."""
        return self._layers_before[span.end] - self._layers_before[span.start]

    @property
    def unit_layers(self) -> tuple[float, ...]:
        """The work of each unit, in layers. Looking up an embedding is no work; it counts as a hundredth of a layer."""
        return (0.01, *(count / self.layer_parameters for count in self.active[1:]))

    @cached_property
    def _layers_before(self) -> tuple[float, ...]:
        """Layers' worth of the units before each."""
        return tuple(accumulate(self.unit_layers, initial=0.0))


def _count(family: Any, expert_share: float) -> tuple[list[int], list[float], int]:
    """Parameters of each unit, all and active, and those that the ends share; the model is built without its weights' memory."""
    import torch
    from transformers.initialization import no_init_weights

    with torch.device("meta"), no_init_weights():
        model = family.model_class(copy.deepcopy(family.config))
    model.tie_weights()
    parameters, active = [0] * family.units, [0.0] * family.units
    for name, parameter in model.named_parameters():
        for unit in family.units_of_tensor(name):
            parameters[unit] += parameter.numel()
            active[unit] += parameter.numel() * (expert_share if ".experts." in name else 1.0)
    shared = model.get_input_embeddings().weight.numel() if family.tied else 0
    return parameters, active, shared


def _active_share(config: Any) -> float:
    """The share of a mixture's experts that a token meets."""
    experts = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None)
    return getattr(config, "num_experts_per_tok", experts) / experts if experts else 1.0
