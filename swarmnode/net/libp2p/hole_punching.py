"""Holes in routers: what has to be so before libp2p punches them (DCUtR).

p2pd tries it once for each connection that comes in over a relay, as soon as that is open. It fails where either side does not know
yet at which address its router is seen: p2pd believes that from four others, and looks 0.25, 0.75, 1.75 and 3.75 s after its
start. Its own DHT does not wait so long with calling others, and those connections would stay on the relay for half an hour.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

from swarmnode.net.addressing.addresses import is_relayed
from swarmnode.net.interfaces import PeerId

SETTLE_S = 4.0


class Connections(Protocol):
    """What p2pd is connected with, and how to end it (`p2pd_control.py`)."""

    async def connected(self) -> dict[PeerId, list[str]]: ...
    async def disconnect(self, peer: PeerId) -> None: ...


async def prepare(control: Connections, *, settle_s: float = SETTLE_S) -> None:
    """Wait until a young p2pd knows where it is seen, and end what it opened over relays before: who calls anew gets a hole."""
    await asyncio.sleep(settle_s)
    for peer, addresses in (await control.connected()).items():
        if all(map(is_relayed, addresses)):
            await control.disconnect(peer)
