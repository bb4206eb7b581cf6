"""Families of models: from a model's config and class alone, its units, or the reason why it cannot be cut.

Units of a causal language model with N layers: unit 0 is the embedding, units 1..N are layers 0..N-1, unit N+1 is the head
(final norm and language model head). No family is known here by name: `traced_model.py` finds a family's anatomy by running its own
code, and `serving/loading.py` tries whether a split model computes the same as the whole one.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

from swarmnode.compute.carried import is_of_other_media, is_one_of
from swarmnode.compute.model.lean import lean
from swarmnode.compute.model.stack import Bottleneck, bottleneck_of, digit_count
from swarmnode.compute.model.traced_model import STATELESS_LAYERS, ModelTrace, trace_again, trace_model
from swarmnode.config import PLAIN
from swarmnode.errors import CheckpointError

ATTENTION_LAYERS = frozenset({"full_attention", "sliding_attention", "chunked_attention", "indexed_attention"})
STATE_LAYERS = frozenset({"linear_attention", "conv", "hybrid", "hybrid_sliding"})
"""Kinds of layers in transformers' `layer_types`: with a KV cache, with a recurrent state (hybrid: with both)"""
SPLITTABLE_LAYER_TYPES = ATTENTION_LAYERS | STATE_LAYERS | STATELESS_LAYERS
STATE_ITEM_BYTES = 4
SNAPSHOTS = 4  # of the recurrent states of one session, at most
LEAST_SNAPSHOTS = 2  # where the text before a prompt ended, and a newer one
SNAPSHOT_BYTES = 1 << 28  # of one row's snapshots over a whole model, unless that is less than LEAST_SNAPSHOTS
STATE_TOKENS = 512  # cached tokens that stand for a session's states where memory is planned by tokens
KV_SCALE_BYTES = 2  # of a head's keys or values at one position in 8 bits
OTHER_MEDIA = ("vision", "audio")  # beginnings of the names of a config's parts
KEYS = ("quantization_config", "compression_config")


def switching_position(config: Any) -> int | None:
    """Return the first position at which a longrope model uses its long frequencies; None for other models."""
    lengths = [
        rope.get("original_max_position_embeddings") or config.max_position_embeddings
        for rope in ropes(config)
        if rope.get("rope_type") == "longrope"
    ]
    return min(lengths, default=None)


def is_dynamic(config: Any) -> bool:
    """Return whether the model's rotary frequencies change with every position."""
    return any("dynamic" in str(rope.get("rope_type")) for rope in ropes(config))


def ropes(config: Any) -> list[dict[str, Any]]:
    """Return the rotary embeddings' parameters in a config: one table, or one for each type of layer."""
    told = getattr(config, "rope_parameters", None) or {}
    return [rope for rope in told.values() if isinstance(rope, dict)] or [told]


def settings_of(config: Any) -> Mapping[str, Any] | None:
    """Return a transformers config's quantisation settings; None if the weights are not quantised.

    Raises CheckpointError if the settings are not a table.
    """
    settings = next((each for key in KEYS if (each := getattr(config, key, None)) is not None), None)
    if settings is not None and not isinstance(settings, dict):
        raise CheckpointError("the checkpoint's quantization_config is not a table; fetch config.json again")
    return settings


def plain_config(config: Any) -> Any:
    """Return a copy of a transformers config without its quantisation settings."""
    plain = deepcopy(config)
    for key in KEYS:
        plain.__dict__.pop(key, None)
    return plain


@dataclass(frozen=True)
class Family(ModelTrace):
    """Structure of one model (its class and config), and its division into units: the embedding, each layer, and the head.

    With a bottleneck a unit has several layers; the first one has the embedding besides, the last one the head.
    """

    model_class: type[Any]
    config: Any

    @property
    def layer_count(self) -> int:
        """Number of layers."""
        return len(self.cache_shapes)

    @property
    def units(self) -> int:
        """Number of units: embedding, layers, head; with a bottleneck the groups of layers."""
        return self.layer_count + 2 if self.bottleneck is None else -(-self.layer_count // self.bottleneck.layers)

    @property
    def bottleneck(self) -> Bottleneck | None:
        """Bottleneck at the boundaries between units; None if hidden states cross them as they are."""
        return bottleneck_of(self.config)

    @property
    def width(self) -> int:
        """Numbers of a position that cross a boundary between units: the hidden size, or a bottleneck's rank and digits."""
        if self.calls is not None:
            return self.calls.width
        return int(self.config.hidden_size) if self.bottleneck is None else self.bottleneck.rank + self.digits

    @property
    def digits(self) -> int:
        """Digits of a token's id among the numbers that cross a boundary: 0 if boundaries have no anchors."""
        return digit_count(self.config)

    def layers_of(self, start: int, end: int) -> range:
        """Return the numbers of the layers in units [start, end)."""
        count = self.layer_count
        if self.bottleneck is not None:
            return range(*(min(unit * self.bottleneck.layers, count) for unit in (start, end)))
        first = min(max(start - 1, 0), count)
        return range(first, max(first, min(end - 1, count)))

    @property
    def computes_again(self) -> bool:
        """Whether a session keeps the inputs of its positions in place of caches, and each pass computes all of them again."""
        return self.calls is not None and self.calls.cached is None

    def followed(self, with_cache: bool) -> Family | None:
        """Return the family with its calls followed: with its caches, or without, so that passes compute all positions again. None
        if that cannot be done, or is so already."""
        is_so = self.calls is not None and with_cache == (self.calls.cached is not None)
        found = None if is_so else trace_again(self.model_class, self.config, with_cache=with_cache)
        return None if found is None else Family(**vars(found), model_class=self.model_class, config=self.config)

    def __repr__(self) -> str:
        return f"Family({self.model_class.__name__}, {self.units} units, layers in {self.stack_name})"

    @property
    def keeps_states(self) -> bool:
        """Whether some layer keeps a recurrent state, which cannot be cut back to an earlier position."""
        return any(self.state_shapes)

    @property
    def has_whole_copies(self) -> bool:
        """Whether some layer keeps a recurrent state, and a copy of what some layers keep of a session is all that they need."""
        calls = self.calls
        is_own = calls is None or (calls.has_own_caches and not any(map(calls.received, range(len(calls.live)))))
        return self.keeps_states and is_own

    @cached_property
    def snapshots(self) -> int:
        """Number of snapshots that a session keeps of its states: fewer of large states, so that a session's memory is bounded.
        All hops of a route keep the same number."""
        whole = sum(self.state_bytes(unit, STATE_ITEM_BYTES) for unit in range(self.units))
        return min(SNAPSHOTS, max(LEAST_SNAPSHOTS, SNAPSHOT_BYTES // max(1, whole)))

    @property
    def state_copies(self) -> int:
        """Number of copies of a session's states: snapshots, the states in use, and those that a pass changes."""
        return self.snapshots + 2

    def state_bytes(self, unit: int, itemsize: int) -> int:
        """Return the bytes of one row's recurrent states in one unit, at any length; 0 for a unit without states.

        Families keep some states in float32 whatever their dtype, so an element counts as four bytes at least.
        """
        return sum(self.layer_state_bytes(layer, itemsize) for layer in self.layers_of(unit, unit + 1))

    def layer_state_bytes(self, layer: int, itemsize: int) -> int:
        """Return the bytes of one row's recurrent states in one layer; see `state_bytes`."""
        return max(itemsize, STATE_ITEM_BYTES) * sum(prod(shape) for shape in self.state_shapes[layer])

    def cache_bytes_per_token(self, unit: int, itemsize: int, kv: str = PLAIN) -> int:
        """Return the bytes that the KV cache of one unit keeps per token and row; 0 for the embedding and the head.

        Elements take `itemsize` bytes; if `kv` is "int8" they take one byte, and each head has a scale.
        """
        return sum(self.layer_cache_bytes(layer, itemsize, kv) for layer in self.layers_of(unit, unit + 1))

    def layer_cache_bytes(self, layer: int, itemsize: int, kv: str = PLAIN) -> int:
        """Return the bytes that the KV cache of one layer keeps per token and row; see `cache_bytes_per_token`."""
        return shapes_bytes(self.cache_shapes[layer], itemsize, kv)

    def received_bytes(self, first: int, itemsize: int, kv: str = PLAIN) -> dict[int, int]:
        """Return the bytes per token and row of the caches of earlier layers that layers from `first` on need, by layer; empty if
        layers use their own caches alone."""
        received = {} if self.calls is None else self.calls.received(first)
        return {layer: shapes_bytes(shapes, itemsize, kv) for layer, shapes in received.items()}

    def planned_bytes_per_token(self, unit: int, itemsize: int, kv: str = PLAIN) -> int:
        """Return the bytes to plan for a cached token of one unit, where memory is shared out by tokens. A session's recurrent
        states, which do not grow, count as `STATE_TOKENS` tokens."""
        states = self.state_copies * self.state_bytes(unit, itemsize)
        return self.cache_bytes_per_token(unit, itemsize, kv) + -(-states // STATE_TOKENS)

    def units_of_tensor(self, name: str) -> tuple[int, ...]:
        """Return the units that need the checkpoint's tensor `name`; none if the model has no such tensor.

        Checkpoints may have other prefixes than today's classes, and may keep experts apart. So the first number in its name
        identifies a layer's tensor, and the name of its module the others. Unidentified tensors go to both ends. Tensors for
        images and sound belong to none.
        """
        if is_of_other_media(name):
            return ()
        name = own_name(name)
        if self.calls is not None:
            return self._units_of_carried(name)
        numbered = re.search(r"(?:^|\.)(\d+)\.", name)
        if numbered:
            layer = int(numbered.group(1))
            unit = layer + 1 if self.bottleneck is None else layer // self.bottleneck.layers
            return (unit,) if layer < self.layer_count else ()
        module = name.rpartition(".")[0]
        head = self.units - 1
        if is_one_of(module, [self.input_embedding]):
            return (0, head) if self.tied else (0,)
        if is_one_of(module, self.front):
            return (0,)
        if is_one_of(module, self.back):
            return (head,)
        return (0, head)

    def _units_of_carried(self, name: str) -> tuple[int, ...]:
        """Return the units that need a tensor of a model whose calls are followed: modules that belong to no unit are in all."""
        assert self.calls is not None
        units, module = {call + 1 for call in self.calls.calls_of(name)}, name.rpartition(".")[0]
        head = self.units - 1
        is_input = is_one_of(module, [self.input_embedding])
        if is_one_of(module, self.front):
            units.add(0)
        if is_one_of(module, self.back) or (is_input and self.tied):
            units.add(head)
        return tuple(sorted(units)) if units else tuple(range(self.units))


def shapes_bytes(shapes: Iterable[tuple[int, int]], itemsize: int, kv: str) -> int:
    """Return the bytes per token and row of caches of (heads, dim); see `Family.cache_bytes_per_token`."""
    elements = sum(heads * dim for heads, dim in shapes)
    if kv == PLAIN or not elements:
        return elements * itemsize
    return elements + KV_SCALE_BYTES * sum(heads for heads, _ in shapes)


def own_name(name: str) -> str:
    """Return the name of a tensor in its language model, which may be a part of the model that the checkpoint is of."""
    _, found, rest = name.rpartition("language_model.")
    return name if not found else rest if rest.startswith(("model.", "lm_head.")) else f"model.{rest}"


@lean()
def family_of(config: Any) -> Family:
    """Return the family of this transformers config. Raises CheckpointError with the reason if the model cannot be cut."""
    model_class = causal_class(config)
    kind, other = f"model type {config.model_type!r}", _other_layers(config)
    if (settings := settings_of(config)) is not None:
        raise CheckpointError(
            f"the config is of a quantised checkpoint ({settings.get('quant_method', 'unknown')}): give the folder to "
            "`create --model` or `host`"
        )
    for is_so, reason in (
        (
            is_dynamic(config),
            "has rotary frequencies that change with every position (dynamic): sessions in one pass would change each other; "
            "choose another model",
        ),
        (
            _asks_for_routers(config),
            "asks for its routers' logits (output_router_logits), which come from all layers at once, so it cannot be split: "
            "set it to false in config.json",
        ),
    ):
        if is_so:
            raise CheckpointError(f"{kind} {reason}")
    family = Family(**vars(trace_model(model_class, config)), model_class=model_class, config=config)
    if other and family.calls is None:
        again = family.followed(with_cache=True) or family.followed(with_cache=False)
        if again is None:
            raise CheckpointError(
                f"{kind} has layers of type {', '.join(other)}, whose caches are not known here; choose another model"
            )
        return again
    return family


@lean()
def trains_whole(config: Any) -> bool:
    """Return whether this config's language model cannot be split at its layers, but can be trained as a graph.

    That is so if layers keep a state besides a KV cache, or the loss needs the router logits of all layers. Raises CheckpointError
    for models of another kind.
    """
    is_stateful = getattr(causal_class(config), "_is_stateful", False)
    return bool(is_stateful or _kinds(config) - ATTENTION_LAYERS or _asks_for_routers(config))


def check_trains_at_layers(family: Family) -> None:
    """Raise CheckpointError if a model keeps recurrent states, or its layers hand each other more than hidden states: it is
    served in spans of layers, and trained as a graph."""
    if family.calls is not None:
        raise CheckpointError(
            f"{family.model_class.__name__} has layers that hand each other more than hidden states, which training and tuning in "
            "layers do not follow; choose another model"
        )
    if family.keeps_states:
        raise CheckpointError(
            f"{family.model_class.__name__} keeps recurrent states, which training and tuning in layers do not follow; `create "
            "--config` begins a training of it as a graph"
        )


def _asks_for_routers(config: Any) -> bool:
    return bool(getattr(config, "output_router_logits", False))


def _other_layers(config: Any) -> list[str]:
    """Return the kinds of layers in `config` whose caches are not known here."""
    return sorted(_kinds(config) - SPLITTABLE_LAYER_TYPES)


def _kinds(config: Any) -> set[str]:
    return {str(kind) for kind in getattr(config, "layer_types", None) or ()}


def language_config(config: Any) -> Any:
    """Return the language model's part of a config that describes more (images, sound), if transformers counts the whole and the
    part among its causal language models. Else return `config`."""
    part = config.sub_configs.get("text_config")
    text = config if part is None else config.get_text_config()
    whole, own = _mapped_class(config), _mapped_class(text)
    if text is config or whole is None or own is None:
        return config
    if (settings := settings_of(config)) is not None:
        text.quantization_config = settings
    if whole.config_class is type(config):
        text.tie_word_embeddings = config.tie_word_embeddings  # the whole model's class decides this by its own config
    return text


def _mapped_class(config: Any) -> Any:
    """Return transformers' class of the causal language model of a config: the one that it names for the config's type, or for a
    type of the same family if that class takes this config. None if there is none."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES, model_type_to_module_name
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING:
        named: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
        return named[0] if isinstance(named, tuple) else named
    package, _, _ = type(config).__module__.rpartition(".")
    for kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys() & CONFIG_MAPPING_NAMES.keys():
        if package == f"transformers.models.{model_type_to_module_name(kind)}":
            module = importlib.import_module(package)
            named = MODEL_FOR_CAUSAL_LM_MAPPING[getattr(module, CONFIG_MAPPING_NAMES[kind])]
            if not isinstance(named, tuple) and named.config_class is type(config):
                return named
    return None


def causal_class(config: Any) -> type[Any]:
    """Return the class of a config's causal language model. Raises CheckpointError for models of another kind."""
    kind = f"model type {config.model_type!r}"
    if config.is_encoder_decoder:
        raise CheckpointError(
            f"{kind} is an encoder-decoder: only decoder-only language models can be split; choose another model"
        )
    has_media, model_class = any(part.startswith(OTHER_MEDIA) for part in config.sub_configs), _mapped_class(config)
    try:
        is_whole = config.get_text_config() is config
    except ValueError:  # several
        is_whole = False
    if not is_whole or (has_media and (model_class is None or model_class.config_class is not type(config))):
        raise CheckpointError(
            f"{kind} takes images or sound besides text: only text models can be split; choose another model"
        )
    if model_class is None:
        raise CheckpointError(
            f"{kind} is not a causal language model of transformers: it cannot be split; choose another model"
        )
    if getattr(config, "num_hidden_layers", None) is None:
        raise CheckpointError(f"{kind} does not say how many layers it has: it cannot be split; choose another model")
    chosen: type[Any] = model_class
    return chosen
