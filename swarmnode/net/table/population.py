"""How many peers keep the table, told from how near they stand to places that were drawn at random.

Who wants to be taken for many has to be many: identities tried out to stand near one place are near no other, and which places are
looked at nobody knows before.
"""

from __future__ import annotations

import random
import statistics
from collections import deque
from collections.abc import Sequence

from swarmnode.net.interfaces import PeerId
from swarmnode.net.table.ids import ID_BITS, node_id

SAMPLES = 9


class Population:
    """The median of the latest estimates; each is of one random place."""

    def __init__(self, seed: int | None = None) -> None:
        self._random = random.SystemRandom() if seed is None else random.Random(seed)
        self._estimates: deque[float] = deque(maxlen=SAMPLES)

    def __repr__(self) -> str:
        return f"<Population of about {self.peers:.0f} by {len(self._estimates)} estimates>"

    @property
    def peers(self) -> float:
        """About how many there are; 0 before the first look."""
        return statistics.median(self._estimates) if self._estimates else 0.0

    def next_place(self) -> int:
        """Where to look."""
        return self._random.getrandbits(ID_BITS)

    def saw(self, place: int, nearest: Sequence[PeerId]) -> None:
        """These peers answered, the nearest to the place: of N, the n-th stands about n/N of the way around."""
        if nearest:
            farthest = max(node_id(peer) ^ place for peer in nearest)
            self._estimates.append(max(len(nearest), (len(nearest) - 1) * (1 << ID_BITS) / (farthest + 1)))
