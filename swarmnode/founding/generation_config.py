"""generation_config.json: the sampling defaults of a checkpoint's makers, and the settings in it that a swarm does not
support.

A key is either read, or refused when the swarm is founded because it asks for an unsupported setting, or without effect on
the text (docs/models.md lists them).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from swarmnode.codec.body import MAX_STOP_IDS, MAX_TEMPERATURE, MAX_TOKEN_ID
from swarmnode.codec.sampling import MAX_REPETITION_PENALTY
from swarmnode.compute.model.packing.tensor_entry import read_json
from swarmnode.errors import CheckpointError
from swarmnode.swarm.storage.content import GENERATION_NAME

BOUNDS: Mapping[str, tuple[float, float]] = {
    "temperature": (0, MAX_TEMPERATURE),
    "top_p": (math.ulp(0.0), 1),
    "top_k": (0, MAX_TOKEN_ID),
    "min_p": (0, 1),
    "repetition_penalty": (1 / MAX_REPETITION_PENALTY, MAX_REPETITION_PENALTY),
}
NOT_DONE: Mapping[str, Any] = {
    **dict.fromkeys(("num_beams", "num_beam_groups", "typical_p", "top_h", "encoder_repetition_penalty"), 1),
    **dict.fromkeys(("guidance_scale", "num_return_sequences"), 1),
    **dict.fromkeys(("min_length", "min_new_tokens", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size"), 0),
    **dict.fromkeys(("epsilon_cutoff", "eta_cutoff", "penalty_alpha", "diversity_penalty"), 0),
    **dict.fromkeys(("suppress_tokens", "begin_suppress_tokens", "forced_bos_token_id", "forced_eos_token_id"), None),
    **dict.fromkeys(("bad_words_ids", "force_words_ids", "sequence_bias", "constraints", "stop_strings"), None),
    **dict.fromkeys(("exponential_decay_length_penalty", "watermarking_config", "token_healing", "dola_layers"), None),
}
"""Settings that change texts and are unsupported, with the value that turns each off; null, false, 0 and empty lists do so too."""


def check_generation_config(folder: Path) -> None:
    """Check a folder's generation_config.json, if it has one.

    Raises CheckpointError if it asks for an unsupported setting, or if a number or token id is out of bounds.
    """
    file = folder / GENERATION_NAME
    if not file.is_file():
        return
    values = read_json(file)
    for name, off in NOT_DONE.items():
        value = values.get(name)
        if value and value != off:
            raise CheckpointError(
                f"{file}: {name} is {str(value)[:40]}, which swarmnode does not support: remove it from the file"
            )
    for name, (least, most) in BOUNDS.items():
        value = values.get(name)
        if value is not None and not (_is_number(value) and least <= value <= most):
            raise CheckpointError(f"{file}: {name} is {str(value)[:40]}, not a number from {least:g} to {most:g}")
    ends = values.get("eos_token_id")
    listed = ends if isinstance(ends, list) else [] if ends is None else [ends]
    if len(listed) > MAX_STOP_IDS or not all(type(end) is int and 0 <= end <= MAX_TOKEN_ID for end in listed):
        raise CheckpointError(
            f"{file}: eos_token_id is neither a token id nor a list of up to {MAX_STOP_IDS} token ids"
        )


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
