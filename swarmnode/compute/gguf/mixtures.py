"""Mixtures in GGUF files whose architecture transformers' reader does not know: config and tensors by llama.cpp's names.

The names are those of package `gguf` (`constants.py`, `tensor_mapping.py`). llama.cpp's converter (`convert_hf_to_gguf.py`) says
what each key means. An architecture that is read has an entry in `KEYS`; one that is refused has its reason in `REFUSED`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from swarmnode.errors import CheckpointError

_USUAL = {
    "context_length": "max_position_embeddings",
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "vocab_size": "vocab_size",
    "attention.head_count": "num_attention_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "leading_dense_block_count": "first_k_dense_replace",
    "expert_count": "n_routed_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_shared_count": "n_shared_experts",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_group_count": "n_group",
    "expert_group_used_count": "topk_group",
    "expert_weights_scale": "routed_scaling_factor",
    "expert_weights_norm": "norm_topk_prob",
}
_LATENT_SIZES = (
    "attention.key_length",
    "attention.value_length",
    "attention.key_length_mla",
    "attention.value_length_mla",
)
LATENT = "deepseek2"
YARN_SCALE = "rope.scaling.yarn_log_multiplier"
KEYS: Mapping[str, Mapping[str, str | None]] = {
    "glm4moe": {
        **_USUAL,
        "attention.head_count_kv": "num_key_value_heads",
        "attention.key_length": "head_dim",
        "expert_gating_func": None,
        "nextn_predict_layers": None,
    },
    LATENT: {
        **_USUAL,
        "attention.head_count_kv": None,
        "attention.q_lora_rank": "q_lora_rank",
        "attention.kv_lora_rank": "kv_lora_rank",
        **dict.fromkeys((*_LATENT_SIZES, "expert_gating_func", YARN_SCALE)),
    },
}
"""Config names of an architecture's keys; None: the key is read in another way"""
REFUSED = {
    "llama4": "Llama 4 keeps its experts transposed, which no packed product computes",
    "qwen3next": "Qwen3-Next joins the rows of its linear attention in another order than its file",
    "gpt-oss": "gpt-oss alternates the rows of gate and up, which its file keeps apart",
}
"""Reasons why an architecture of a mixture is not read"""
SOFTMAX, SIGMOID = 1, 2  # values of expert_gating_func
_BIAS = re.compile(r"(?:model\.)?layers\.(?P<layer>\d+)\.mlp\.gate\.e_score_correction_bias")
_LATENT_PART = re.compile(r"(?P<block>blk\.\d+\.attn_)(?P<part>[kv])_b\.weight")


def read_mixture(header: Any) -> dict[str, Any]:
    """Return the values of a config.json that the `GgufHeader` of an architecture in `KEYS` gives.

    Raises CheckpointError if a key is missing, or contradicts another one.
    """
    values = {
        name: value
        for key, name in KEYS[header.architecture].items()
        if name is not None and (value := header.said(key)) is not None
    }
    for name in ("num_hidden_layers", "num_attention_heads", "hidden_size"):
        if not isinstance(values.get(name), int) or values[name] < 1:
            raise CheckpointError(f"it does not say its {name}")
    scores = header.said("expert_gating_func")
    has_bias = any(f"blk.{layer}.exp_probs_b.bias" in header for layer in range(values["num_hidden_layers"]))
    scores = (SIGMOID if has_bias else SOFTMAX) if scores is None else scores  # older files do not say it
    values.setdefault("n_group", 1)
    values.setdefault("topk_group", values["n_group"])
    if header.architecture == "glm4moe":
        if scores != SIGMOID:
            raise CheckpointError(f"its glm4moe.expert_gating_func is {scores}, which is not supported here")
        values["num_hidden_layers"] -= header.said("nextn_predict_layers") or 0
        values |= {
            "model_type": "glm4_moe",
            "attention_bias": "blk.0.attn_q.bias" in header,
            "use_qk_norm": "blk.0.attn_q_norm.weight" in header,
        }
        return values
    # DeepSeek: keys and values come from one latent vector. Newer files give the sizes of llama.cpp's own attention, and the
    # model's in keys that end in _mla.
    rotated = header.said("rope.dimension_count")
    key, value = (
        header.said(f"attention.{one}_length_mla") or header.said(f"attention.{one}_length") for one in ("key", "value")
    )
    if None in (rotated, key, value, values.get("kv_lora_rank")) or not 0 < rotated < key:
        raise CheckpointError("the sizes of its latent attention are missing, or contradict each other")
    is_third = scores == SIGMOID
    if not is_third and values.get("norm_topk_prob"):
        raise CheckpointError("its deepseek2.expert_weights_norm is true beside softmax, which is not supported here")
    return values | {
        "model_type": "deepseek_v3" if is_third else "deepseek_v2",
        "num_key_value_heads": values["num_attention_heads"],
        "q_lora_rank": values.get("q_lora_rank"),
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": key - rotated,
        "head_dim": rotated,
        "v_head_dim": value,
        **({} if is_third or values["n_group"] == 1 else {"topk_method": "group_limited_greedy"}),
    }


def scale_latent(header: Any, scaling: dict[str, Any]) -> None:
    """Add to YaRN's `scaling` the factors of DeepSeek's attention. Raises CheckpointError if the file does not give them."""
    multiplier = header.said(YARN_SCALE)
    if multiplier is None or not 0 < multiplier < math.inf:
        raise CheckpointError(f"its positions are scaled by {scaling['rope_type']} without its {YARN_SCALE}")
    scaling |= dict.fromkeys(("mscale", "mscale_all_dim"), round(10 * float(multiplier), 6))  # the file has a tenth
    scaling.pop("attention_factor", None)


def mixture_processor(config: dict[str, Any]) -> Any:
    """Return a converter of tensors, with the interface of transformers' ones, for the architectures in `KEYS`."""
    from transformers.modeling_gguf_pytorch_utils import GGUFTensor, MiniMaxM2TensorProcessor

    made: Any = GGUFTensor
    base: Any = MiniMaxM2TensorProcessor

    class MixtureProcessor(base):
        """Converter that joins gate and up of experts, and the two parts of DeepSeek's kv_b."""

        def perform_fallback_tensor_mapping(
            self, names: dict[str, str], suffix: str, qual_name: str, hf_name: str
        ) -> None:
            if found := _BIAS.fullmatch(hf_name):
                names[f"blk.{found['layer']}.exp_probs_b.bias"] = qual_name + hf_name
            else:
                super().perform_fallback_tensor_mapping(names, suffix, qual_name, hf_name)

        def process(self, weights: Any, name: str, **kwargs: Any) -> Any:
            found = _LATENT_PART.fullmatch(name)
            whole = kwargs["tensor_key_mapping"].get(f"{found['block']}kv_b.weight") if found else None
            if found is None or whole is None or weights.ndim != 3:
                return super().process(weights, name, **kwargs)
            # Newer files: the rows of each head's keys (transposed) and of its values, apart. What stays NaN was not in the file.
            keys, values, rank = (config[key] for key in ("qk_nope_head_dim", "v_head_dim", "kv_lora_rank"))
            shape = (config["num_attention_heads"], keys + values, rank)
            joined = kwargs["parsed_parameters"]["tensors"]
            joined_HRL = joined.setdefault(whole, torch.full((shape[0] * shape[1], rank), math.nan)).view(shape)
            part = np.swapaxes(weights, 1, 2) if found["part"] == "k" else weights
            rows = slice(keys) if found["part"] == "k" else slice(keys, None)
            if part.shape != joined_HRL[:, rows].shape:
                raise ValueError(f"{name} is of shape {tuple(weights.shape)}")
            joined_HRL[:, rows] = torch.from_numpy(np.copy(part))
            return made(weights, None, {})

    return MixtureProcessor(config=config)
