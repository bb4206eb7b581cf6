"""Hundreds of strangers connect to the port of direct connections with no token, half a token or a guessed one, and stay."""

from __future__ import annotations

import asyncio
import secrets

from attack import Outcome, main

from swarmnode.net.direct.direct_connections import MOST_NOT_SHOWN
from swarmnode.net.direct.direct_stream import TOKEN_BYTES
from swarmnode.net.memory.network import FakeWorld
from tests.net.direct.test_direct_connections import Peer

VIRTUAL, FAST = False, False
STRANGERS, OPENED = 400, 10
TIMEOUT_S = 5.0


async def attack() -> Outcome:
    world = FakeWorld(seed=1)
    alice, bob = Peer(world.join()), Peer(world.join())
    await alice.network.connect(await bob.network.addresses(), timeout_s=TIMEOUT_S)
    await bob.start("/ip4/127.0.0.1/tcp/0")
    await alice.start()
    port, most = bob.direct._listener.port, 0
    held = []
    for number in range(STRANGERS):
        source = (f"127.0.{number % 8}.{2 + number % 40}", 0)
        _, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=source)
        writer.write(secrets.token_bytes((0, TOKEN_BYTES - 1, TOKEN_BYTES)[number % 3]))
        held.append(writer)
        most = max(most, len(bob.direct._listener._groups))
    loop = asyncio.get_running_loop()
    slowest_s, opened = 0.0, 0
    for _ in range(OPENED):
        began_s = loop.time()
        stream = await alice.open_direct(bob, timeout_s=TIMEOUT_S)
        slowest_s = max(slowest_s, loop.time() - began_s)
        opened += stream is not None
    arrived = bob.arrived.qsize()
    for writer in held:
        writer.close()
    for peer in (alice, bob):
        peer.direct.close()
        await peer.network.close()
    return Outcome(
        opened == arrived == OPENED and most <= MOST_NOT_SHOWN,
        f"{STRANGERS} came, of which {most} had places at once; {opened} of {OPENED} of a peer's were opened, "
        f"within {slowest_s:.2f} s",
    )


main(__name__, attack, virtual=VIRTUAL)
