"""Dials bootstrap peers: one that was started anew knows nobody, and newcomers who ask it would find an empty swarm.

So whoever is in the swarm dials the bootstrap peers that it has no connection with, ever more slowly while none answers or none is
missing, and in a large swarm so seldom that all together call about as often as 64 peers would.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Sequence

from swarmnode.net.addressing.addresses import peer_of
from swarmnode.net.interfaces import PeerId

FIRST_S = 2.0
MAX_PAUSE_S = 16.0
CALM = 2  # looks that found all bootstrap peers connected slow the next ones down no further than so many doublings
CALLERS = 64  # peers that may call at this pace


def pause_s(failures: int, crowd: float) -> float:
    """Seconds to the next call, after so many in a row that reached nobody, in a swarm of `crowd` peers."""
    pause = FIRST_S * 2.0 ** min(failures, 16)
    return min(MAX_PAUSE_S, pause) * max(1.0, crowd / CALLERS)


def unconnected(bootstraps: Sequence[str], connected: Collection[PeerId]) -> list[str]:
    """The bootstrap peers (multiaddrs with /p2p/) that we have no connection with."""
    return [bootstrap for bootstrap in bootstraps if peer_of(bootstrap) not in connected]


async def dial_bootstraps(
    bootstraps: Sequence[str],
    connected: Callable[[], Awaitable[Collection[PeerId]]],
    call: Callable[[Sequence[str]], Awaitable[bool]],
    crowd: Callable[[], float],
    *,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> None:
    """Go on for ever. `call` says whether somebody answered at one of the addresses."""
    failures = calm = 0
    while True:
        await sleep(pause_s(failures or calm, crowd()))
        missing = unconnected(bootstraps, await connected())
        calm = 0 if missing else min(calm + 1, CALM)
        failures = failures + 1 if missing and not await call(missing) else 0
