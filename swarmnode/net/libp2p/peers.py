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

MAX_ID_BYTES = 64
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
    """Return the bytes of a peer id as text, without a check that they are one; empty if they are more than `MAX_ID_BYTES`."""
    return _name(raw) if len(raw) <= MAX_ID_BYTES else ""  # strangers send them: long ones do not enter the cache


@lru_cache(MOST_IDS)
def _name(raw: bytes) -> PeerId:
    try:
        name: PeerId = PeerID(raw).to_base58()
    except ValueError:
        return ""
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
