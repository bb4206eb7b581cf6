"""Two strangers to a private swarm have its bootstrap peer relay their own bytes between them."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
import time
from contextlib import AsyncExitStack
from pathlib import Path

from attack import Outcome, main
from members_listed import MembersOnly

from swarmnode.errors import PeerLost
from swarmnode.net.identity import Identity
from swarmnode.net.interfaces import PeerId, Stream
from swarmnode.net.libp2p.engine import Engine, EngineConfig

VIRTUAL, FAST = False, False
PROTOCOL = "/attack/1"
PIECE = bytes(1 << 16)
BYTES = 4 << 20
TIMEOUT_S = 30.0


async def reach(caller: Engine, door: Engine, called: PeerId) -> Stream | None:
    """Open a stream to `called` over the relay `door`, with retries for `TIMEOUT_S` seconds; return None if the door never
    relays."""
    circuit = f"{(await door.addresses())[0]}/p2p-circuit"
    ends_s = time.monotonic() + TIMEOUT_S
    while time.monotonic() < ends_s:
        try:
            await caller._running().connect(called, circuit, timeout_s=TIMEOUT_S)
            return await caller.open(called, PROTOCOL, timeout_s=TIMEOUT_S)
        except PeerLost:  # the called peer has no reservation at the relay yet
            await asyncio.sleep(0.5)
    return None


async def attack() -> Outcome:
    async with AsyncExitStack() as ends:
        folder = Path(ends.enter_context(tempfile.TemporaryDirectory()))

        async def start(name: str, *, public: bool = False, relays: tuple[str, ...] = ()) -> Engine:
            identity = Identity.load_or_create(folder / name)
            gate = MembersOnly({identity.peer_id})
            config = EngineConfig(folder / name, gate=gate, public=public, relays=relays, hidden=bool(relays))
            engine = await Engine.start(config)
            ends.push_async_callback(engine.close)
            return engine

        door = await start("door", public=True)
        called = await start("called", relays=tuple(await door.addresses()))
        caller = await start("caller")
        came = 0
        over = asyncio.Event()

        async def count(stream: Stream) -> None:
            nonlocal came
            while data := await stream.read():
                came += len(data)
            over.set()

        await called.serve(PROTOCOL, count)
        stream = await reach(caller, door, called.peer_id)
        if stream is None:
            return Outcome(True, "the door relays nothing")
        with contextlib.suppress(PeerLost):  # after a cut half-way the bytes up to then count
            for _ in range(BYTES // len(PIECE)):
                stream.write([PIECE])
                await stream.drain()
            await stream.close()
            await asyncio.wait_for(over.wait(), TIMEOUT_S)
        return Outcome(not came, f"{came / 1e6:.1f} MB went between two strangers over the door", known=True)


main(__name__, attack, virtual=VIRTUAL)
