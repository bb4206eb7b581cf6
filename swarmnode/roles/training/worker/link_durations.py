"""Link durations: how long a microbatch's values take over each link of a stage as they are, in both directions."""

from __future__ import annotations

from collections.abc import Sequence

from swarmnode.codec.tensors import Codec, TensorInfo
from swarmnode.net.interfaces import PeerId
from swarmnode.plan.compression import encoded_bytes

Way = tuple[PeerId, str, bool]
"""With whom, which way through the model, and whether it is sent or comes in"""


class LinkDurations:
    """Of the step in force and the one before it: who is not met any more is forgotten."""

    def __init__(self) -> None:
        self._now_s: dict[Way, float] = {}
        self._before_s: dict[Way, float] = {}

    def __repr__(self) -> str:
        return f"<LinkDurations of {len(self._now_s)} ways, the longest {self.slowest_s:.3g} s>"

    @property
    def slowest_s(self) -> float:
        """The longest, in seconds; 0 where none is known."""
        return max((*self._now_s.values(), *self._before_s.values()), default=0.0)

    def note(self, way: Way, values: Sequence[TensorInfo], bandwidth_bps: float | None) -> float | None:
        """Values (however they are encoded) cross a link: the seconds that they would take uncompressed, where that is known."""
        if not bandwidth_bps:
            return None
        self._now_s[way] = found_s = encoded_bytes(values, Codec.NONE) * 8 / bandwidth_bps
        return found_s

    def end_step(self) -> None:
        """Another step begins."""
        self._before_s, self._now_s = self._now_s, {}
