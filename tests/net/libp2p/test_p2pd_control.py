"""What p2pd answers, told by a stand-in at a unix socket of its own."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from swarmnode.errors import NetworkDown, ProtocolError
from swarmnode.net.identity import Identity
from swarmnode.net.libp2p import p2pd_control
from swarmnode.net.libp2p.from_hivemind import HivemindMultiaddr, p2pd_pb2
from swarmnode.net.libp2p.p2pd_control import P2pdControl, peer_bytes, write_varint

PEERS = [Identity(bytes([number % 256, number // 256] * 16)).peer_id for number in range(1000)]
ADDRESS = HivemindMultiaddr("/ip4/203.0.113.7/tcp/31337").to_bytes()


@contextlib.asynccontextmanager
async def answering(path: Path, data: bytes) -> AsyncIterator[P2pdControl]:
    """A p2pd that says this to every question, in two pieces, and ends the connection."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1 << 16)
        writer.write(data[:1])
        await writer.drain()
        writer.write(data[1:])
        writer.close()

    async with await asyncio.start_unix_server(answer, str(path)):
        yield P2pdControl(path)


def framed(message: Any) -> bytes:
    data = message.SerializeToString()
    return write_varint(len(data)) + data


def crowd() -> bytes:
    peers = [p2pd_pb2.PeerInfo(id=peer_bytes(peer), addrs=[ADDRESS]) for peer in PEERS]
    return framed(p2pd_pb2.Response(type=p2pd_pb2.Response.OK, peers=peers))


async def test_a_thousand_connections_are_told(tmp_path: Path) -> None:
    async with answering(tmp_path / "p2pd", crowd()) as control:
        assert await control.connected() == {peer: ["/ip4/203.0.113.7/tcp/31337"] for peer in PEERS}
        assert await control.addresses_of(PEERS[-1]) == ["/ip4/203.0.113.7/tcp/31337"]


async def test_an_answer_without_bound_is_refused(tmp_path: Path) -> None:
    too_long = write_varint(p2pd_control.MAX_ANSWER_BYTES + 1)
    for data in (too_long + b"some", b"\xff" * 11):
        async with answering(tmp_path / "p2pd", data) as control:
            with pytest.raises(ProtocolError, match="too large"):
                await control.connected()


async def test_a_p2pd_that_ends_meanwhile_is_down(tmp_path: Path) -> None:
    for data in (crowd()[:-1], b"\x90", b""):
        async with answering(tmp_path / "p2pd", data) as control:
            with pytest.raises(NetworkDown, match="ended"):
                await control.connected()
    with pytest.raises(NetworkDown, match="does not answer"):
        await P2pdControl(tmp_path / "nobody").connected()
