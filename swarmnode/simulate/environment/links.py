"""Links: delays and bandwidths between peers, of which several may stand at one place of the scenario; and their uplinks.

What a peer sends leaves it in order, as fast as its fastest path allows; on each path one message follows the other at the
path's own bandwidth, and is under way for the path's delay. So a slow path holds up what goes along it, and nothing else. What is
sent together shares the line.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from swarmnode.plan.offline.scenario import Scenario
from swarmnode.plan.spans.flow import Floats

LAN_DELAY_S, LAN_BANDWIDTH_BPS = 0.0005, 1e9  # between two peers at a place that has no neighbour in its region


class Links:
    """`places[peer]`: which device of the scenario it stands for. Two peers at one place are as near as its next neighbour."""

    def __init__(self, scenario: Scenario, places: Sequence[int]) -> None:
        self.places = list(places)
        self.bytes_sent: dict[tuple[int, int], float] = defaultdict(float)
        delay, bandwidth = _with_neighbours(scenario)
        self._delay_SS: Floats = delay
        self._bandwidth_SS: Floats = bandwidth
        self._delay_s: list[list[float]] = delay.tolist()  # lists: scalars out of arrays cost ten times as much
        self._bandwidth_bps: list[list[float]] = bandwidth.tolist()
        self._uplink_bps: list[float] = _uplinks_bps(scenario, bandwidth).tolist()
        self._free_at_s = [0.0] * len(self.places)
        self._path_free_at_s: dict[tuple[int, int], float] = {}

    def __repr__(self) -> str:
        total = sum(self.bytes_sent.values())
        return f"<Links of {len(self.places)} peers, {total / 1e9:.2f} GB over {len(self.bytes_sent)} of them>"

    @property
    def sites(self) -> int:
        """Places of the scenario."""
        return len(self._delay_s)

    def best_bps(self, receiver: int) -> float:
        """The fastest path to a peer."""
        there = self.places[receiver]
        return max(row[there] for row in self._bandwidth_bps)

    def uplink_bps(self, sender: int) -> float:
        """What a peer can send at most."""
        return self._uplink_bps[self.places[sender]]

    def delay_s(self, sender: int, receiver: int) -> float:
        """One way."""
        return self._delay_s[self.places[sender]][self.places[receiver]]

    def bandwidth_bps(self, sender: int, receiver: int) -> float:
        """Of the path, if nobody else sends."""
        return self._bandwidth_bps[self.places[sender]][self.places[receiver]]

    def between(self, peers: Sequence[int]) -> tuple[Floats, Floats]:
        """[N, N] from each of these peers to each other: one-way delays in seconds, bandwidths in bits/s."""
        places = [self.places[peer] for peer in peers]
        pairs = np.ix_(places, places)
        return self._delay_SS[pairs], self._bandwidth_SS[pairs]

    def send(self, now_s: float, sender: int, receiver: int, size_bytes: float) -> float:
        """When a message that is handed over now will have arrived."""
        if sender == receiver:
            return now_s
        begins_s, size_bits = max(now_s, self._free_at_s[sender]), size_bytes * 8
        self._free_at_s[sender] = begins_s + size_bits / self.uplink_bps(sender)
        return self._through((sender, receiver), begins_s, size_bits, begins_s)

    def send_together(self, now_s: float, sender: int, sizes_bytes: Mapping[int, float]) -> dict[int, float]:
        """When messages to these will have arrived that are handed over now: each gets as much of the line as the others until it
        is through."""
        begins_s, ends_s = max(now_s, self._free_at_s[sender]), dict[int, float]()
        sent_bits, before_bits = 0.0, 0.0
        waiting = sorted((8 * size, receiver) for receiver, size in sizes_bytes.items() if receiver != sender)
        for number, (size_bits, receiver) in enumerate(waiting):
            sent_bits += (size_bits - before_bits) * (len(waiting) - number)  # all, until this one is through
            before_bits = size_bits
            ends_s[receiver] = self._through(
                (sender, receiver), begins_s, size_bits, begins_s + sent_bits / self.uplink_bps(sender)
            )
        self._free_at_s[sender] = begins_s + sent_bits / self.uplink_bps(sender)
        return ends_s | ({sender: now_s} if sender in sizes_bytes else {})

    def _through(self, path: tuple[int, int], begins_s: float, size_bits: float, least_s: float) -> float:
        """When a message has arrived that its line has carried at `least_s`."""
        here, there = self.places[path[0]], self.places[path[1]]
        free_s = max(begins_s, self._path_free_at_s.get(path, 0.0)) + size_bits / self._bandwidth_bps[here][there]
        self._path_free_at_s[path] = max(free_s, least_s)
        self.bytes_sent[path] += size_bits / 8
        return self._path_free_at_s[path] + self._delay_s[here][there]

    def reset(self, peer: int) -> None:
        """The peer is gone, and what waited to leave it or to reach it with it."""
        self._free_at_s[peer] = 0.0
        for path in [path for path in self._path_free_at_s if peer in path]:
            del self._path_free_at_s[path]

    def drop_waiting(self, now_s: float) -> None:
        """Nobody wants any more what has not left yet."""
        self._free_at_s = [min(free_at_s, now_s) for free_at_s in self._free_at_s]
        self._path_free_at_s.clear()


def _with_neighbours(scenario: Scenario) -> tuple[Any, Any]:
    """The matrices with diagonals for two peers at one place: the path to the place's nearest neighbour in its region."""
    delay, bandwidth = scenario.delay_s.copy(), scenario.bandwidth_bps.copy()
    for i, region in enumerate(scenario.regions):
        near = [j for j, other in enumerate(scenario.regions) if j != i and other == region and region is not None]
        nearest = max(near, key=lambda j: (scenario.bandwidth_bps[i, j], -scenario.delay_s[i, j]), default=None)
        delay[i, i] = LAN_DELAY_S if nearest is None else scenario.delay_s[i, nearest]
        bandwidth[i, i] = LAN_BANDWIDTH_BPS if nearest is None else scenario.bandwidth_bps[i, nearest]
    return delay, bandwidth


def _uplinks_bps(scenario: Scenario, bandwidth: Any) -> Any:
    """Of each place its fastest path to another one."""
    if scenario.devices == 1:
        return bandwidth[0]
    others = ~np.eye(scenario.devices, dtype=bool)
    return np.where(others, scenario.bandwidth_bps, 0.0).max(axis=1)
