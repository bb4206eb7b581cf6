"""The config of a GGUF model: what transformers' reader takes from the file, and what it leaves at a family's defaults though the
file says it: sizes of heads and experts, how much of a head is turned by its position, and how positions are scaled."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from swarmnode.errors import CheckpointError

# Factors of the rotary frequencies (a Llama's from 3.1 on, and of LongRoPE), which stand beside the weights.
FREQUENCY_FACTORS, LONG_FACTORS, SHORT_FACTORS = (
    f"{name}.weight" for name in ("rope_freqs", "rope_factors_long", "rope_factors_short")
)
ROPE_TENSORS = frozenset((FREQUENCY_FACTORS, LONG_FACTORS, SHORT_FACTORS))
OUTPUT = "output.weight"

_SIZES = {
    "attention.key_length": "head_dim",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
}
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

    def factors(self, name: str) -> list[float] | None:
        """The float32 tensor `name`; None where there is none."""
        tensor = self._tensors.get(name)
        return None if tensor is None else [float(factor) for factor in tensor.data]

    def __contains__(self, tensor: str) -> bool:
        return tensor in self._tensors


def complete_config(header: GgufHeader, read: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a config.json: those that transformers' reader `read`, and what else the file says.

    Raises CheckpointError where its positions are scaled in a way that is unknown here.
    """
    from transformers.integrations.ggml import GGUF_CONFIG_MAPPING
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    values = {**read, "tie_word_embeddings": OUTPUT not in header}
    defaults = CONFIG_MAPPING[values["model_type"]]()
    mapping: Any = GGUF_CONFIG_MAPPING
    known = mapping.get(header.architecture, {})
    for key, name in _SIZES.items():
        if hasattr(defaults, name) and key not in known and (size := header.said(key)) is not None:
            values.setdefault(name, size)
    if "n_ctx" in values:  # GPT-2's older name
        values["n_positions"] = values.pop("n_ctx")
    for name in _TOKENS:  # a family's default may be beyond this vocabulary
        token = getattr(defaults, name, None)
        if isinstance(token, int) and token >= values.get("vocab_size", token + 1):
            values.setdefault(name, None)
    if hasattr(defaults, "rope_parameters"):
        values |= _positions(header, values, defaults)
    return values


def _positions(header: GgufHeader, values: Mapping[str, Any], defaults: Any) -> dict[str, Any]:
    """How heads are turned by their positions, where it is not as the family's defaults say."""
    found: dict[str, Any] = {}
    turned = header.said("rope.dimension_count")
    head = values.get("head_dim") or values["hidden_size"] // values["num_attention_heads"]
    if turned is not None and (turned != head or (defaults.rope_parameters or {}).get("partial_rotary_factor")):
        found["partial_rotary_factor"] = turned / head
    scaling = _scaling(header)
    if scaling is not None:
        found["rope_scaling"] = scaling
        if hasattr(defaults, "original_max_position_embeddings"):  # Phi-3's own place for it, which counts there
            found["original_max_position_embeddings"] = scaling["original_max_position_embeddings"]
    return found


def _scaling(header: GgufHeader) -> dict[str, Any] | None:
    """`rope_scaling` as transformers has it. Factors of all frequencies, of whatever making, are LongRoPE's with one list for long
    and for short."""
    kind, factor = header.said("rope.scaling.type"), header.said("rope.scaling.factor")
    original = header.said("rope.scaling.original_context_length") or header.said("context_length")
    factors = header.factors(FREQUENCY_FACTORS)
    long, short = header.factors(LONG_FACTORS), header.factors(SHORT_FACTORS)
    beside: dict[str, Any] = {"original_max_position_embeddings": original}
    if factors is not None:
        same = {"short_factor": factors, "long_factor": factors}
        return {"rope_type": "longrope", **same, "factor": 1.0, "attention_factor": 1.0, **beside}
    if long is not None and short is not None:
        attention = header.said("rope.scaling.attn_factor")
        if attention is not None:
            beside["attention_factor"] = attention
        return {"rope_type": "longrope", "short_factor": short, "long_factor": long, **beside}
    if kind in (None, "none") or factor is None:
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        return {"rope_type": "yarn", "factor": factor, **beside}
    raise CheckpointError(f"its positions are scaled by {kind}, which is not known here")
