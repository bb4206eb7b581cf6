"""Fair pace: a token bucket for every peer and one for every address group. Who asks for more than that waits; others do not."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass

from swarmnode.net.limits.address_group import Claimant
from swarmnode.net.limits.recent import Recent

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
        self._free_at_s: Recent[Hashable, float] = Recent(MAX_BUCKETS)  # when all that was taken has been paid for

    def __repr__(self) -> str:
        return f"<FairPace of {self._peer} for a peer, {self._group} for a group, {len(self._free_at_s)} known>"

    def wait_s(self, claimant: Claimant, amount: float = 1.0, *, within_s: float = math.inf) -> float:
        """Take the amount; how long to wait before it is this claimant's turn, in seconds. Where that is longer than `within_s`
        nothing is taken: what one peer is refused must not be paid for by the others of its group."""
        paces: tuple[tuple[Hashable, Pace], ...] = ((claimant, self._peer), (claimant.group, self._group))
        free_at_s = {whose: self._free_after_s(whose, amount, pace) for whose, pace in paces}
        wait_s = max(0.0, max(free_at_s.values()) - self._clock())
        if wait_s <= within_s:
            for whose, at_s in free_at_s.items():
                self._free_at_s[whose] = at_s
        return wait_s

    def _free_after_s(self, whose: Hashable, amount: float, pace: Pace) -> float:
        rested_s = self._clock() - pace.at_once / pace.per_s
        return max(self._free_at_s.get(whose, rested_s), rested_s) + amount / pace.per_s
