"""Links: delays and bandwidths between peers, of which several may stand at one place of the scenario; and their uplinks.

What a peer sends leaves it one message after another, each as fast as the path to its receiver allows; then it is under way
for the path's delay.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np

from swarmnode.plan.scenario import Scenario

LAN_DELAY_S, LAN_BANDWIDTH_BPS = 0.0005, 1e9  # between two peers at a place that has no neighbour in its region


class Links:
    """`places[peer]`: which device of the scenario it stands for. Two peers at one place are as near as its next neighbour."""

    def __init__(self, scenario: Scenario, places: Sequence[int]) -> None:
        self.places = list(places)
        self.bytes_sent: dict[tuple[int, int], float] = defaultdict(float)
        delay, bandwidth = _with_neighbours(scenario)
        self._delay_s: list[list[float]] = delay.tolist()  # lists: scalars out of arrays cost ten times as much
        self._bandwidth_bps: list[list[float]] = bandwidth.tolist()
        self._free_at_s = [0.0] * len(self.places)
        self._sent_s = [0.0] * len(self.places)

    def __repr__(self) -> str:
        total = sum(self.bytes_sent.values())
        return f"<Links of {len(self.places)} peers, {total / 1e9:.2f} GB over {len(self.bytes_sent)} of them>"

    def delay_s(self, sender: int, receiver: int) -> float:
        """One way."""
        return self._delay_s[self.places[sender]][self.places[receiver]]

    def bandwidth_bps(self, sender: int, receiver: int) -> float:
        """Of the path, if nobody else sends."""
        return self._bandwidth_bps[self.places[sender]][self.places[receiver]]

    def delays_s(self, peers: Sequence[int]) -> Any:
        """[n, n] one-way delays between some peers."""
        places = [self.places[peer] for peer in peers]
        return np.array(self._delay_s)[np.ix_(places, places)]

    def send(self, now_s: float, sender: int, receiver: int, size_bytes: float) -> float:
        """When a message that is handed over now will have arrived."""
        if sender == receiver:
            return now_s
        here, there = self.places[sender], self.places[receiver]
        takes_s = size_bytes * 8 / self._bandwidth_bps[here][there]
        leaves_s = max(now_s, self._free_at_s[sender]) + takes_s
        self._free_at_s[sender] = leaves_s
        self._sent_s[sender] += takes_s
        self.bytes_sent[sender, receiver] += size_bytes
        return leaves_s + self._delay_s[here][there]

    def reset(self, peer: int) -> None:
        """The peer is gone, and what waited in its uplink with it."""
        self._free_at_s[peer] = 0.0

    def sending_s(self, peer: int) -> float:
        """Seconds in which its uplink was busy, in all."""
        return self._sent_s[peer]


def _with_neighbours(scenario: Scenario) -> tuple[Any, Any]:
    """The matrices with diagonals for two peers at one place: the path to the place's nearest neighbour in its region."""
    delay, bandwidth = scenario.delay_s.copy(), scenario.bandwidth_bps.copy()
    for i, region in enumerate(scenario.regions):
        near = [j for j, other in enumerate(scenario.regions) if j != i and other == region and region is not None]
        nearest = max(near, key=lambda j: (scenario.bandwidth_bps[i, j], -scenario.delay_s[i, j]), default=None)
        delay[i, i] = LAN_DELAY_S if nearest is None else scenario.delay_s[i, nearest]
        bandwidth[i, i] = LAN_BANDWIDTH_BPS if nearest is None else scenario.bandwidth_bps[i, nearest]
    return delay, bandwidth
