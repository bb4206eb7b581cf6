"""What peft's `adapter_config.json` says of a LoRA adapter, and which of peft's many variants are computed here.

Only what changes nothing but `y = W x` into `y = W x + scale * B A x` is taken (LoRA, arXiv 2106.09685, section 4.1). A field that
this version does not know may stand for another product: it is refused where it is set, rather than computed wrongly.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from swarmnode.errors import CheckpointError
from swarmnode.files.bounded import read_bounded

MAX_CONFIG_BYTES = 64 << 10
MAX_RANK = 4096
MAX_ALPHA = 1e6
NEUTRAL = frozenset(
    {
        *("peft_type", "r", "lora_alpha", "use_rslora", "auto_mapping", "peft_version", "base_model_name_or_path"),
        *("revision", "task_type", "inference_mode", "lora_dropout", "target_modules", "exclude_modules"),
        *("fan_in_fan_out", "layers_to_transform", "layers_pattern", "megatron_core", "megatron_config"),
        *("eva_config", "runtime_config", "qalora_group_size", "velora_config", "bias", "init_lora_weights"),
    }
)
"""Fields that say nothing of the product beside its two matrices, or are looked at by themselves. How inputs go into a matrix
(`fan_in_fan_out`) the layer itself tells."""

VARIANTS: Mapping[str, str] = {
    "use_dora": "DoRA, which scales the weights' columns",
    "lora_bias": "biases of its own",
    "modules_to_save": "whole layers of its own (modules_to_save)",
    "rank_pattern": "ranks that differ by layer (rank_pattern)",
    "alpha_pattern": "scales that differ by layer (alpha_pattern)",
    "trainable_token_indices": "embeddings of its own (trainable_token_indices)",
    "target_parameters": "changes to parameters that are no linear layers (target_parameters)",
    "layer_replication": "layers that are there twice (layer_replication)",
    "alora_invocation_tokens": "a text from which on it works (aLoRA)",
    "use_qalora": "QA-LoRA",
}
PLAIN_STARTS = frozenset({"gaussian", "eva", "orthogonal"})
"""Ways of drawing the first matrices that leave the model's own weights alone; the others (PiSSA, OLoRA, LoftQ) change them."""


@dataclass(frozen=True)
class LoraConfig:
    """A plain LoRA adapter of this rank. `scale` is what its product is multiplied by."""

    rank: int
    scale: float


def read_lora_config(file: Path) -> LoraConfig:
    """The adapter that `adapter_config.json` describes. Raises CheckpointError with what is not taken."""
    fields = _read(file)
    kind = fields.get("peft_type")
    if kind != "LORA":
        raise CheckpointError(f"{file}: an adapter of type {kind!r}: only LORA is served")
    for name, value in fields.items():
        if name in VARIANTS and value:
            raise CheckpointError(f"{file}: the adapter has {VARIANTS[name]}: only plain LoRA is served")
        if name not in NEUTRAL and name not in VARIANTS and _is_set(value):
            raise CheckpointError(
                f"{file}: the adapter sets {name[:64]!r}, which this version of swarmnode does not know"
            )
    if fields.get("bias", "none") != "none":
        raise CheckpointError(f"{file}: the adapter has biases of its own: only plain LoRA is served")
    start = fields.get("init_lora_weights", True)
    if not (isinstance(start, bool | None) or (isinstance(start, str) and start in PLAIN_STARTS)):
        raise CheckpointError(
            f"{file}: the adapter began by changing the model's own weights (init_lora_weights {str(start)[:32]!r}): "
            "convert it to plain LoRA with peft (save_pretrained with path_initial_model_for_weight_conversion)"
        )
    rank, alpha = fields.get("r"), fields.get("lora_alpha")
    if not isinstance(rank, int) or isinstance(rank, bool) or not 1 <= rank <= MAX_RANK:
        raise CheckpointError(f"{file}: r must be a whole number from 1 to {MAX_RANK}")
    if not isinstance(alpha, int | float) or isinstance(alpha, bool) or not abs(alpha) <= MAX_ALPHA:
        raise CheckpointError(f"{file}: lora_alpha must be a number up to {MAX_ALPHA:g}")
    # rsLoRA (arXiv 2312.03732): by the root of the rank, so that higher ranks learn as fast.
    return LoraConfig(rank, alpha / (math.sqrt(rank) if fields.get("use_rslora") else rank))


def _is_set(value: object) -> bool:
    """Whether a field says something: what is off, empty or made of such is as if it were not there."""
    if isinstance(value, dict):
        return any(map(_is_set, value.values()))
    return bool(value)


def _read(file: Path) -> dict[str, Any]:
    try:
        raw = read_bounded(file, MAX_CONFIG_BYTES)
        if raw is None:
            raise CheckpointError(f"{file}: over {MAX_CONFIG_BYTES} bytes, which no adapter's config needs")
        fields = json.loads(raw)
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file}: not readable as JSON: {error}") from None
    if not isinstance(fields, dict):
        raise CheckpointError(f"{file}: not a JSON object")
    return fields
