"""What transformers asks of every cache of ours: which layers slide, and that all are attention."""

from __future__ import annotations

from collections.abc import Collection

from swarmnode.compute.model.lean import lean

with lean():
    from transformers.cache_utils import Cache


class AttentionCache(Cache):
    """A cache of keys and values that are kept by itself, not in transformers' layer objects.

    `sliding` are the numbers, in the whole model, of the layers that look back over a window.
    """

    def __init__(self, sliding: Collection[int]) -> None:
        super().__init__(layers=[])
        self._is_sliding = [layer in sliding for layer in range(max(sliding, default=-1) + 2)]

    @property
    def is_sliding(self) -> list[bool]:
        """Per layer of the whole model up to one behind the last that slides: the family's masks ask."""
        return self._is_sliding

    @property
    def is_linear(self) -> list[bool]:
        """None has a recurrent state."""
        return [False] * len(self._is_sliding)

    @property
    def is_dummy(self) -> list[bool]:
        """All have keys and values."""
        return self.is_linear

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """No fixed one."""
        return -1
