"""Links on the fake network: who is let in, who is noticed to be gone, and what a rule-breaker gets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from swarmnode.codec.frames import HEADER, Frame, Kind
from swarmnode.codec.messages import VERSION, Body, End, Error, Hello, Ready, decode_body
from swarmnode.errors import ErrorCode, PeerError, PeerLost, PeerRefused, ProtocolError
from swarmnode.net.fake import FakeNetwork, FakeWorld
from swarmnode.net.interfaces import Stream
from swarmnode.net.link import Link, LinkConfig

PROTOCOL = "/test/1"
HELLO = Hello(VERSION, bytes(32), "test")
QUICK = LinkConfig(heartbeat_s=0.02, min_silence_s=0.2, idle_heartbeat_s=0.1, max_payload_bytes=1000)


class Pair:
    """Two peers, and whatever link the second one was asked for."""

    def __init__(self) -> None:
        self.world = FakeWorld(seed=1)
        self.caller: FakeNetwork = self.world.join()
        self.server: FakeNetwork = self.world.join()
        self.heard: asyncio.Queue[tuple[Frame, Body]] = asyncio.Queue()
        self.ended: asyncio.Queue[PeerError | None] = asyncio.Queue()
        self.links: asyncio.Queue[Link] = asyncio.Queue()

    async def start(self) -> None:
        await self.caller.connect(await self.server.addresses(), timeout_s=1)
        await self.server.serve(PROTOCOL, self._serve)

    async def _serve(self, stream: Stream) -> None:
        try:
            link = await Link.accept(stream, HELLO, config=QUICK)
            self.links.put_nowait(link)
            await link.run(lambda frame, body: self.heard.put_nowait((frame, body)))
            self.ended.put_nowait(None)
        except PeerError as error:
            self.ended.put_nowait(error)

    async def connect(self, hello: Hello = HELLO) -> Link:
        return await Link.connect(self.caller, self.server.peer_id, PROTOCOL, hello, config=QUICK)


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    pair = Pair()
    await pair.start()
    yield pair
    await pair.caller.close()
    await pair.server.close()


async def soon(queue: asyncio.Queue) -> object:  # type: ignore[type-arg]
    return await asyncio.wait_for(queue.get(), 5)


async def test_frames_arrive_in_order_with_their_payloads(pair: Pair) -> None:
    link = await pair.connect()
    for number in range(3):
        link.send(Ready(number), channel=7, seq=number, payload=[bytes([number]) * number])
    for number in range(3):
        frame, body = await soon(pair.heard)  # type: ignore[misc]
        assert (frame.channel, frame.seq, bytes(frame.payload), body) == (
            7,
            number,
            bytes([number]) * number,
            Ready(number),
        )


async def test_end_is_told_from_a_cut(pair: Pair) -> None:
    link = await pair.connect()
    await link.close()
    assert await soon(pair.ended) is None
    link = await pair.connect()
    link.abort()
    assert isinstance(await soon(pair.ended), PeerLost)


@pytest.mark.parametrize(
    ("hello", "code"),
    [
        (Hello(VERSION + 1, bytes(32), "newer"), ErrorCode.VERSION),
        (Hello(VERSION, b"\1" * 32, "other"), ErrorCode.WRONG_SWARM),
    ],
    ids=["version", "swarm"],
)
async def test_strangers_get_a_refusal_and_nothing_more(pair: Pair, hello: Hello, code: ErrorCode) -> None:
    with pytest.raises(PeerRefused) as refused:
        await pair.connect(hello)
    assert refused.value.code == code
    assert (await soon(pair.ended)).code == code  # type: ignore[attr-defined]


async def test_an_oversized_frame_ends_its_link_and_no_other(pair: Pair) -> None:
    good = await pair.connect()
    stream = await pair.caller.open(pair.server.peer_id, PROTOCOL, timeout_s=1)
    bad = Link(stream, QUICK)
    bad.send(HELLO)
    stream.write([HEADER.pack(Kind.INPUT, 0, 0, 1_000_000, 1, 0)])
    bad._flush()
    error = await soon(pair.ended)
    assert isinstance(error, ProtocolError) and error.code == ErrorCode.TOO_LARGE
    good.send(Ready(1), channel=1)
    assert (await soon(pair.heard))[1] == Ready(1)  # type: ignore[index]


async def test_a_malformed_body_is_answered_by_its_code(pair: Pair) -> None:
    link = await pair.connect()
    link._out.append(HEADER.pack(Kind.READY, 0, 3, 0, 1, 0) + b"\xc1\xc1\xc1")
    link._flush()
    error = await soon(pair.ended)
    assert isinstance(error, ProtocolError) and error.code == ErrorCode.MALFORMED
    with pytest.raises(PeerRefused) as told:
        await asyncio.wait_for(link.run(lambda _frame, _body: None), 5)
    assert told.value.code == ErrorCode.MALFORMED


async def test_a_peer_that_hangs_is_noticed_while_answers_are_expected(pair: Pair) -> None:
    link = await pair.connect()
    link.busy = True
    pair.world.hang(pair.server.peer_id)
    with pytest.raises(PeerLost, match="hangs"):
        await asyncio.wait_for(link.run(lambda _frame, _body: None), 5)


async def test_a_quiet_peer_that_lives_is_kept(pair: Pair) -> None:
    link = await pair.connect()
    link.busy = True
    running = asyncio.ensure_future(link.run(lambda _frame, _body: None))
    done, _ = await asyncio.wait({running}, timeout=5 * QUICK.min_silence_s)
    assert not done and not link.closed
    await link.close()
    await running


def test_the_wire_carries_codes_not_words() -> None:
    assert decode_body(Kind.ERROR, b"\x92\x05\xca\x00\x00\x00\x00") == Error(5, 0.0)
    assert decode_body(Kind.END, b"") == End()
