"""The address groups of the peers that p2pd is connected with, for limits and for diversity."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence

from swarmnode.errors import NetworkDown
from swarmnode.net.addressing.addresses import is_relayed
from swarmnode.net.interfaces import PeerId
from swarmnode.net.limits.address_group import address_group
from swarmnode.net.limits.recent import Recent

MAX_KNOWN = 8192

Connected = Callable[[], Awaitable[Mapping[PeerId, Sequence[str]]]]
"""The peers that are connected now, and the multiaddrs at which they are. Raises NetworkDown."""


class AddressGroups:
    """Remembers the group of a peer from when it was first seen. All who ask at one time share one question to p2pd."""

    def __init__(self, connected: Connected) -> None:
        self._connected = connected
        self._known: Recent[PeerId, str] = Recent(MAX_KNOWN)
        self._asking: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return f"<AddressGroups of {len(self._known)} peers>"

    def of(self, peer: PeerId) -> str:
        """The group of a peer as far as it is known; its id where it is not."""
        return self._known.get(peer, peer)

    async def learn(self, peer: PeerId) -> str:
        """The group of a peer that is connected; its id where it is not any more."""
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
