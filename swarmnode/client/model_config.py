"""What a checkpoint's small files say of how its model is to be asked: how long texts may be, and how tokens are drawn."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from swarmnode.client.tokenizer import read_config
from swarmnode.errors import UsageError
from swarmnode.serving.client.generation import GenerateOptions

log = logging.getLogger(__name__)

# Of a config, by the families that call it so: Llama, GPT-2, MPT, older ones.
POSITIONS = ("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx", "max_sequence_length")
STRETCHED = ("linear", "dynamic", "ntk")  # scalings of rotary embeddings whose config tells the positions before them
DRAWING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty")


def context_limit(folder: Path) -> int | None:
    """Return how many positions a text may have, as the config in a folder says; None where it does not."""
    config = read_config(folder / "config.json")
    text = config.get("text_config")
    return positions_of(text if isinstance(text, Mapping) else config)


def positions_of(config: Mapping[str, Any]) -> int | None:
    """Return the positions that a model was trained for, with what its rotary embeddings are stretched by. None where the config
    does not say."""
    told = [size for name in POSITIONS if isinstance(size := config.get(name), int) and size > 0]
    if not told:
        return None
    scaling = config.get("rope_scaling") or config.get("rope_parameters")
    if not isinstance(scaling, Mapping):
        return told[0]
    kind, factor = scaling.get("rope_type", scaling.get("type")), scaling.get("factor")
    if not isinstance(factor, int | float) or factor <= 1:
        return told[0]
    original = scaling.get("original_max_position_embeddings")
    if kind == "yarn":
        return max(told[0], int((original if isinstance(original, int) else told[0]) * factor))
    return int(told[0] * factor) if kind in STRETCHED else told[0]


def generation_defaults(folder: Path) -> dict[str, float | int]:
    """Return how tokens are drawn where nobody says it, as the checkpoint's makers do: fields of GenerateOptions. Empty where they
    do not say, or say what no text can be drawn by."""
    told = read_config(folder / "generation_config.json")
    return {name: told[name] for name in DRAWING if _can_be_drawn_by(name, told.get(name))}


def _can_be_drawn_by(name: str, value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        GenerateOptions(**{name: value})  # type: ignore[arg-type]  # each of them is a number
    except UsageError as error:
        log.warning("generation_config.json: %s", error)
        return False
    return True
