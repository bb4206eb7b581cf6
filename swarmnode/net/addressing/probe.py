"""Whether anybody answers at an address, before something is made to depend on it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence

from swarmnode.net.addressing.addresses import tcp_service


async def answering(addresses: Sequence[str], *, timeout_s: float) -> list[str]:
    """Those multiaddrs at which somebody accepts a TCP connection; all of them where nobody does: then it may be us."""
    tried = await asyncio.gather(*(answers(address, timeout_s) for address in addresses))
    return [address for address, yes in zip(addresses, tried, strict=True) if yes] or list(addresses)


async def answers(address: str, timeout_s: float) -> bool:
    """Whether somebody accepts a TCP connection there; also yes for other transports, of which that cannot be told."""
    service = tcp_service(address)
    if service is None:
        return True  # another transport: nobody knows
    with contextlib.suppress(OSError, asyncio.TimeoutError):
        _, writer = await asyncio.wait_for(asyncio.open_connection(*service), timeout_s)
        writer.close()
        return True
    return False
