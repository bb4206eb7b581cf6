"""Strikes: who failed a training lately, how often in a row, and for how long nothing is asked of it now."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable

from swarmnode.net.deadlines import Backoff
from swarmnode.net.interfaces import PeerId

OUT = 3  # in a row: whoever can be done without is left out


class Strikes:
    """Kept over a coordinator's terms. `clock` in seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._backoff = Backoff(clock)
        self._in_a_row: Counter[PeerId] = Counter()
        self._banned: dict[PeerId, None] = {}

    def __repr__(self) -> str:
        return f"<Strikes {dict(self._in_a_row)}>"

    def strike(self, peer: PeerId) -> int:
        """It failed. What fails while it is left alone for a failure before is the same one. How often in a row now."""
        if not self.rests(peer):
            self._backoff.failed(peer)
            self._in_a_row[peer] += 1
        return self._in_a_row[peer]

    def ban(self, peer: PeerId) -> None:
        """It is asked nothing any more."""
        self._banned[peer] = None

    @property
    def banned(self) -> tuple[PeerId, ...]:
        """In the order in which they were found."""
        return tuple(self._banned)

    def forgive(self, peer: PeerId) -> None:
        """It did what was asked."""
        self._backoff.succeeded(peer)
        self._in_a_row.pop(peer, None)

    def in_a_row(self, peer: PeerId) -> int:
        """How often it has failed since it last did what was asked."""
        return self._in_a_row[peer]

    def rests(self, peer: PeerId) -> bool:
        """Whether it is left alone now."""
        return self.pause_s(peer) > 0

    def pause_s(self, peer: PeerId) -> float:
        """For how many seconds more; infinitely many where it is banned."""
        return math.inf if peer in self._banned else self._backoff.pause_s(peer)
