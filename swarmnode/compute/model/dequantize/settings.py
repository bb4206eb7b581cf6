"""What a config says of how its weights are quantised."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from swarmnode.errors import CheckpointError

KEYS = ("quantization_config", "compression_config")


def settings_of(config: Any) -> Mapping[str, Any] | None:
    """How a transformers config says that the weights are quantised; None where they are not. Raises CheckpointError."""
    settings = next((each for key in KEYS if (each := getattr(config, key, None)) is not None), None)
    if settings is not None and not isinstance(settings, dict):
        raise CheckpointError("the checkpoint's quantization_config is not a table")
    return settings
