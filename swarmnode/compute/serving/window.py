"""Windows of layers that look back over some positions only, and the base class of caches that keep no more than these.

A pass at position p of such a layer sees the `size` positions up to and including its own. So `size - 1` past positions are kept,
and `slack` more: for positions that are cut off again (rejected drafts), and for members of a cohort that lag behind its newest
column. After `room` written columns the kept ones move to the front of the buffer, so a step copies kept / room columns on average.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from swarmnode.compute.model.lean import lean

MAX_LAG = 16  # most steps that a cohort goes on with a stand-in for an absent member
LONGEST_SHARED = 8  # positions of a step that shares a pass: all steps are filled up to the longest
ROLLBACK = 48  # positions that a session may always go back
ROOM = 256
SLIDING = "sliding_attention"


with lean():
    from transformers.cache_utils import Cache


class AttentionCache(Cache):
    """Cache that keeps keys and values itself, not in transformers' layer objects.

    `sliding` are the numbers, in the whole model, of the layers that look back over a window.
    """

    def __init__(self, sliding: Collection[int]) -> None:
        super().__init__(layers=[])
        self._is_sliding = [layer in sliding for layer in range(max(sliding, default=-1) + 2)]

    @property
    def is_sliding(self) -> list[bool]:
        """A value for each layer, up to the one after the last sliding layer: whether it attends to a sliding window only. The code
        of the model family reads it to build masks."""
        return self._is_sliding

    @property
    def is_linear(self) -> list[bool]:
        """False for each layer: none has a recurrent state."""
        return [False] * len(self._is_sliding)

    @property
    def is_dummy(self) -> list[bool]:
        """False for each layer: all have keys and values."""
        return self.is_linear

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """Return -1: there is no fixed length."""
        return -1


@dataclass(frozen=True)
class Window:
    """Columns (positions) that the cache of a layer with sliding-window attention keeps: the window's `size`, `slack` to go back,
    and `room` for new ones."""

    size: int
    slack: int = ROLLBACK + MAX_LAG
    room: int = ROOM

    @property
    def kept(self) -> int:
        """Number of columns that are kept when the window moves on."""
        return self.size - 1 + self.slack

    @property
    def columns(self) -> int:
        """Number of columns of a buffer."""
        return self.kept + self.room


Windows = Mapping[int, Window]
"""Windows by the layer's number in the whole model; a layer without one keeps everything"""


def sliding_layers(config: Any) -> dict[int, int]:
    """Return the window of each sliding layer of a transformers config, as transformers' own caches read it.

    Layers that see all positions are left out. A chunk of chunked attention (Llama 4) is no window: such a layer keeps everything.
    """
    size = getattr(config, "sliding_window", None)
    if not isinstance(size, int):
        return {}
    count = int(config.num_hidden_layers)
    kinds = getattr(config, "layer_types", None) or [SLIDING] * count
    return {layer: size for layer, kind in enumerate(kinds[:count]) if kind == SLIDING}
