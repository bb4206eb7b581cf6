"""A stranger opens links and announces 256 MiB in the first frame, to have memory taken before it was admitted."""

from __future__ import annotations

from attack import Outcome, main

from swarmnode.codec.body import VERSION
from swarmnode.codec.frames import MAX_PAYLOAD_BYTES, RECEIVE_BYTES, FrameKind, pack_header
from swarmnode.codec.messages import Hello
from swarmnode.errors import PeerLost, ProtocolError
from swarmnode.ledger import MemoryLedger
from swarmnode.links.link import Link
from swarmnode.links.link_config import LinkConfig
from swarmnode.net.interfaces import Stream
from swarmnode.net.memory.network import FakeWorld

VIRTUAL, FAST = True, True
PROTOCOL = "/swarmnode/session/1"
LINKS = 8
SENT_BYTES = 1 << 20


async def attack() -> Outcome:
    world, ledger = FakeWorld(seed=1), MemoryLedger()
    victim, stranger = world.join(), world.join()
    refused = 0
    most_bytes = 0

    async def serve(stream: Stream) -> None:
        nonlocal refused
        try:
            await Link.accept(stream, Hello(VERSION, bytes(32)), config=LinkConfig(ledger=ledger))
        except ProtocolError:
            refused += 1

    await victim.serve(PROTOCOL, serve)
    await stranger.connect(await victim.addresses(), timeout_s=1)
    for _ in range(LINKS):
        stream = await stranger.open(victim.peer_id, PROTOCOL, timeout_s=1)
        try:
            stream.write([pack_header(FrameKind.HELLO, 60, MAX_PAYLOAD_BYTES), bytes(SENT_BYTES)])
            await stream.drain()
            await stream.read()
        except PeerLost:
            pass  # it was cut off while it wrote
        most_bytes = max(most_bytes, ledger.used_bytes)
    return Outcome(
        refused == LINKS and most_bytes <= RECEIVE_BYTES,
        f"{refused} of {LINKS} refused, {most_bytes} bytes taken for all of them",
    )


main(__name__, attack, virtual=VIRTUAL)
