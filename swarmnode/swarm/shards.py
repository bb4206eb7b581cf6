"""Under which DHT keys a swarm's announcements lie.

A store rewrites a key's whole dictionary, so a key should hold at most some 100 peers. Level L spreads the peers over
2^L shards by the first bits of their digest. Everybody works out the level from the number of peers that it knows,
so near a threshold two peers may differ by one: readers read both levels there. A newcomer, who knows nobody, probes
one shard of every level to see how large the swarm is.
"""

from __future__ import annotations

from swarmnode.net.interfaces import PeerId
from swarmnode.swarm.announcement import peer_digest

PEERS_PER_SHARD = 64
MAX_LEVEL = 7  # 128 shards: 8,192 peers at 64 each
_UNCERTAINTY = 1.5  # two peers' counts of the same swarm may differ by this factor


def level_for(peers: int) -> int:
    """The level at which so many peers publish."""
    level = 0
    while level < MAX_LEVEL and peers > PEERS_PER_SHARD << level:
        level += 1
    return level


def shard_key(swarm_id: bytes, level: int, shard: int) -> bytes:
    """The DHT key of one shard."""
    return b"%b:peers:%d:%d" % (swarm_id, level, shard)


def own_key(swarm_id: bytes, peer: PeerId, peers: int) -> bytes:
    """The key under which `peer` publishes in a swarm of about `peers` peers."""
    level = level_for(peers)
    return shard_key(swarm_id, level, peer_digest(peer)[0] >> (8 - level))


def keys_to_read(swarm_id: bytes, peers: int) -> list[bytes]:
    """All keys under which a swarm of about `peers` peers may have published."""
    levels = range(level_for(int(peers / _UNCERTAINTY)), level_for(int(peers * _UNCERTAINTY)) + 1)
    return [shard_key(swarm_id, level, shard) for level in levels for shard in range(1 << level)]


def probe_keys(swarm_id: bytes) -> dict[bytes, int]:
    """One key of each level, with the number of shards that it stands for."""
    return {shard_key(swarm_id, level, 0): 1 << level for level in range(MAX_LEVEL + 1)}
