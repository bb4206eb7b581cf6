"""Fair pace: a token bucket for every peer and one for every address group. Who asks for more than that waits; others do not."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass

from swarmnode.net.limits.address_group import Claimant

MAX_BUCKETS = 8192


@dataclass(frozen=True)
class Pace:
    """How much a second, and how much at once after a rest."""

    per_s: float
    at_once: float


class FairPace:
    """Asked before something is done for somebody. An amount is whatever is counted: calls, bytes, frames."""

    def __init__(self, peer: Pace, group: Pace, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._peer = peer
        self._group = group
        self._clock = clock
        self._free_at_s: dict[
            Hashable, float
        ] = {}  # when all that was taken has been paid for; least recently used first

    def __repr__(self) -> str:
        return f"<FairPace of {self._peer} for a peer, {self._group} for a group, {len(self._free_at_s)} known>"

    def wait_s(self, claimant: Claimant, amount: float = 1.0) -> float:
        """Take the amount; how long to wait before it is this claimant's turn, in seconds."""
        return max(self._take(claimant, amount, self._peer), self._take(claimant.group, amount, self._group))

    def _take(self, whose: Hashable, amount: float, pace: Pace) -> float:
        now_s = self._clock()
        begin_s = max(self._free_at_s.pop(whose, float("-inf")), now_s - pace.at_once / pace.per_s)
        self._free_at_s[whose] = begin_s + amount / pace.per_s
        if len(self._free_at_s) > MAX_BUCKETS:
            del self._free_at_s[next(iter(self._free_at_s))]
        return max(0.0, self._free_at_s[whose] - now_s)
