"""Config and sampling settings of a GGUF model: the keys that transformers' reader takes, and the others."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from swarmnode.compute.gguf.gguf_tokenizer import GgufTokenizer
from swarmnode.compute.gguf.mixtures import KEYS, LATENT, scale_latent
from swarmnode.errors import CheckpointError

# Factors of the rotary frequencies (Llama's from 3.1 on, and LongRoPE's), stored beside the weights.
FREQUENCY_FACTORS, LONG_FACTORS, SHORT_FACTORS = (
    f"{name}.weight" for name in ("rope_freqs", "rope_factors_long", "rope_factors_short")
)
ROPE_TENSORS = frozenset((FREQUENCY_FACTORS, LONG_FACTORS, SHORT_FACTORS))
OUTPUT = "output.weight"

_EPSILONS = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps")
# Keys that transformers' reader omits for some architecture, with the families' config names for them.
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
_SIZES = (
    *("block_count", "embedding_length", "context_length", "rope.dimension_count", "attention.head_count"),
    *("attention.head_count_kv", "attention.key_length", "attention.value_length"),
)
"""Sizes that the config divides by, or builds modules by; lists have one for each layer"""
MAX_SIZE = 1 << 31
_POSITION_KEYS = frozenset(
    {"rope.freq_base", "rope.dimension_count"}
    | {f"rope.scaling.{name}" for name in ("type", "factor", "original_context_length", "attn_factor", "finetuned")}
    | {f"rope.scaling.yarn_{name}" for name in ("beta_fast", "beta_slow", "ext_factor", "attn_factor")}
    | {"rope.scale_linear"}
)
SCALINGS = ("none", "linear", "yarn", "longrope")
_SILENT = frozenset(
    {"context_length", "vocab_size", "block_count", "embedding_length", "feed_forward_length", "tensor_data_layout"}
    | {"pooling_type", "rope.scaling.finetuned", "expert_count", "expert_used_count"}
)
"""Keys of sizes that the tensors' shapes also show, and keys without an effect on a causal language model"""
PREFIX = "general.sampling."
NAMES = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}
WITHOUT_EFFECT = frozenset({"sequence", "penalty_last_n", "xtc_threshold", "mirostat_tau", "mirostat_eta"})
"""Keys of the order of the steps, which is fixed here, and of settings for steps that are off"""


def generation_config(fields: Mapping[str, Any], tokenizer: GgufTokenizer) -> dict[str, Any]:
    """Return the values of a generation_config.json.

    Raises CheckpointError if the file asks for a way to draw tokens that is not supported here.
    """
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
            raise CheckpointError(f"its {name} asks for a way to draw tokens that is not supported here")
    if "temperature" in values:
        values["do_sample"] = values["temperature"] > 0
    return values


_FACTORS = frozenset(
    {"logit_scale", "embedding_scale", "residual_scale", "expert_weights_scale", "expert_group_scale"}
    | {"attention.output_scale", "rope.scaling.alpha"}
)
_ONES = (0, 1)
_LARGEST_GEMMAS = {"gemma2": 46, "gemma3_text": 62}  # layers of the models with 27 billion parameters
_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")


class GgufHeader:
    """Values that a file holds for its model, by key without the architecture's name, and its small tensors. `readers` are those of
    all parts of a split model; the first part has the values."""

    def __init__(self, *readers: Any) -> None:
        self.parts = len(readers)
        self._fields: Mapping[str, Any] = readers[0].fields
        self._tensors = {tensor.name: tensor for reader in readers for tensor in reader.tensors}
        self.architecture = str(self._fields["general.architecture"].contents())

    def said(self, key: str) -> Any:
        """Return the value of `key` for the architecture; None if the file lacks it."""
        field = self._fields.get(f"{self.architecture}.{key}")
        return None if field is None else field.contents()

    def items(self) -> Iterator[tuple[str, Any]]:
        """Yield all keys and values of the architecture, without its name in front."""
        for name, field in self._fields.items():
            if name.startswith(f"{self.architecture}."):
                yield name.removeprefix(f"{self.architecture}."), field.contents()

    def general(self, key: str) -> Any:
        """Return the value of a key without an architecture's name in front; None if the file lacks it."""
        field = self._fields.get(key)
        return None if field is None else field.contents()

    def factors(self, name: str) -> list[float] | None:
        """Return the values of the float32 tensor `name`; None if there is none."""
        tensor = self._tensors.get(name)
        return None if tensor is None else [float(factor) for factor in tensor.data]

    def __contains__(self, tensor: str) -> bool:
        return tensor in self._tensors


def complete_config(header: GgufHeader, read: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a config.json: those that transformers' reader found (`read`), and others from the file.

    Raises CheckpointError if a key has an effect that is not supported here.
    """
    from transformers.integrations.ggml import GGUF_CONFIG_MAPPING
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    values = {**read, "tie_word_embeddings": OUTPUT not in header}
    defaults = CONFIG_MAPPING[values["model_type"]]()
    for key in _SIZES:
        # Files of models without attention say that they have 0 heads.
        least = 0 if key == "attention.head_count" and not hasattr(defaults, "num_attention_heads") else 1
        if (size := header.said(key)) is not None and not (isinstance(size, list) or least <= size <= MAX_SIZE):
            raise CheckpointError(
                f"its {header.architecture}.{key} is {size}, not a whole number from 1 to {MAX_SIZE:,}"
            )
    mapping: Any = GGUF_CONFIG_MAPPING
    # Some architectures have other names in the files than in transformers.
    known = {**mapping.get(header.architecture, {}), **mapping.get(values["model_type"].removesuffix("_text"), {})}
    read_keys = {key for key, name in known.items() if name is not None} | {*KEYS.get(header.architecture, ())}
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
    if values["model_type"] == "mistral":  # the config's default is that of its first version
        values.setdefault("sliding_window", None)
    if hasattr(defaults, "query_pre_attn_scalar"):
        # The root of this number divides a Gemma's attention scores. The largest models use another one than a head's size, which
        # is not in their files.
        if scale := header.said("attention.scale"):
            scalar = round(float(scale) ** -2)
        elif values.get("num_hidden_layers") == _LARGEST_GEMMAS.get(values["model_type"]):
            scalar = int(values["hidden_size"]) // int(values["num_attention_heads"])
        else:
            scalar = int(values.get("head_dim") or defaults.head_dim)
        values["query_pre_attn_scalar"] = scalar
        read_keys.add("attention.scale")
    if hasattr(defaults, "rope_parameters"):
        values |= _positions(header, values, defaults)
        if header.architecture == LATENT and "rope_scaling" in values:
            scale_latent(header, values["rope_scaling"])
        read_keys |= _POSITION_KEYS
    _check(header, read_keys, values, defaults)
    return values


def _check(header: GgufHeader, read: Collection[str], values: Mapping[str, Any], defaults: Any) -> None:
    """Raise CheckpointError if a key of the file is neither read nor without effect, or the file is not a whole model."""
    # The size of a head: the config's, the family's own (Gemma's), or else an equal part of the hidden size.
    widths, counts = ("hidden_size", "n_embd"), ("num_attention_heads", "n_head")
    width, count = (next((values[name] for name in names if name in values), 1) for names in (widths, counts))
    heads = getattr(defaults, "num_attention_heads", 1)
    usual, own = defaults.hidden_size // heads, getattr(defaults, "head_dim", None)
    head = int(values.get("head_dim") or (own if own and own != usual else width // count))
    config = {**vars(defaults), **values, "head_dim": head}
    for key, value in header.items():
        if key not in read and not _is_neutral(key, value, config):
            raise CheckpointError(f"its {header.architecture}.{key} is {str(value)[:64]}, which is not supported here")
    for key in ("split.count", "general.type"):
        found = header.general(key)
        if found not in (None, 0, 1, "model", header.parts):
            raise CheckpointError(f"its {key} is {str(found)[:64]}: this is not a whole model")


def _is_neutral(key: str, value: Any, config: Mapping[str, Any]) -> bool:
    """Return whether a key's value changes nothing in a model with this config."""
    head = config["head_dim"]
    ropes = config.get("rope_parameters") or {}
    local = (
        ropes.get("sliding_attention") if isinstance(ropes, dict) else None
    )  # of layers with a window, in some families
    same: dict[str, Any] = {
        "attention.key_length": head,
        "attention.value_length": head,
        "attention.scale": head**-0.5 if head else None,
        "attention.causal": True,
        "attention.sliding_window_pattern": config.get("_sliding_window_pattern"),
        "use_parallel_residual": config.get("use_parallel_residual", True),
        "rope.dimension_count": head,
        "rope.freq_base_swa": local.get("rope_theta") if isinstance(local, dict) else None,
        "attention.max_alibi_bias": 8.0 if config["model_type"] == "bloom" else 0,
        "attention.head_count_kv": config.get("num_attention_heads") or config.get("n_head"),
        "expert_weights_norm": config.get("norm_topk_prob"),
        "expert_feed_forward_length": config.get("intermediate_size"),  # families that have no other name for it
    }
    if key in _SILENT:
        return True
    if key == "attention.sliding_window":
        return value in (0, None) or value >= (config.get("max_position_embeddings") or math.inf)
    if key in same and isinstance(value, float | int) and isinstance(same[key], float | int):
        return math.isclose(value, same[key], rel_tol=1e-5)
    return value in _ONES if key in _FACTORS else not value


def _positions(header: GgufHeader, values: Mapping[str, Any], defaults: Any) -> dict[str, Any]:
    """Return the config values for positions: rotated part, base and scaling, if the file has them.

    Raises CheckpointError if the scaling is not supported here.
    """
    found: dict[str, Any] = {}
    turned, base = header.said("rope.dimension_count"), header.said("rope.freq_base")
    head = values.get("head_dim") or values["hidden_size"] // values["num_attention_heads"]
    if turned is not None and (turned != head or (defaults.rope_parameters or {}).get("partial_rotary_factor")):
        found["partial_rotary_factor"] = turned / head
    if base is not None:
        found["rope_theta"] = base
    scaling = _scaling(header, defaults.rope_parameters or {}, head)
    if scaling is not None:
        found["rope_scaling"] = scaling
        if hasattr(defaults, "original_max_position_embeddings"):  # Phi-3 reads it from here
            found["original_max_position_embeddings"] = header.said(
                "rope.scaling.original_context_length"
            ) or header.said("context_length")
    return found


def _scaling(header: GgufHeader, default: Mapping[str, Any], head: int) -> dict[str, Any] | None:
    """Return `rope_scaling` for a config; None if positions are not scaled. `head` is the size of a head.

    As in llama.cpp, factors for each frequency, a factor for all of them (linear or YaRN) and a factor of attention are applied
    together. Several kinds, or a kind that no config has, become LongRoPE's lists. Raises CheckpointError if a value is out of its
    range, or the kind is not supported here.
    """
    kind, factor = header.said("rope.scaling.type"), header.said("rope.scaling.factor")
    if kind not in (None, *SCALINGS):  # llama.cpp takes a factor without a type as linear
        raise CheckpointError(f"its positions are scaled by {str(kind)[:64]}, which is not supported here")
    factor = header.said("rope.scale_linear") if factor is None else factor  # an older name
    factor = 1.0 if kind == "none" or not factor else _positive("rope.scaling.factor", factor)
    attention = _positive("rope.scaling.attn_factor", header.said("rope.scaling.attn_factor") or 1.0)
    for name in ("ext", "attn"):
        given, meant = header.said(f"rope.scaling.yarn_{name}_factor"), float(name == "attn" or kind == "yarn")
        if given not in (None, -1, meant):
            key = f"{header.architecture}.rope.scaling.yarn_{name}_factor"
            raise CheckpointError(f"its {key} is {str(given)[:64]}, which is not supported here")
    rotated = header.said("rope.dimension_count") or head
    long, short = _factors(header, rotated)
    if kind == "longrope" and long is None:
        raise CheckpointError(f"its positions are scaled by longrope, and it has no {LONG_FACTORS} and {SHORT_FACTORS}")
    original = header.said("rope.scaling.original_context_length") or header.said("context_length")
    beside: dict[str, Any] = {"original_max_position_embeddings": original}
    is_yarn = kind == "yarn" and factor != 1
    if long is None and is_yarn:
        yarn = {"truncate": default["truncate"]} if "truncate" in default else {}
        for name in ("beta_fast", "beta_slow"):
            if (beta := header.said(f"rope.scaling.yarn_{name}")) is not None:
                yarn[name] = beta
        if attention != 1:
            yarn["attention_factor"] = attention * _yarn_attention(factor)
        return {"rope_type": "yarn", "factor": factor, **yarn, **beside}
    if long is None and attention == 1:
        return None if factor == 1 else {"rope_type": "linear", "factor": factor}
    if "full_attention" in default:
        raise CheckpointError("its positions are scaled in two ways, which is not supported for this family")
    divisors = [factor] * (rotated // 2)
    if is_yarn:
        divisors, attention = _yarn_divisors(header, factor, rotated, original), attention * _yarn_attention(factor)
    long, short = (
        [one * divisor for one, divisor in zip(given or [1.0] * len(divisors), divisors, strict=True)]
        for given in (long, short)
    )
    return {
        "rope_type": "longrope",
        "short_factor": short,
        "long_factor": long,
        "attention_factor": attention,
        **beside,
    }


def _positive(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise CheckpointError(f"its {name} is {str(value)[:64]}, not a number above 0")
    return float(value)


def _factors(header: GgufHeader, rotated: int) -> tuple[list[float] | None, list[float] | None]:
    """Return the factors of the `rotated` / 2 frequencies in long and in short texts; None, None if there are none. Raises
    CheckpointError if they do not fit."""
    names = (FREQUENCY_FACTORS,) * 2 if FREQUENCY_FACTORS in header else (LONG_FACTORS, SHORT_FACTORS)
    found = [header.factors(name) for name in names]
    for name, factors in zip(names, found, strict=True):
        if factors is None and any(found):
            raise CheckpointError(f"it has no {name}, which it needs beside its counterpart; fetch it again")
        if factors is not None and (len(factors) != rotated // 2 or not all(0 < one < math.inf for one in factors)):
            raise CheckpointError(
                f"its {name} has not {rotated // 2} numbers above 0, one for each frequency; fetch it again"
            )
    return found[0], found[1]


def _yarn_attention(factor: float) -> float:
    return max(1.0, 0.1 * math.log(factor) + 1)


def _yarn_divisors(header: GgufHeader, factor: float, rotated: int, original: int) -> list[float]:
    """Return what YaRN divides each of the `rotated` / 2 frequencies by, as ggml computes it."""
    base = header.said("rope.freq_base") or 10_000.0

    def place(turns: float) -> float:
        return rotated * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(base))

    fast, slow = (
        header.said(f"rope.scaling.yarn_beta_{name}") or usual for name, usual in (("fast", 32.0), ("slow", 1.0))
    )
    low, high = max(0, math.floor(place(fast))), min(rotated - 1, math.ceil(place(slow)))
    kept = (1 - min(1.0, max(0.0, (at - low) / max(0.001, high - low))) for at in range(rotated // 2))
    return [1 / (share + (1 - share) / factor) for share in kept]
