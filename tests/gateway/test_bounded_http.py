"""Bytes that the gateway's HTTP server is sent: heads, trailers and chunks without end, and connections that say nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
import uvicorn
from starlette.types import Receive, Scope, Send
from uvicorn.server import ServerState

from swarmnode.gateway.http.http_server import HEAD_S, MAX_HEAD_BYTES, BoundedHttp
from swarmnode.net.fair_share import FairShare
from tests.net.virtual import in_virtual_time

POST = b"POST / HTTP/1.1\r\nHost: localhost\r\n"
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"


class Wire(asyncio.Transport):
    """What the server writes, until it ends the connection."""

    def __init__(self, host: str = "198.51.100.1") -> None:
        super().__init__({"peername": (host, 4711)})
        self.written = b""
        self.closed = False
        self.aborted = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written += bytes(data)

    def close(self) -> None:
        self.closed = True

    def abort(self) -> None:
        self.aborted = True

    def is_closing(self) -> bool:
        return self.closed

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass


async def counts_bytes(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers with the size of the body."""
    size = 0
    while True:
        message = await receive()
        size += len(message.get("body", b""))
        if not message.get("more_body"):
            break
    told = str(size).encode()
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(told))]})
    await send({"type": "http.response.body", "body": told})


def connected() -> tuple[BoundedHttp, Wire]:
    config = uvicorn.Config(counts_bytes, log_config=None, access_log=False, lifespan="off")
    connection, wire = BoundedHttp(config, ServerState(), {}, asyncio.get_running_loop()), Wire()
    connection.connection_made(wire)
    return connection, wire


def heads() -> bytes:
    return b"POST / HTTP/1.1\r\nX: " + b"a" * MAX_HEAD_BYTES


def many_headers() -> bytes:
    return POST + b"".join(b"X-%d: y\r\n" % number for number in range(MAX_HEAD_BYTES // 8))


def trailers() -> bytes:
    return CHUNKED + b"1\r\nx\r\n0\r\nX: " + b"a" * (2 * MAX_HEAD_BYTES)


def chunk_extensions() -> bytes:
    return CHUNKED + b"1;" + b"a" * (2 * MAX_HEAD_BYTES)


@pytest.mark.parametrize("flood", [heads, many_headers, trailers, chunk_extensions])
@in_virtual_time
async def test_what_has_no_end_is_cut(flood: Callable[[], bytes]) -> None:
    connection, wire = connected()
    data, step = flood() * 3, 1000
    for start in range(0, len(data), step):
        if not wire.closed:
            connection.data_received(data[start : start + step])
    assert wire.closed and b" 200 " not in wire.written


@in_virtual_time
async def test_bodies_are_as_long_as_they_like() -> None:
    for pieces in ([b"x" * 1000] * 300, [b"x"] * 30_000):
        connection, wire = connected()
        connection.data_received(CHUNKED)
        for piece in pieces:
            connection.data_received(b"%x\r\n%s\r\n" % (len(piece), piece))
        connection.data_received(b"0\r\n\r\n")
        await asyncio.sleep(1)
        assert wire.written.endswith(b"%d" % sum(map(len, pieces)))
        connection.connection_lost(None)


@in_virtual_time
async def test_heads_come_in_time() -> None:
    for said in (b"", b"\r\n", POST, CHUNKED + b"0\r\n\r\n" + POST):
        connection, wire = connected()
        connection.data_received(said)
        for _ in range(int(HEAD_S) // 2):
            await asyncio.sleep(1)
        if not wire.closed:
            connection.data_received(b"X: y\r\n" if said.endswith(POST) else b"\r\n")
        await asyncio.sleep(HEAD_S)
        assert wire.closed and wire.written.count(b"HTTP/1.1") <= 2
        connection.connection_lost(None)


# -- places ------------------------------------------------------------------------------------------------------------


def come(places: FairShare[BoundedHttp], host: str) -> tuple[BoundedHttp, Wire]:
    """A connection from an address."""
    config = uvicorn.Config(counts_bytes, log_config=None, access_log=False, lifespan="off")
    connection = BoundedHttp(config, ServerState(), {}, asyncio.get_running_loop(), places=places)
    wire = Wire(host)
    connection.connection_made(wire)
    return connection, wire


@in_virtual_time
async def test_who_holds_all_places_keeps_nobody_out() -> None:
    places = FairShare[BoundedHttp](8)
    held = [come(places, "9.9.9.9") for _ in range(8)]
    _, refused = come(places, "9.9.9.9")
    assert refused.closed and refused.written.startswith(b"HTTP/1.1 503 ")
    _, honest = come(places, "8.8.8.8")
    assert not honest.closed and [wire.aborted for _, wire in held].count(True) == 1 and held[-1][1].aborted
    for connection, _ in held:
        connection.connection_lost(None)
    assert len(places) == 1


@in_virtual_time
async def test_behind_one_proxy_all_are_alike() -> None:
    """Nobody gives a place up for somebody from the same address."""
    places = FairShare[BoundedHttp](4)
    held = [come(places, "127.0.0.1") for _ in range(4)]
    _, refused = come(places, "127.0.0.1")
    assert refused.closed and not any(wire.aborted for _, wire in held)


@in_virtual_time
async def test_who_has_no_address_is_somebody_too() -> None:
    """As over a Unix socket."""
    _, wire = come(FairShare[BoundedHttp](4), "")
    assert not wire.closed


@in_virtual_time
async def test_a_client_that_would_rather_speak_http_2_is_answered() -> None:
    """As Java's asks, which sends the body at once."""
    connection, wire = connected()
    asks = (
        b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAA\r\nContent-Length: 5\r\n\r\n"
    )
    connection.data_received(POST + asks + b"hello")
    await asyncio.sleep(0.1)
    assert wire.written.startswith(b"HTTP/1.1 200") and wire.written.endswith(b"\r\n\r\n5")
