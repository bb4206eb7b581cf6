"""Who answers at an address."""

from __future__ import annotations

import asyncio

from swarmnode.net.addressing.addresses import free_port
from swarmnode.net.addressing.reachability import answering


async def test_only_those_that_answer_unless_none_does() -> None:
    server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    there = f"/ip4/127.0.0.1/tcp/{port}/p2p/12D3KooWthere"
    named = f"/dns4/localhost/tcp/{port}/p2p/12D3KooWnamed"
    gone = f"/ip4/127.0.0.1/tcp/{free_port()}/p2p/12D3KooWgone"
    quic = "/ip4/127.0.0.1/udp/4001/quic-v1/p2p/12D3KooWquic"
    assert await answering([gone, there, named, quic], timeout_s=5) == [there, named, quic]
    assert await answering([], timeout_s=5) == []
    server.close()
    await server.wait_closed()
    assert await answering([there, gone], timeout_s=5) == [there, gone]
