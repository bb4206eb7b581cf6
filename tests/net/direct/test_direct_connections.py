"""Two peers that a fake network introduces, and real TCP connections on loopback between them; and who else comes to the port."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

import pytest
import pytest_asyncio

from swarmnode.errors import PeerLost
from swarmnode.net.clock import Deadline
from swarmnode.net.direct import direct_connections
from swarmnode.net.direct.direct_connections import (
    MOST_NOT_SHOWN,
    OFFER,
    PROTOCOL,
    REQUEST,
    DirectConnections,
    Prologue,
)
from swarmnode.net.direct.direct_stream import TOKEN_BYTES, DirectStream, KeyPair
from swarmnode.net.fair_share import HALF_OPEN_OF_PEER
from swarmnode.net.interfaces import PeerId, Stream, StreamHandler
from swarmnode.net.memory.network import FakeNetwork, FakeWorld

ECHO = "/test/echo/1"
LOOPBACK = "/ip4/127.0.0.1/tcp/4001"
TIMEOUT_S = 60.0
LONG = Deadline(floor_s=60.0, ceiling_s=60.0, slack=1.0)  # no verdict depends on how fast the machine is
SHORT = Deadline(floor_s=0.05, ceiling_s=0.05, slack=1.0)


class Peer:
    """A peer of a fake network with direct connections of its own."""

    def __init__(self, network: FakeNetwork) -> None:
        self.network = network
        self.peer_id = network.peer_id
        self.arrived: asyncio.Queue[DirectStream] = asyncio.Queue()
        self.direct = DirectConnections({ECHO}.__contains__, self.arrived.put_nowait)
        self.asked = 0
        self.seen_at = [LOOPBACK]  # where we see others

    async def start(self, *addresses: str) -> None:
        await self.direct.start(self.peer_id, addresses)
        await self.network.serve(PROTOCOL, self.direct.answer)

    async def open(self, peer: PeerId, protocol: str, *, timeout_s: float) -> Stream:
        """As p2pd does."""
        self.asked += 1
        return await self.network.open(peer, protocol, timeout_s=timeout_s)

    async def addresses_of(self, peer: PeerId) -> list[str]:
        return self.seen_at

    async def open_direct(self, peer: Peer, protocol: str = ECHO, timeout_s: float = TIMEOUT_S) -> DirectStream | None:
        return await self.direct.open(self, peer.peer_id, protocol, timeout_s=timeout_s)


@pytest_asyncio.fixture
async def peers(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[Peer, Peer]]:
    for name in ("ANSWERING", "DIALLING"):
        monkeypatch.setattr(direct_connections, name, LONG)
    for name in ("ASK_TIMEOUT_S", "OFFER_TIMEOUT_S"):
        monkeypatch.setattr(direct_connections, name, LONG.floor_s)
    monkeypatch.setattr(direct_connections, "SHOW_TIMEOUT_S", LONG.floor_s)
    world = FakeWorld(seed=1)
    alice, bob = Peer(world.join()), Peer(world.join())
    assert await alice.network.connect(await bob.network.addresses(), timeout_s=TIMEOUT_S)
    await bob.start("/ip4/127.0.0.1/tcp/0", "/ip4/127.0.0.1/udp/0/quic-v1")
    await alice.start()
    yield alice, bob
    for peer in (alice, bob):
        peer.direct.close()
        await peer.network.close()


async def until(holds: Callable[[], bool]) -> None:
    """Wait for what the other side of a connection does."""
    deadline_s = asyncio.get_running_loop().time() + TIMEOUT_S
    while not holds():
        assert asyncio.get_running_loop().time() < deadline_s
        await asyncio.sleep(0.001)


async def dial(peer: Peer) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", peer.direct._listener.port)


async def test_bytes_go_both_ways_and_the_end_is_read(peers: tuple[Peer, Peer]) -> None:
    alice, bob = peers
    here = await alice.open_direct(bob)
    assert here is not None
    there = await bob.arrived.get()
    assert (here.peer, here.protocol) == (bob.peer_id, ECHO)
    assert (there.peer, there.protocol) == (alice.peer_id, ECHO)
    here.write([b"ping"])
    assert await there.read() == b"ping"
    large = bytes(range(256)) * 16384
    there.write([large])
    buffer = memoryview(bytearray(len(large)))
    filled = 0
    while filled < len(large):
        filled += await here.read_into(buffer[filled:])
    assert buffer == large
    await there.close()
    assert await here.read() == b""
    await here.close()
    await until(lambda: here.closed.done() and there.closed.done())
    assert repr(alice.direct).startswith("<DirectConnections: 0 open")


async def test_as_many_streams_at_once_as_a_peer_may_have_half_open(peers: tuple[Peer, Peer]) -> None:
    alice, bob = peers
    opened = await asyncio.gather(*(alice.open_direct(bob) for _ in range(HALF_OPEN_OF_PEER)))
    assert None not in opened
    assert bob.arrived.qsize() == len(opened)


async def test_the_question_counts_no_more_once_its_connection_is_there(peers: tuple[Peer, Peer]) -> None:
    alice, bob = peers
    counted: list[int] = []
    bob.direct._on_stream = lambda _stream: counted.append(bob.network._limits.half_open)
    assert await alice.open_direct(bob) is not None
    assert counted == [0]


async def test_closing_ends_every_stream(peers: tuple[Peer, Peer]) -> None:
    alice, bob = peers
    here = await alice.open_direct(bob)
    assert here is not None
    bob.direct.close()
    with pytest.raises(PeerLost):
        await here.read()
    assert await alice.open_direct(bob) is None


# -- where there is no direct way


async def test_a_peer_that_does_not_listen_or_serve_offers_nothing(peers: tuple[Peer, Peer]) -> None:
    alice, bob = peers
    assert await bob.open_direct(alice) is None
    assert await alice.open_direct(bob, "/test/unknown/1") is None
    assert alice.direct._backoff.resting == frozenset()


async def test_a_peer_that_knows_nothing_of_it(peers: tuple[Peer, Peer]) -> None:
    alice, _ = peers
    old = Peer(alice.network._world.join())
    assert await alice.network.connect(await old.network.addresses(), timeout_s=TIMEOUT_S)
    assert await alice.open_direct(old) is None
    await old.network.close()


@pytest.mark.parametrize("seen_at", [[], ["/ip4/127.0.0.1/tcp/4001/p2p/QmRelay/p2p-circuit"]])
async def test_who_is_reached_over_a_relay_alone_is_not_dialled(peers: tuple[Peer, Peer], seen_at: list[str]) -> None:
    alice, bob = peers
    alice.seen_at = seen_at
    assert await alice.open_direct(bob) is None
    assert not alice.direct._backoff.resting, "a hole may be punched soon"


async def test_a_peer_that_does_not_answer_is_lost(peers: tuple[Peer, Peer], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct_connections, "ANSWERING", SHORT)
    alice, bob = peers
    await bob.network.serve(PROTOCOL, hold)
    with pytest.raises(PeerLost, match="does not answer"):
        await alice.open_direct(bob)


async def hold(_stream: Stream) -> None:
    await asyncio.Event().wait()


def offering(port: int) -> StreamHandler:
    """A peer that offers this port, whoever listens there."""

    async def answer(stream: Stream) -> None:
        await stream.read()
        stream.write([OFFER.pack(KeyPair().public, port)])
        await hold(stream)

    return answer


async def test_a_port_of_somebody_else_gets_one_token_and_is_left_alone_for_a_while(peers: tuple[Peer, Peer]) -> None:
    alice, bob = peers
    said: list[bytes] = []

    async def third_party(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        said.append(await reader.read(1024))
        writer.write(b"220 mail.example")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(third_party, "127.0.0.1", 0)
    async with server:
        await bob.network.serve(PROTOCOL, offering(server.sockets[0].getsockname()[1]))
        assert await alice.open_direct(bob) is None
        asked = alice.asked
        assert await alice.open_direct(bob) is None
    assert alice.asked == asked
    assert [len(word) for word in said] == [TOKEN_BYTES]


async def test_ports_of_the_system_are_not_dialled(peers: tuple[Peer, Peer]) -> None:
    alice, bob = peers
    await bob.network.serve(PROTOCOL, offering(22))
    assert await alice.open_direct(bob) is None
    assert not alice.direct._backoff.resting


async def test_a_port_at_which_nobody_says_anything(peers: tuple[Peer, Peer], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct_connections, "DIALLING", SHORT)
    alice, bob = peers
    async with await asyncio.start_server(lambda _reader, _writer: None, "127.0.0.1", 0) as server:
        await bob.network.serve(PROTOCOL, offering(server.sockets[0].getsockname()[1]))
        assert await alice.open_direct(bob) is None
        assert alice.direct._backoff.resting == {bob.peer_id}


# -- who else comes to the port


async def test_a_token_that_was_shown_once_is_worth_nothing(
    peers: tuple[Peer, Peer], monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens: list[bytes] = []
    say = Prologue.say
    monkeypatch.setattr(Prologue, "say", lambda prologue, word: (tokens.append(word), say(prologue, word)))
    alice, bob = peers
    assert await alice.open_direct(bob) is not None
    reader, writer = await dial(bob)
    writer.write(tokens[0])
    assert await reader.read() == b""
    writer.close()
    assert bob.arrived.qsize() == 1


async def test_an_offer_that_is_not_taken_is_forgotten(
    peers: tuple[Peer, Peer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(direct_connections, "OFFER_TIMEOUT_S", 0.01)
    alice, bob = peers
    stream = await alice.network.open(bob.peer_id, PROTOCOL, timeout_s=TIMEOUT_S)
    stream.write([REQUEST.pack(KeyPair().public, len(ECHO)) + ECHO.encode()])
    assert len(await stream.read()) == OFFER.size
    assert await stream.read() == b""
    assert bob.direct._listener._expected == {}


async def test_a_question_that_does_not_come_to_its_end_is_dropped(
    peers: tuple[Peer, Peer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(direct_connections, "ASK_TIMEOUT_S", 0.01)
    alice, bob = peers
    stream = await alice.network.open(bob.peer_id, PROTOCOL, timeout_s=TIMEOUT_S)
    stream.write([bytes(5)])
    with pytest.raises(PeerLost):
        if not await stream.read():
            raise PeerLost("ended")


@pytest.mark.parametrize("said", [b"GET / HTTP/1.1\r\n\r\n", bytes(TOKEN_BYTES), b"\xff" * 100_000])
async def test_strangers_are_closed_as_soon_as_they_have_shown_that_they_are(
    peers: tuple[Peer, Peer], said: bytes
) -> None:
    _, bob = peers
    reader, writer = await dial(bob)
    writer.write(said)
    with contextlib.suppress(ConnectionResetError):  # by what was not read
        assert await reader.read() == b""
    writer.close()
    assert bob.arrived.empty()


async def test_who_shows_nothing_goes_after_a_while(peers: tuple[Peer, Peer], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct_connections, "SHOW_TIMEOUT_S", 0.02)
    _, bob = peers
    reader, writer = await dial(bob)
    writer.write(b"slow")
    assert await reader.read() == b""
    writer.close()
    await until(lambda: not bob.direct._listener._groups)


async def test_a_flood_takes_a_bounded_number_of_places_and_keeps_nobody_out(peers: tuple[Peer, Peer]) -> None:
    alice, bob = peers
    flood = [await dial(bob) for _ in range(MOST_NOT_SHOWN + 20)]
    await until(lambda: len(bob.direct._listener._groups) == MOST_NOT_SHOWN)
    here = await alice.open_direct(bob)
    assert here is not None
    for reader, _ in flood[:20]:
        assert await reader.read() == b"", "the oldest went"
    assert len(bob.direct._listener._groups) <= MOST_NOT_SHOWN
    for _, writer in flood:
        writer.close()
