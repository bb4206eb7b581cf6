"""Rotary embeddings whose frequencies follow from how long the longest row of a pass is: what that means for who goes with whom.

With longrope (arXiv 2402.13753) a pass goes by other frequencies as soon as one of its rows is beyond the length of the original
training. So that nobody's numbers depend on neighbours, or on how a prompt was cut, no pass has rows on both sides of it.
"Dynamic" frequencies change with every further position, and what is cached already was turned by others: there is no such side.
"""

from __future__ import annotations

from typing import Any


def switching_position(config: Any) -> int | None:
    """The first position that a longrope model of this transformers config turns by its long frequencies; None for others."""
    lengths = [
        rope.get("original_max_position_embeddings") or config.max_position_embeddings
        for rope in ropes(config)
        if rope.get("rope_type") == "longrope"
    ]
    return min(lengths, default=None)


def is_dynamic(config: Any) -> bool:
    """Whether frequencies change with every position."""
    return any("dynamic" in str(rope.get("rope_type")) for rope in ropes(config))


def ropes(config: Any) -> list[dict[str, Any]]:
    """What a config says of its layers' rotary embeddings; layers of several types may have one each."""
    told = getattr(config, "rope_parameters", None) or {}
    return [rope for rope in told.values() if isinstance(rope, dict)] or [told]
