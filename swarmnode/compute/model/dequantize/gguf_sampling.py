"""How texts are drawn, and where they end, as a GGUF file says it: the values of a generation_config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from swarmnode.compute.model.dequantize.gguf_tokenizer import GgufTokenizer
from swarmnode.errors import CheckpointError

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
