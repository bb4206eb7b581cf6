"""Peers as p2pd names them: their ids as text and as bytes, and their address groups.

Both are cached: base58 is slow in Python, a question to p2pd is slower, and a node meets the same peers again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import lru_cache

from swarmnode.errors import NetworkDown, PeerLost
from swarmnode.net.addressing.addresses import is_relayed
from swarmnode.net.interfaces import PeerId
from swarmnode.net.libp2p.from_hivemind import PeerID
from swarmnode.net.limits.address_group import address_group
from swarmnode.net.limits.fair_share import Recent

SHA_256_HEAD, SHA_256_BYTES = b"\x12\x20", 32  # multihash: code and length before the digest
MAX_INLINE_KEY_BYTES = 42  # libp2p hashes the ids of longer public keys
MOST_IDS, MOST_GROUPS = 4096, 8192  # entries in the caches

Connected = Callable[[], Awaitable[Mapping[PeerId, Sequence[str]]]]
"""Function that returns the connected peers and their multiaddrs. Raises NetworkDown."""


class AddressGroups:
    """Address groups of the latest MOST_GROUPS peers, each as p2pd told it last. p2pd is asked only about peers that are not
    known; callers at the same time share one question."""

    def __init__(self, connected: Connected) -> None:
        self._connected = connected
        self._known: Recent[PeerId, str] = Recent(MOST_GROUPS)
        self._asking: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return f"<AddressGroups of {len(self._known)} peers>"

    def of(self, peer: PeerId) -> str:
        """Return the group of a peer; its id if the group is not known."""
        return self._known.get(peer, peer)

    async def learn(self, peer: PeerId) -> str:
        """Return the group of a connected peer, asking p2pd if needed; its id if the peer is not connected or p2pd is gone."""
        if peer not in self._known:
            if self._asking is None or self._asking.done():
                self._asking = asyncio.create_task(self._ask(), name="address groups")
            await asyncio.shield(self._asking)
        return self.of(peer)

    async def _ask(self) -> None:
        try:
            connected = await self._connected()
        except NetworkDown:
            return
        for peer, addresses in connected.items():
            direct = [address for address in addresses if not is_relayed(address)]
            self._known[peer] = address_group((direct or list(addresses) or [""])[0]) or peer


def peer_name(raw: bytes) -> PeerId:
    """Return the bytes of a peer id as text; empty if they are no peer id."""
    return _name(raw) if _is_peer_id(raw) else ""  # strangers send them: others do not enter the cache


def _is_peer_id(raw: bytes) -> bool:
    """Return whether the bytes are a multihash as libp2p makes it of a public key: the short key itself, or its SHA-256."""
    if raw[:2] == SHA_256_HEAD:
        return len(raw) == 2 + SHA_256_BYTES
    return raw[:1] == b"\0" and 2 < len(raw) == 2 + raw[1] <= 2 + MAX_INLINE_KEY_BYTES


@lru_cache(MOST_IDS)
def _name(raw: bytes) -> PeerId:
    name: PeerId = PeerID(raw).to_base58()
    return name


@lru_cache(MOST_IDS)
def hivemind_id(peer: PeerId) -> PeerID:
    """Return the peer id as hivemind's object. Raises PeerLost if it is no peer id."""
    try:
        return PeerID.from_base58(peer)
    except ValueError as error:
        raise PeerLost(f"{peer!r} is not a peer id", peer=peer) from error


def peer_bytes(peer: PeerId) -> bytes:
    """Return the bytes of a peer id; the inverse of `peer_name`. Raises PeerLost if it is no peer id."""
    raw: bytes = hivemind_id(peer).to_bytes()
    return raw
