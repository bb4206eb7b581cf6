"""Two ends of a direct stream over a transport that the test moves by hand."""

from __future__ import annotations

import asyncio
import errno

import pytest

from swarmnode.errors import PeerLost
from swarmnode.net.direct.direct_stream import (
    LINGER_S,
    MAX_CONTENT_BYTES,
    MAX_UNREAD_BYTES,
    READ_BYTES,
    DirectionKey,
    DirectStream,
)
from swarmnode.net.transport_stream import CLOSE_TIMEOUT_S, WRITE_HIGH_BYTES
from tests.net.virtual import in_virtual_time

ONE, OTHER = bytes(32), bytes(range(32))


class HandMoved(asyncio.Transport):
    """Keeps what is written until the test takes it."""

    def __init__(self, stream: DirectStream) -> None:
        super().__init__()
        self.stream = stream
        self.written = bytearray()
        self.reading = True
        self.ended = False
        self._closing = False
        self._high = 0

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self._high = high or 0

    def get_write_buffer_size(self) -> int:
        return len(self.written)

    def writelines(self, list_of_data: object) -> None:
        self.written += b"".join(list_of_data)  # type: ignore[call-overload]
        if len(self.written) > self._high and self.stream._writable is None:
            self.stream.pause_writing()

    def take(self) -> bytes:
        """All that was written; the writer may go on."""
        taken = bytes(self.written)
        self.written.clear()
        if self.stream._writable is not None:
            self.stream.resume_writing()
        return taken

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True

    def is_closing(self) -> bool:
        return self._closing

    def write_eof(self) -> None:
        if self._closing:
            raise RuntimeError("the handler is closed")  # as uvloop says it
        self.ended = True

    def close(self) -> None:
        self.abort()

    def abort(self) -> None:
        if not self._closing:
            self._closing = True
            asyncio.get_running_loop().call_soon(self.stream.connection_lost, None)


def pair() -> tuple[DirectStream, HandMoved, DirectStream, HandMoved]:
    ends = []
    for peer, seals, opens in (("bob", ONE, OTHER), ("alice", OTHER, ONE)):
        stream = DirectStream(peer, "/test/echo/1", seals=DirectionKey(seals), opens=DirectionKey(opens))
        transport = HandMoved(stream)
        stream.connection_made(transport)
        ends.append((stream, transport))
    return (*ends[0], *ends[1])


async def closed(stream: DirectStream, wire: HandMoved) -> bytes:
    """Close a stream whose transport takes everything; what it sent."""
    closing, sent = asyncio.ensure_future(stream.close()), b""
    while not closing.done():
        await asyncio.sleep(0)
        sent += wire.take()
    closing.result()
    return sent


def deliver(data: bytes, stream: DirectStream) -> None:
    """As a transport does: into the stream's buffer, as far as it is read."""
    while data:
        room = memoryview(stream.get_buffer(-1))
        count = min(len(room), len(data))
        room[:count] = data[:count]
        stream.buffer_updated(count)
        data = data[count:]


@in_virtual_time
async def test_bytes_come_in_order_and_into_small_buffers() -> None:
    here, wire, there, _ = pair()
    here.write([b"a", bytearray(b"bc"), memoryview(b"def")])
    here.write([b"", b"g"])
    sent = wire.take()
    assert b"def" not in sent
    deliver(sent, there)
    buffer, read = bytearray(2), b""
    while len(read) < 7:
        read += buffer[: await there.read_into(memoryview(buffer))]
    assert read == b"abcdefg"


@in_virtual_time
async def test_a_reset_that_comes_while_it_closes_is_no_error() -> None:
    here, wire, _, _ = pair()
    here.write([b"bye"])
    drain = here.drain

    async def drained() -> None:
        await drain()
        wire.abort()

    here.drain = drained  # type: ignore[method-assign]
    await closed(here, wire)
    assert not wire.ended and here.closed.done()


@in_virtual_time
async def test_a_reset_that_the_loop_has_not_read_is_no_error() -> None:
    here, wire, _, _ = pair()

    def write_eof() -> None:
        raise OSError(errno.ENOTCONN, "Transport endpoint is not connected")

    wire.write_eof = write_eof  # type: ignore[method-assign]
    here.write([b"bye"])
    await closed(here, wire)
    await here.closed


@in_virtual_time
async def test_the_end_is_told_from_a_cut() -> None:
    here, wire, there, far_wire = pair()
    here.write([b"bye"])
    deliver(await closed(here, wire), there)
    assert wire.ended
    assert there.eof_received(), "our own direction is open yet"
    assert await there.read() == b"bye"
    assert await there.read() == b""
    await closed(there, far_wire)
    assert far_wire.is_closing(), "both have ended"

    here, wire, there, far_wire = pair()
    here.write([b"by"])
    deliver(wire.take(), there)
    assert not there.eof_received()
    far_wire.close()  # as a transport does that is told so
    assert await there.read() == b"by"
    with pytest.raises(PeerLost, match="cut short"):
        await there.read()


@in_virtual_time
async def test_a_record_that_was_tampered_with_ends_the_stream_and_gives_nothing() -> None:
    here, wire, there, far_wire = pair()
    reading = asyncio.ensure_future(there.read())
    await asyncio.sleep(0)
    here.write([b"pay bob"])
    sent = bytearray(wire.take())
    sent[-1] ^= 1
    deliver(bytes(sent), there)
    with pytest.raises(PeerLost, match="altered or is out of order"):
        await reading
    assert far_wire.is_closing()


@in_virtual_time
async def test_a_reader_that_does_not_read_holds_the_sender_back() -> None:
    here, wire, there, far_wire = pair()
    here.write([bytes(2 * MAX_UNREAD_BYTES)])
    deliver(wire.take(), there)
    assert not far_wire.reading
    read = len(await there.read())
    while read < 2 * MAX_UNREAD_BYTES:
        read += len(await there.read())
    assert far_wire.reading


@in_virtual_time
async def test_no_more_is_sealed_than_the_transport_takes() -> None:
    here, wire, there, _ = pair()
    size_bytes = 16 * WRITE_HIGH_BYTES
    here.write([bytes(size_bytes)])
    assert len(wire.written) <= WRITE_HIGH_BYTES + 2 * MAX_CONTENT_BYTES
    assert here.unsent_bytes >= size_bytes
    draining, read = asyncio.ensure_future(here.drain()), 0
    while read < size_bytes:
        sent = wire.take()
        assert len(wire.written) <= WRITE_HIGH_BYTES + 2 * MAX_CONTENT_BYTES
        for start in range(0, len(sent), MAX_UNREAD_BYTES):
            deliver(sent[start : start + MAX_UNREAD_BYTES], there)
            while there._unread:
                assert there.receive_bytes > READ_BYTES, "what nobody has taken yet"
                read += len(await there.read())
    await draining
    assert here.unsent_bytes == 0
    assert there.receive_bytes == READ_BYTES


@in_virtual_time
async def test_what_comes_after_our_end_is_taken_and_thrown_away_for_a_while() -> None:
    here, wire, there, far_wire = pair()
    there.write([b"late"] * 3)
    await closed(here, wire)
    here.abort()  # nothing of ours is left, so nothing is lost by waiting
    deliver(far_wire.take(), here)
    assert await here.read() == b""
    assert not wire.is_closing()
    await asyncio.sleep(LINGER_S + 0.1)
    assert wire.is_closing()
    with pytest.raises(PeerLost):
        here.write([b"more"])


@in_virtual_time
async def test_closing_does_not_wait_for_ever_for_a_peer_that_takes_nothing() -> None:
    here, wire, _, _ = pair()
    here.write([bytes(WRITE_HIGH_BYTES * 4)])
    began_s = asyncio.get_running_loop().time()
    await here.close()
    assert asyncio.get_running_loop().time() - began_s == pytest.approx(CLOSE_TIMEOUT_S)
    assert wire.is_closing()


@in_virtual_time
async def test_a_stream_that_is_dropped_wakes_reader_and_writer() -> None:
    here, _, _, _ = pair()
    here.write([bytes(WRITE_HIGH_BYTES * 4)])
    waiting = [asyncio.ensure_future(here.read()), asyncio.ensure_future(here.drain())]
    await asyncio.sleep(0)
    here.abort()
    assert await waiting[0] == b""
    with pytest.raises(PeerLost):
        await waiting[1]
