"""Windows of layers that look back over some positions only, and the base of caches that keep no more than that.

A pass at position p of such a layer sees the `size` positions up to and including its own. So `size - 1` of the past are kept, and
`slack` more: for what is cut off again (rejected drafts), and for members of a cohort that lag behind its newest column. `room` is
how many columns are written before the kept ones move to the front of the buffer: a step costs kept / room columns of copying.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from swarmnode.compute.model.lean import lean

MAX_LAG = 16  # steps that a cohort goes on with a stand-in for an absent member
LONGEST_SHARED = 8  # positions of a step that goes together with others: all are filled up to the longest
ROLLBACK = 48  # positions that a session may always go back
ROOM = 256
SLIDING = "sliding_attention"


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


@dataclass(frozen=True)
class Window:
    """What of a layer's past is kept, in columns."""

    size: int
    slack: int = ROLLBACK + MAX_LAG
    room: int = ROOM

    @property
    def kept(self) -> int:
        """Columns that are kept when the window moves on."""
        return self.size - 1 + self.slack

    @property
    def columns(self) -> int:
        """Columns of a buffer."""
        return self.kept + self.room


Windows = Mapping[int, Window]
"""By the layer's number in the whole model; a layer that is not in it keeps everything."""


def sliding_layers(config: Any) -> dict[int, int]:
    """The window of each sliding layer of a transformers config, as its own caches read it; layers that see all are left out.

    A chunk of chunked attention (Llama 4) is no window: it is kept whole, as every other layer.
    """
    size = getattr(config, "sliding_window", None)
    if not isinstance(size, int):
        return {}
    count = int(config.num_hidden_layers)
    kinds = getattr(config, "layer_types", None) or [SLIDING] * count
    return {layer: size for layer, kind in enumerate(kinds[:count]) if kind == SLIDING}
