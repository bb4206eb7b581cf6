"""Where keys and peers stand in the table: 160 bits, the distance of two being their XOR (Kademlia, Maymounkov and Mazières 2002).

A peer's place follows from its peer id, so that nobody chooses where to stand other than by trying keys.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache

from swarmnode.net.interfaces import PeerId, key_digest

ID_BITS = 160


@lru_cache(maxsize=16_384)
def node_id(peer: PeerId) -> int:
    """The place of a peer."""
    return int.from_bytes(hashlib.sha1(b"swarmnode peer " + peer.encode(), usedforsecurity=False).digest(), "big")


def key_id(key: bytes) -> int:
    """The place of a key."""
    return int.from_bytes(key_digest(key), "big")


def id_bytes(place: int) -> bytes:
    """As it travels, and as a validator is asked."""
    return place.to_bytes(ID_BITS // 8, "big")
