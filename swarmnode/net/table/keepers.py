"""Keepers of records (the peers nearest to a key of the table), and an estimate of the number of peers in the table.

Keepers are remembered for a while, since finding them costs most.
"""

from __future__ import annotations

import random
import statistics
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence

from swarmnode.net.interfaces import PeerId
from swarmnode.net.limits.fair_share import Recent
from swarmnode.net.table.routing_table import ID_BITS, node_id

REPLICAS = 5
REMEMBERED_S = 500.0  # meanwhile newcomers nearer to the key are overlooked; readers ask the next nearest, too
MAX_KEYS = 64
SAMPLES = 9  # of the population

Find = Callable[[int], Awaitable[Sequence[PeerId]]]
"""Function that returns the peers nearest to a place in the table."""


class Population:
    """Number of peers in the table: the median of the latest estimates, each from one random place."""

    def __init__(self, seed: int | None = None) -> None:
        self._random = random.SystemRandom() if seed is None else random.Random(seed)
        self._estimates: deque[float] = deque(maxlen=SAMPLES)

    def __repr__(self) -> str:
        return f"<Population of about {self.peers:.0f} by {len(self._estimates)} estimates>"

    @property
    def peers(self) -> float:
        """Estimated number of peers; 0 before the first estimate."""
        return statistics.median(self._estimates) if self._estimates else 0.0

    def next_place(self) -> int:
        """Return a random id of the DHT's id space, around which the size of the swarm is estimated next."""
        return self._random.getrandbits(ID_BITS)

    def saw(self, place: int, nearest: Sequence[PeerId]) -> None:
        """Add an estimate of the swarm's size from the peers `nearest` to `place`: of N peers, the n-th nearest is about n/N of
        the way around. Adds none if no peer answered."""
        if nearest:
            farthest = max(node_id(peer) ^ place for peer in nearest)
            self._estimates.append(max(len(nearest), (len(nearest) - 1) * (1 << ID_BITS) / (farthest + 1)))


class Keepers:
    """Keepers of the keys that this peer writes to. Fewer than `REPLICAS` are not remembered, but looked for each time."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._known: Recent[int, tuple[float, Sequence[PeerId]]] = Recent(MAX_KEYS)

    def __repr__(self) -> str:
        return f"<Keepers of {len(self._known)} keys>"

    async def of(self, key: int, find: Find) -> Sequence[PeerId]:
        """Return the keepers of a key, nearest first, remembered or found by `find`."""
        now_s = self._clock()
        until_s, keepers = self._known.get(key, (0.0, ()))
        if now_s >= until_s:
            keepers = await find(key)
            self._known.pop(key, None)
            if len(keepers) == REPLICAS:
                self._known[key] = (now_s + REMEMBERED_S, keepers)
        return keepers

    def forget(self, key: int) -> None:
        """Forget the keepers of a key, since one of them is gone or refuses: they are looked for the next time."""
        self._known.pop(key, None)
