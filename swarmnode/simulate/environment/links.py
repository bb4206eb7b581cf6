"""Simulated links: delays and bandwidths between peers, and their uplinks. Several peers may stand at one place of the scenario.

Messages leave a peer in order, as fast as its fastest path allows. On each path the messages follow one another at the path's own
bandwidth, and each travels for the path's delay. So a slow path holds up its own messages and no others. Messages that are
sent together share the uplink.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from swarmnode.plan.offline.planner_files import Scenario
from swarmnode.plan.spans.flow import Floats

LAN_DELAY_S, LAN_BANDWIDTH_BPS = 0.0005, 1e9  # between two peers at a place that has no neighbour in its region


class Links:
    """Network of a simulation. `places[peer]` is the peer's place: a device of the scenario. The path between two peers at one
    place is the place's path to its nearest neighbour in the region, or a LAN if it has none."""

    def __init__(self, scenario: Scenario, places: Sequence[int]) -> None:
        self.places = list(places)
        self.bytes_sent: dict[tuple[int, int], float] = defaultdict(float)
        delay, bandwidth = _with_neighbours(scenario)
        self._delay_SS: Floats = delay
        self._bandwidth_SS: Floats = bandwidth
        # lists: reading single values from arrays takes ten times as long
        self._delay_s: list[list[float]] = delay.tolist()
        self._bandwidth_bps: list[list[float]] = bandwidth.tolist()
        self._uplink_bps: list[float] = _uplinks_bps(scenario, bandwidth).tolist()
        self._free_at_s = [0.0] * len(self.places)
        self._path_free_at_s: dict[tuple[int, int], float] = {}

    def __repr__(self) -> str:
        total = sum(self.bytes_sent.values())
        return f"<Links of {len(self.places)} peers, {total / 1e9:.2f} GB over {len(self.bytes_sent)} of them>"

    @property
    def sites(self) -> int:
        """Number of devices of the scenario: the places where simulated peers can be."""
        return len(self._delay_s)

    def best_bps(self, receiver: int) -> float:
        """Return the bandwidth of the fastest path to `receiver`, in bits/s."""
        there = self.places[receiver]
        return max(row[there] for row in self._bandwidth_bps)

    def uplink_bps(self, sender: int) -> float:
        """Return the bandwidth of the uplink of `sender`, in bits/s."""
        return self._uplink_bps[self.places[sender]]

    def delay_s(self, sender: int, receiver: int) -> float:
        """Return the one-way delay of the path from `sender` to `receiver`, in seconds."""
        return self._delay_s[self.places[sender]][self.places[receiver]]

    def bandwidth_bps(self, sender: int, receiver: int) -> float:
        """Return the bandwidth of the path from `sender` to `receiver`, in bits/s, without other traffic."""
        return self._bandwidth_bps[self.places[sender]][self.places[receiver]]

    def between(self, peers: Sequence[int]) -> tuple[Floats, Floats]:
        """Return two [N, N] matrices between `peers`, from row to column: one-way delays in seconds, bandwidths in bits/s."""
        places = [self.places[peer] for peer in peers]
        pairs = np.ix_(places, places)
        return self._delay_SS[pairs], self._bandwidth_SS[pairs]

    def send(self, now_s: float, sender: int, receiver: int, size_bytes: float) -> float:
        """Send a message at `now_s` and return the time in seconds at which it arrives; `now_s` if `sender` is `receiver`."""
        if sender == receiver:
            return now_s
        begins_s, size_bits = max(now_s, self._free_at_s[sender]), size_bytes * 8
        self._free_at_s[sender] = begins_s + size_bits / self.uplink_bps(sender)
        return self._through((sender, receiver), begins_s, size_bits, begins_s)

    def send_together(self, now_s: float, sender: int, sizes_bytes: Mapping[int, float]) -> dict[int, float]:
        """Send one message to each key of `sizes_bytes` at `now_s` and return the arrival time of each in seconds. The messages
        share the uplink equally until they are through; a message to `sender` itself arrives at once."""
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
        """Return the arrival time of a message that enters its path at `begins_s` and has left the uplink by `least_s`."""
        here, there = self.places[path[0]], self.places[path[1]]
        free_s = max(begins_s, self._path_free_at_s.get(path, 0.0)) + size_bits / self._bandwidth_bps[here][there]
        self._path_free_at_s[path] = max(free_s, least_s)
        self.bytes_sent[path] += size_bits / 8
        return self._path_free_at_s[path] + self._delay_s[here][there]

    def reset(self, peer: int) -> None:
        """Forget all messages that wait to leave `peer` or to reach it."""
        self._free_at_s[peer] = 0.0
        for path in [path for path in self._path_free_at_s if peer in path]:
            del self._path_free_at_s[path]

    def drop_waiting(self, now_s: float) -> None:
        """Forget all messages that wait to be sent, of all peers."""
        self._free_at_s = [min(free_at_s, now_s) for free_at_s in self._free_at_s]
        self._path_free_at_s.clear()


def _with_neighbours(scenario: Scenario) -> tuple[Any, Any]:
    """Return delays and bandwidths with diagonals: the path to the place's nearest neighbour in its region, or a LAN if it has
    none."""
    delay, bandwidth = scenario.delay_s.copy(), scenario.bandwidth_bps.copy()
    for i, region in enumerate(scenario.regions):
        near = [j for j, other in enumerate(scenario.regions) if j != i and other == region and region is not None]
        nearest = max(near, key=lambda j: (scenario.bandwidth_bps[i, j], -scenario.delay_s[i, j]), default=None)
        delay[i, i] = LAN_DELAY_S if nearest is None else scenario.delay_s[i, nearest]
        bandwidth[i, i] = LAN_BANDWIDTH_BPS if nearest is None else scenario.bandwidth_bps[i, nearest]
    return delay, bandwidth


def _uplinks_bps(scenario: Scenario, bandwidth: Any) -> Any:
    """Return the bandwidth of each place's fastest path to another place; with one device that of its own path."""
    if scenario.devices == 1:
        return bandwidth[0]
    others = ~np.eye(scenario.devices, dtype=bool)
    return np.where(others, scenario.bandwidth_bps, 0.0).max(axis=1)
