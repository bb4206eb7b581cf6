"""A stranger opens hundreds of streams without a greeting and holds them, so that others get none."""

from __future__ import annotations

import asyncio

from attack import Outcome, main

from swarmnode.codec.body import VERSION
from swarmnode.codec.messages import Hello
from swarmnode.errors import PeerError
from swarmnode.links.link import Link
from swarmnode.links.link_config import LinkConfig
from swarmnode.net.fair_share import HALF_OPEN_OF_GROUP, StreamLimits
from swarmnode.net.interfaces import Stream
from swarmnode.net.memory.network import FakeWorld

VIRTUAL, FAST = True, True
PROTOCOL = "/swarmnode/session/1"
HELLO = Hello(VERSION, bytes(32))
STRANGERS, STREAMS = 20, 100
HONEST = 40


async def attack() -> Outcome:
    world, loop = FakeWorld(seed=1), asyncio.get_running_loop()
    victim = world.join(host="198.51.100.1")
    config = LinkConfig(clock=loop.time)
    most = 0

    async def serve(stream: Stream) -> None:
        nonlocal most
        limits = stream.limits  # type: ignore[attr-defined]  # of the in-memory network
        assert isinstance(limits, StreamLimits)
        most = max(most, limits.half_open)
        try:
            link = await Link.accept(stream, HELLO, config=config)
            await link.run(lambda _frame, _body: None)
        except PeerError:
            pass

    await victim.serve(PROTOCOL, serve)
    held: list[Stream] = []
    for _ in range(STRANGERS):
        stranger = world.join(host="203.0.113.7")
        await stranger.connect(await victim.addresses(), timeout_s=1)
        held += [await stranger.open(victim.peer_id, PROTOCOL, timeout_s=1) for _ in range(STREAMS)]

    waits_s, links = [], []
    for number in range(HONEST):
        peer = world.join(host=f"192.0.2.{number}")
        await peer.connect(await victim.addresses(), timeout_s=1)
        began_s = loop.time()
        links.append(await Link.connect(peer, victim.peer_id, PROTOCOL, HELLO, config=config))
        waits_s.append(loop.time() - began_s)
    for link in links:
        link.abort()
    return Outcome(
        len(links) == HONEST and most <= HALF_OPEN_OF_GROUP + HONEST and max(waits_s) < 0.1,
        f"of {len(held)} streams {most} were held at once; {len(links)} of {HONEST} others got in within {max(waits_s):.3f} s",
    )


main(__name__, attack, virtual=VIRTUAL)
