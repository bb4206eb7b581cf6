"""Observed latency: how fast peers have been while they were used. What counts in planning, where there is any."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from swarmnode.codec.measuring_messages import MAX_UNIT_US
from swarmnode.net.interfaces import PeerId
from swarmnode.net.limits.recent import Recent
from swarmnode.swarm.records.announcement import MAX_UNIT_TIMES, peer_digest
from swarmnode.swarm.records.sections import Hearsay

PEERS_KEPT = 256
FRESH_S = 600.0  # older experience says little: the peer's own word opens the door again
# Weights of a newer time: a slow step may have waited for others, a quick one is what the peer can do.
RISE, FALL = 0.2, 0.5


@dataclass(slots=True)
class _Seen:
    unit_s: float
    at_s: float


class ObservedLatency:
    """Seconds of one position through one unit, by peer: moving averages of what neighbours measured. Bounded."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seen: Recent[PeerId, _Seen] = Recent(PEERS_KEPT)

    def __repr__(self) -> str:
        return f"<ObservedLatency with {len(self._seen)} peers>"

    def saw(self, peer: PeerId, unit_s: float) -> None:
        """One measurement. Who has not been seen for longest is forgotten first."""
        now_s = self._clock()
        seen = self._seen.get(peer)
        if seen is None or now_s - seen.at_s > FRESH_S:
            seen = _Seen(unit_s, now_s)
        weight = RISE if unit_s > seen.unit_s else FALL
        self._seen[peer] = _Seen(seen.unit_s + weight * (unit_s - seen.unit_s), now_s)

    def unit_s(self, peer: PeerId) -> float | None:
        """What a unit takes on the peer, in seconds; None where nothing fresh is known."""
        seen = self._seen.get(peer)
        return None if seen is None or self._clock() - seen.at_s > FRESH_S else seen.unit_s

    def section(self) -> Hearsay:
        """As announced: microseconds per unit, by the digests of the peers."""
        seen = self.units_s(most=MAX_UNIT_TIMES)
        return Hearsay(
            unit_us={peer_digest(peer): max(1, min(round(unit_s * 1e6), MAX_UNIT_US)) for peer, unit_s in seen.items()}
        )

    def units_s(self, most: int | None = None) -> dict[PeerId, float]:
        """By peer, those seen last first, at most so many."""
        known = {peer: unit_s for peer in reversed(self._seen) if (unit_s := self.unit_s(peer)) is not None}
        return dict(list(known.items())[:most])
