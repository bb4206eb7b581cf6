"""Values of a checkpoint's small files for its use: how long texts may be, and how tokens are sampled."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from swarmnode.client.tokenizer import read_config
from swarmnode.codec.sampling import USUAL
from swarmnode.errors import UsageError
from swarmnode.serving.client.generation import GenerateOptions

log = logging.getLogger(__name__)

# Names of one config field in different model families: Llama, GPT-2, MPT, older ones.
POSITIONS = ("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx", "max_sequence_length")
STRETCHED = ("linear", "dynamic", "ntk")  # scalings of rotary embeddings whose config has the positions before scaling
CHOOSING = ("temperature", "top_p", "top_k", "min_p")  # what decides between likely and unlikely tokens
DRAWING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty")


def context_limit(folder: Path) -> int | None:
    """Return the number of positions that a text may have, by the config in `folder`; None if the config does not say."""
    config = read_config(folder / "config.json")
    text = config.get("text_config")
    return positions_of(text if isinstance(text, Mapping) else config)


def positions_of(config: Mapping[str, Any]) -> int | None:
    """Return the number of positions of a model, including the scaling of its rotary embeddings; None if the config does not
    say."""
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
    """Return the checkpoint's defaults for sampling, as fields of GenerateOptions. Missing values and values that GenerateOptions
    refuses are left out. A checkpoint without a temperature, top-p, top-k and min-p gets those of `USUAL`."""
    told = read_config(folder / "generation_config.json")
    usable = {name: told[name] for name in DRAWING if _can_be_drawn_by(name, told.get(name))}
    return usable if usable.keys() & set(CHOOSING) else {**USUAL, **usable}


def _can_be_drawn_by(name: str, value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        GenerateOptions(**{name: value})  # type: ignore[arg-type]  # each field is a number
    except UsageError as error:
        log.warning("generation_config.json: %s", error)
        return False
    return True
