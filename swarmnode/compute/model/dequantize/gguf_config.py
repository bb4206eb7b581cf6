"""The config of a GGUF model and its ways to draw tokens: the keys of the file that transformers' reader takes, and the others."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from swarmnode.compute.model.dequantize.gguf_tokenizer import GgufTokenizer
from swarmnode.errors import CheckpointError

# Factors of the rotary frequencies (a Llama's from 3.1 on, and of LongRoPE), which stand beside the weights.
FREQUENCY_FACTORS, LONG_FACTORS, SHORT_FACTORS = (
    f"{name}.weight" for name in ("rope_freqs", "rope_factors_long", "rope_factors_short")
)
ROPE_TENSORS = frozenset((FREQUENCY_FACTORS, LONG_FACTORS, SHORT_FACTORS))
OUTPUT = "output.weight"

_EPSILONS = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps")
# What transformers' reader leaves out for some architecture or other, by the names that families have for it.
_VALUES: Mapping[str, tuple[str, ...]] = {
    "attention.key_length": ("head_dim",),
    "attention.layer_norm_epsilon": _EPSILONS,
    "attention.layer_norm_rms_epsilon": _EPSILONS,
    "attention.sliding_window": ("sliding_window",),
    "attn_logit_softcapping": ("attn_logit_softcapping",),
    "final_logit_softcapping": ("final_logit_softcapping",),
    "expert_feed_forward_length": ("moe_intermediate_size",),
    "expert_shared_feed_forward_length": ("shared_expert_intermediate_size",),
    "expert_weights_norm": ("norm_topk_prob",),
}
_POSITION_KEYS = frozenset(
    {"rope.freq_base", "rope.dimension_count"}
    | {f"rope.scaling.{name}" for name in ("type", "factor", "original_context_length", "attn_factor", "finetuned")}
    | {f"rope.scaling.yarn_{name}" for name in ("beta_fast", "beta_slow")}
)
_SILENT = frozenset(
    {"context_length", "vocab_size", "block_count", "embedding_length", "feed_forward_length", "tensor_data_layout"}
    | {"pooling_type", "rope.scaling.finetuned", "expert_count", "expert_used_count"}
)
PREFIX = "general.sampling."
NAMES = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}
WITHOUT_EFFECT = frozenset({"sequence", "penalty_last_n", "xtc_threshold", "mirostat_tau", "mirostat_eta"})


"""The order of the steps, which is fixed here, and settings of steps that are off."""


def generation_config(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a generation_config.json. Raises CheckpointError if the file asks for a way to draw that is not known
    here."""
    tokenizer = GgufTokenizer(fields)
    values: dict[str, Any] = tokenizer.token_ids()
    if ends := tokenizer.ends:
        values["eos_token_id"] = list(ends)
    for name, field in fields.items():
        key = name.removeprefix(PREFIX)
        if not name.startswith(PREFIX) or key in WITHOUT_EFFECT:
            continue
        if key in NAMES:
            values[NAMES[key]] = field.contents()
        elif field.contents():
            raise CheckpointError(f"its {name} asks for a way to draw tokens that is not known here")
    if "temperature" in values:
        values["do_sample"] = values["temperature"] > 0
    return values


"""Sizes, which the tensors' shapes tell as well, and keys that say nothing of what a causal language model computes."""
_FACTORS = frozenset(
    {"logit_scale", "embedding_scale", "residual_scale", "expert_weights_scale", "expert_group_scale"}
    | {"attention.output_scale", "rope.scaling.alpha", "rope.scale_linear"}
    | {f"rope.scaling.yarn_{name}_factor" for name in ("ext", "attn")}
)
_ONES = (0, 1, -1)  # a YaRN factor of -1 is left to the reader
_LARGEST_GEMMAS = {"gemma2": 46, "gemma3_text": 62}  # layers of those with 27 thousand million parameters
_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")


class GgufHeader:
    """What a file says of its model, by the names of its architecture, and its small tensors."""

    def __init__(self, reader: Any) -> None:
        self._fields: Mapping[str, Any] = reader.fields
        self._tensors = {tensor.name: tensor for tensor in reader.tensors}
        self.architecture = str(self._fields["general.architecture"].contents())

    def said(self, key: str) -> Any:
        """None where it says nothing of `key`."""
        field = self._fields.get(f"{self.architecture}.{key}")
        return None if field is None else field.contents()

    def items(self) -> Iterator[tuple[str, Any]]:
        """Yield all that the file says of its model, without the architecture's name in front."""
        for name, field in self._fields.items():
            if name.startswith(f"{self.architecture}."):
                yield name.removeprefix(f"{self.architecture}."), field.contents()

    def general(self, key: str) -> Any:
        """Return the value of a key that has no architecture's name in front; None if the file lacks it."""
        field = self._fields.get(key)
        return None if field is None else field.contents()

    def factors(self, name: str) -> list[float] | None:
        """The float32 tensor `name`; None where there is none."""
        tensor = self._tensors.get(name)
        return None if tensor is None else [float(factor) for factor in tensor.data]

    def __contains__(self, tensor: str) -> bool:
        return tensor in self._tensors


def complete_config(header: GgufHeader, read: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a config.json: those that transformers' reader `read`, and what else the file says.

    Raises CheckpointError if a key has an effect that is not known here.
    """
    from transformers.integrations.ggml import GGUF_CONFIG_MAPPING
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    values = {**read, "tie_word_embeddings": OUTPUT not in header}
    defaults = CONFIG_MAPPING[values["model_type"]]()
    mapping: Any = GGUF_CONFIG_MAPPING
    # Some architectures are called otherwise in the files than by transformers.
    known = {**mapping.get(header.architecture, {}), **mapping.get(values["model_type"].removesuffix("_text"), {})}
    read_keys = {key for key, name in known.items() if name is not None}
    for key, names in _VALUES.items():
        name = next((name for name in names if hasattr(defaults, name)), None)
        if name is not None and key not in read_keys and (value := header.said(key)) is not None:
            values[name] = value
            read_keys.add(key)
    if "n_ctx" in values:  # GPT-2's older name
        values["n_positions"] = values.pop("n_ctx")
    for name in _TOKENS:  # a family's default may be beyond this vocabulary
        token = getattr(defaults, name, None)
        if isinstance(token, int) and token >= values.get("vocab_size", token + 1):
            values.setdefault(name, None)
    if values["model_type"] == "mistral":  # whose default is that of its first version
        values.setdefault("sliding_window", None)
    if hasattr(defaults, "query_pre_attn_scalar"):
        values["query_pre_attn_scalar"] = _attention_scalar(header, values, defaults)
        read_keys.add("attention.scale")
    if hasattr(defaults, "rope_parameters"):
        values |= _positions(header, values, defaults)
        read_keys |= _POSITION_KEYS
    _check(header, read_keys, values, defaults)
    return values


def _attention_scalar(header: GgufHeader, values: Mapping[str, Any], defaults: Any) -> int:
    """Return what a Gemma's scores are divided by the root of. Its largest models divide by another number than a head's size, of
    which files say nothing."""
    scale = header.said("attention.scale")
    if scale:
        return round(float(scale) ** -2)
    if values.get("num_hidden_layers") == _LARGEST_GEMMAS.get(values["model_type"]):
        return int(values["hidden_size"]) // int(values["num_attention_heads"])
    return int(values.get("head_dim") or defaults.head_dim)


def _check(header: GgufHeader, read: Collection[str], values: Mapping[str, Any], defaults: Any) -> None:
    """Raise CheckpointError if the file says something of its model that is neither read nor without effect."""
    config = {**vars(defaults), **values, "head_dim": _head_size(values, defaults)}
    for key, value in header.items():
        if key not in read and not _is_neutral(key, value, config):
            raise CheckpointError(f"its {header.architecture}.{key} is {str(value)[:64]}, which is not read here")
    for key in ("split.count", "general.type"):
        found = header.general(key)
        if found not in (None, 0, 1, "model"):
            raise CheckpointError(f"its {key} is {str(found)[:64]}: this is not a whole model")


def _head_size(values: Mapping[str, Any], defaults: Any) -> int:
    """Return the size of a head: the config's, the family's own (Gemma's), or else an equal part of the hidden size."""
    widths, counts = ("hidden_size", "n_embd"), ("num_attention_heads", "n_head")
    width, count = (next((values[name] for name in names if name in values), 1) for names in (widths, counts))
    usual, own = defaults.hidden_size // defaults.num_attention_heads, getattr(defaults, "head_dim", None)
    return int(values.get("head_dim") or (own if own and own != usual else width // count))


def _is_neutral(key: str, value: Any, config: Mapping[str, Any]) -> bool:
    """Return whether a key changes nothing of the model with these values of a config."""
    head = config["head_dim"]
    window = {"attention.sliding_window": config.get("max_position_embeddings") or math.inf}
    same: dict[str, Any] = {
        "attention.key_length": head,
        "attention.value_length": head,
        "attention.scale": head**-0.5 if head else None,
        "attention.causal": True,
        "attention.sliding_window_pattern": config.get("_sliding_window_pattern"),
        "use_parallel_residual": config.get("use_parallel_residual", True),
        "rope.dimension_count": head,
        "rope.freq_base_swa": _local_base(config),
        "attention.max_alibi_bias": 8.0 if config["model_type"] == "bloom" else 0,
        "attention.head_count_kv": config.get("num_attention_heads") or config.get("n_head"),
        "expert_weights_norm": config.get("norm_topk_prob"),
        "expert_feed_forward_length": config.get("intermediate_size"),  # of families that have no other
    }
    if key in _SILENT:
        return True
    if key in window:
        return value in (0, None) or value >= window[key]
    if key in same and isinstance(value, float | int) and isinstance(same[key], float | int):
        return math.isclose(value, same[key], rel_tol=1e-5)
    return value in _ONES if key in _FACTORS else not value


def _local_base(config: Mapping[str, Any]) -> Any:
    """Return the base of the frequencies of layers with a window, of a family that has one of its own."""
    ropes = config.get("rope_parameters") or {}
    local = ropes.get("sliding_attention") if isinstance(ropes, dict) else None
    return local.get("rope_theta") if isinstance(local, dict) else None


def _positions(header: GgufHeader, values: Mapping[str, Any], defaults: Any) -> dict[str, Any]:
    """Return how heads are turned by their positions, if it is not as the family's defaults say. Raises CheckpointError if their
    scaling is unknown here."""
    found: dict[str, Any] = {}
    turned, base = header.said("rope.dimension_count"), header.said("rope.freq_base")
    head = values.get("head_dim") or values["hidden_size"] // values["num_attention_heads"]
    if turned is not None and (turned != head or (defaults.rope_parameters or {}).get("partial_rotary_factor")):
        found["partial_rotary_factor"] = turned / head
    if base is not None:
        found["rope_theta"] = base
    scaling = _scaling(header, defaults.rope_parameters or {})
    if scaling is not None:
        found["rope_scaling"] = scaling
        if hasattr(defaults, "original_max_position_embeddings"):  # Phi-3's own place for it, which counts there
            found["original_max_position_embeddings"] = scaling["original_max_position_embeddings"]
    return found


def _scaling(header: GgufHeader, default: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return `rope_scaling` as transformers has it; None if positions are not scaled. Factors of all frequencies, of whatever
    making, are LongRoPE's with one list for long and for short."""
    kind, factor = header.said("rope.scaling.type"), header.said("rope.scaling.factor")
    original = header.said("rope.scaling.original_context_length") or header.said("context_length")
    factors, attention = header.factors(FREQUENCY_FACTORS), header.said("rope.scaling.attn_factor")
    long, short = header.factors(LONG_FACTORS), header.factors(SHORT_FACTORS)
    beside: dict[str, Any] = {"original_max_position_embeddings": original}
    if factors is not None:
        same = {"short_factor": factors, "long_factor": factors}
        return {"rope_type": "longrope", **same, "factor": 1.0, "attention_factor": 1.0, **beside}
    if long is not None and short is not None:
        if attention is not None:
            beside["attention_factor"] = attention
        return {"rope_type": "longrope", "short_factor": short, "long_factor": long, **beside}
    if kind == "none" or factor in (None, 0):
        return None
    if kind in (None, "linear") and attention in (None, 0, 1):  # linear is what llama.cpp takes a factor alone for
        return None if factor == 1 else {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        return {"rope_type": "yarn", "factor": factor, **_yarn(header, default, factor, attention), **beside}
    raise CheckpointError(f"its positions are scaled by {kind}, which is not known here")


def _yarn(header: GgufHeader, default: Mapping[str, Any], factor: float, attention: float | None) -> dict[str, Any]:
    """Return what YaRN knows beside its factor, if it is not as usual."""
    found = {"truncate": default["truncate"]} if "truncate" in default else {}
    for name in ("beta_fast", "beta_slow"):
        if (beta := header.said(f"rope.scaling.yarn_{name}")) is not None:
            found[name] = beta
    if attention not in (None, 0, 1):
        found["attention_factor"] = attention * (0.1 * math.log(factor) + 1)
    return found
