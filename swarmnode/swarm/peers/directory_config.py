"""The pace of a directory: how often it speaks and listens (`docs/decisions/directory-pace.md`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from swarmnode.swarm.peers.shards import LARGE

KEY_BYTES = 6000  # of a read, for each key: asking some five peers, from neighbour to neighbour, where it lies
RECORD_BYTES = 100  # of a record besides its value: subkey, expiry, framing


@dataclass(frozen=True)
class DirectoryConfig:
    """Both slow down as the swarm grows, so that a peer's traffic stays bounded. In seconds and bytes."""

    read_s: float = 1.0
    max_read_s: float = 5.0
    calm_growth: float = 1.3  # reads that find the same peers in the same places and run follow one another more slowly
    read_bytes_per_s: float = 12_000.0  # a read that brought more delays the next one
    least_read_bytes_per_s: float = 600.0  # what is left of it in the largest swarms, of which a sample is known
    publish_s: float = 5.0
    max_publish_s: float = 150.0
    life_factor: float = 3.2  # an announcement outlives three lost refreshes: 16 s, in the largest swarms 8 min
    fresh_factor: float = 1.5  # publishing periods, of which one and a store pass between two refreshes
    crowd: int = 40  # peers beyond which reading slows down (publishing: from twice as many)
    retry_s: float = 1.0  # after a store that nobody took
    dht_timeout_s: float = 10.0
    save_s: float = 30.0

    def read_period_s(self, peers: float) -> float:
        """Seconds between two reads in a swarm of so many peers."""
        return min(self.max_read_s, self.read_s * max(1.0, peers / self.crowd))

    def publish_period_s(self, peers: float) -> float:
        """Seconds between two refreshes of the own announcement."""
        return min(self.max_publish_s, self.publish_s * max(1.0, peers / (2 * self.crowd)))

    def fresh_s(self, peers: float) -> float:
        """For so many seconds is an announcement good at least whose peer has refreshed it when it was due."""
        return (self.life_factor - self.fresh_factor) * self.publish_period_s(peers)

    def rest_s(self, keys: int, values_bytes: Sequence[int], peers: float) -> float:
        """Seconds that a read of so many keys, which brought values of these sizes, is to be paid with."""
        read_bytes = KEY_BYTES * keys + sum(values_bytes) + RECORD_BYTES * len(values_bytes)
        share_bytes_per_s = self.read_bytes_per_s * min(1.0, LARGE / max(1.0, peers))
        return read_bytes / max(share_bytes_per_s, self.least_read_bytes_per_s)
