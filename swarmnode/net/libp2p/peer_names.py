"""Peer ids as texts, and as the bytes that go over the wire. base58 is slow in Python, and a node meets the same peers again."""

from __future__ import annotations

from functools import lru_cache

from swarmnode.errors import PeerLost
from swarmnode.net.interfaces import PeerId
from swarmnode.net.libp2p.from_hivemind import PeerID

MOST = 4096  # that are remembered
MAX_ID_BYTES = 64


def peer_name(raw: bytes) -> PeerId:
    """A peer id as others write it; empty where it is none."""
    return _name(raw) if len(raw) <= MAX_ID_BYTES else ""  # strangers send them: what is too long is not remembered


@lru_cache(MOST)
def _name(raw: bytes) -> PeerId:
    try:
        name: PeerId = PeerID(raw).to_base58()
    except ValueError:
        return ""
    return name


@lru_cache(MOST)
def hivemind_id(peer: PeerId) -> PeerID:
    """As hivemind's calls take it. Raises PeerLost where it is no peer id."""
    try:
        return PeerID.from_base58(peer)
    except ValueError as error:
        raise PeerLost(f"{peer!r} is not a peer id", peer=peer) from error


def peer_bytes(peer: PeerId) -> bytes:
    """What `peer_name` is made of. Raises PeerLost where it is no peer id."""
    raw: bytes = hivemind_id(peer).to_bytes()
    return raw
