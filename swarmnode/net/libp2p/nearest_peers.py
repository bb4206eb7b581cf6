"""Nearest peers: the peers nearest to a key of the table, who keep its records. Remembered for a while, as finding them
costs most."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from swarmnode.net.libp2p.from_hivemind import DHTID, PeerID

REPLICAS = 5
REMEMBERED_S = 500.0  # newcomers nearer to the key are overlooked for so long; readers ask the next nearest, too
MAX_KEYS = 64


class NearestPeers:
    """Of the keys that this peer writes to. Where fewer than `REPLICAS` are there, they are looked for each time."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._known: dict[DHTID, tuple[float, dict[DHTID, PeerID]]] = {}

    def __repr__(self) -> str:
        return f"<NearestPeers of {len(self._known)} keys>"

    async def store(self, node: Any, key: DHTID, subkey: bytes, packed: bytes, expires_at: float) -> tuple[bool, bool]:
        """Store a record at the keepers of a key. Returns (one of them took it, we are to keep it, too)."""
        nearest_peers = await self._find(node, key)
        calls = [
            node.protocol.call_store(peer, [key], [packed], expires_at, subkeys=[subkey])
            for peer in nearest_peers.values()
        ]
        answers = await asyncio.gather(*calls)
        if not all(answers):  # None: it is gone
            self._known.pop(key, None)
        farthest = max((key.xor_distance(keeper) for keeper in nearest_peers), default=0)
        ours = len(nearest_peers) < REPLICAS or key.xor_distance(node.node_id) < farthest
        return any(answer is not None and answer[0] for answer in answers), ours

    async def _find(self, node: Any, key: DHTID) -> dict[DHTID, PeerID]:
        now_s = self._clock()
        until_s, nearest_peers = self._known.get(key, (0.0, {}))
        if now_s >= until_s:
            found = await node.find_nearest_nodes([key], k_nearest=REPLICAS, exclude_self=True)
            nearest_peers = dict(found[key])
            self._known.pop(key, None)
            if len(nearest_peers) == REPLICAS:
                self._known[key] = (now_s + REMEMBERED_S, nearest_peers)
            if len(self._known) > MAX_KEYS:
                del self._known[next(iter(self._known))]
        return nearest_peers
