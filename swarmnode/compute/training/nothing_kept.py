"""A cache for passes that begin a sequence and keep nothing of it.

Without any cache transformers looks into the positions whether several samples share a row, which waits for the device.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from swarmnode.compute.serving.attention_cache import AttentionCache
from swarmnode.compute.serving.window import sliding_layers


class NothingKept(AttentionCache):
    """Of a model of this transformers config: no positions came before, and attention gets back what it hands in."""

    def __init__(self, config: Any) -> None:
        super().__init__(sliding_layers(config))

    def __repr__(self) -> str:
        return "NothingKept()"

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Called by attention."""
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """None came before."""
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """(positions, the first of them)."""
        return query_length, 0

    @property
    def is_initialized(self) -> bool:
        """Nothing is held."""
        return False
