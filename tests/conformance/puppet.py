"""The other side of the conformance suite: a peer that serves a few protocols. As a script, a process of its own."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

from swarmnode.net.interfaces import Network, Stream

ECHO = "/test/echo/1"
WHO = "/test/who/1"
HOLD = "/test/hold/1"
BYE = "/test/bye/1"
KEY = b"puppet's key"


def believes(key: bytes, subkey: bytes, value: bytes, expires_at: float) -> bool:
    """The record validator of all peers of the suite."""
    return not value.startswith(b"bad")


async def echo(stream: Stream) -> None:
    while data := await stream.read():
        stream.write([data])
        await stream.drain()
    await stream.close()


async def who(stream: Stream) -> None:
    stream.write([stream.peer.encode()])
    await stream.close()


async def hold(stream: Stream) -> None:
    await asyncio.Event().wait()


async def bye(stream: Stream) -> None:
    stream.write([b"b", b"ye"])
    await stream.close()


async def serve(network: Network) -> None:
    for protocol, handler in ((ECHO, echo), (WHO, who), (HOLD, hold), (BYE, bye)):
        await network.serve(protocol, handler)


async def main(identity: str) -> None:
    from swarmnode.net.libp2p.engine import Engine, EngineConfig

    engine = await Engine.start(EngineConfig(Path(identity), record_validator=believes))
    await serve(engine)
    print(json.dumps([engine.peer_id, await engine.addresses()]), flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    await engine.close()


if __name__ == "__main__":
    import uvloop

    uvloop.install()
    asyncio.run(main(sys.argv[1]))
