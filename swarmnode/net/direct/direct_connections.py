"""Direct connections of a peer: negotiated over p2pd, which has authenticated both sides, then separate TCP connections.

The opener asks on a stream of p2pd's, and the acceptor offers a port. From the keys that they exchange, both derive the token of
the connection and its encryption keys (`protocol/direct.md`). The opener dials the IP address at which p2pd is connected with that
very peer, so an offer cannot lead it to another machine. If anything is missing, the stream goes over p2pd.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import struct
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Protocol, cast

from swarmnode.errors import PeerLost, ProtocolError
from swarmnode.net.addressing.addresses import address_group, host_of, is_relayed
from swarmnode.net.clock import Backoff, Deadline
from swarmnode.net.direct.direct_stream import (
    PUBLIC_KEY_BYTES,
    TOKEN_BYTES,
    Agreement,
    DirectionKey,
    DirectStream,
    KeyPair,
    Occasion,
)
from swarmnode.net.interfaces import PeerId, Stream

log = logging.getLogger(__name__)

PROTOCOL = "/swarmnode/direct/1"
REQUEST = struct.Struct(f"<{PUBLIC_KEY_BYTES}sB")  # the opener's key, and the length of the protocol id that follows
OFFER = struct.Struct(f"<{PUBLIC_KEY_BYTES}sH")  # the acceptor's key and its port; 0: no direct connection
LOWEST_PORT = 1024
MAX_HOSTS = 2

ANSWERING = Deadline(floor_s=2.0, ceiling_s=5.0, slack=8.0)  # an offer needs no computing: a peer without one hangs
DIALLING = Deadline(floor_s=1.0, ceiling_s=2.0, slack=6.0)  # a router or firewall may drop the connection silently
ASK_TIMEOUT_S = 2.0
OFFER_TIMEOUT_S = 5.0
FIRST_PAUSE_S, LONGEST_PAUSE_S = 60.0, 3600.0  # before a peer that cannot be reached directly is tried again
MOST_NOT_SHOWN = 128  # connections that have not shown a token yet
SHOW_TIMEOUT_S = 2.0


class Prologue(asyncio.BufferedProtocol):
    """Protocol of a connection before its stream: reads one word of TOKEN_BYTES and nothing beyond it. `settled` is called once,
    with the word read or the connection lost."""

    def __init__(
        self,
        made: Callable[[Prologue], None] = lambda _prologue: None,
        settled: Callable[[Prologue], None] = lambda _prologue: None,
    ) -> None:
        self._word: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._made = made
        self._settled = settled
        self._transport: asyncio.Transport | None = None
        self._data = memoryview(bytearray(TOKEN_BYTES))
        self._filled_bytes = 0

    def __repr__(self) -> str:
        return f"<Prologue from {self.host} with {self._filled_bytes} of {TOKEN_BYTES} bytes>"

    @property
    def host(self) -> str:
        """IP address of the other side; empty if the connection is gone."""
        name = None if self._transport is None else self._transport.get_extra_info("peername")
        return str(name[0]) if name else ""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's own class, with the same methods
        self._made(self)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._data[self._filled_bytes :]

    def buffer_updated(self, nbytes: int) -> None:
        self._filled_bytes += nbytes
        if self._filled_bytes == TOKEN_BYTES and self._transport is not None:
            self._transport.pause_reading()  # what follows is for the stream
            self._word.set_result(bytes(self._data))
            self._settled(self)

    def connection_lost(self, error: Exception | None) -> None:
        if not self._word.done():
            self._word.set_exception(PeerLost("the direct connection was closed"))
            self._word.exception()  # marks it as retrieved: `word` may have no caller
            self._settled(self)

    async def word(self) -> bytes:
        """Return the word (token or welcome) that the other side sends. Raises PeerLost if the connection closes first."""
        return await asyncio.shield(self._word)

    @property
    def shown(self) -> bytes | None:
        """The word (token or welcome) that the other side has sent; None if it has not been read."""
        return self._word.result() if self._word.done() and self._word.exception() is None else None

    def say(self, word: bytes) -> None:
        """Send this side's word (token or welcome), unless the connection is gone."""
        if self._transport is not None:
            self._transport.write(word)

    def hand_over(self, stream: DirectStream) -> None:
        """Give the connection to `stream`, which reads and writes from now on."""
        assert self._transport is not None
        self._transport.set_protocol(stream)
        stream.connection_made(self._transport)
        self._transport.resume_reading()

    def abort(self) -> None:
        """Close the connection at once; unsent bytes are lost."""
        if self._transport is not None:
            self._transport.abort()


class DirectListener:
    """Listener for direct connections: one port on all IP addresses on which p2pd listens. `port` is 0 while it does not listen."""

    def __init__(self) -> None:
        self.port = 0
        self._servers: list[asyncio.AbstractServer] = []
        self._expected: dict[bytes, Callable[[Prologue], None]] = {}
        self._groups: dict[Prologue, str] = {}  # address groups of connections without a token, the oldest first
        self._timers: dict[Prologue, asyncio.TimerHandle] = {}

    async def open(self, hosts: Sequence[str]) -> None:
        """Listen on each IP address. An address on which that fails is logged and left out."""
        loop = asyncio.get_running_loop()
        for host in hosts:
            try:
                server = await loop.create_server(lambda: Prologue(self._came, self._settled), host, self.port)
            except OSError as error:
                log.warning("no direct connections at %s: %s", host, error.strerror or error)
                continue
            self._servers.append(server)
            self.port = server.sockets[0].getsockname()[1]

    def expect(self, token: bytes, on_shown: Callable[[Prologue], None]) -> None:
        """Let `on_shown` take over the first connection that shows this token, until `forget`."""
        self._expected[token] = on_shown

    def forget(self, token: bytes) -> None:
        """Accept no connection with `token` any more. Calling it again changes nothing."""
        self._expected.pop(token, None)

    def _came(self, prologue: Prologue) -> None:
        if len(self._groups) == MOST_NOT_SHOWN:
            ((group, _),) = Counter(self._groups.values()).most_common(1)
            self._leave(oldest := next(each for each, of in self._groups.items() if of == group))
            oldest.abort()
        self._groups[prologue] = address_group(f"/ip{6 if ':' in prologue.host else 4}/{prologue.host}")
        self._timers[prologue] = asyncio.get_running_loop().call_later(SHOW_TIMEOUT_S, prologue.abort)

    def _leave(self, prologue: Prologue) -> None:
        if self._groups.pop(prologue, None) is not None:
            self._timers.pop(prologue).cancel()

    def _settled(self, prologue: Prologue) -> None:
        self._leave(prologue)
        token = prologue.shown
        on_shown = None if token is None else self._expected.pop(token, None)
        if on_shown is None:
            prologue.abort()
        else:
            on_shown(prologue)

    def close(self) -> None:
        """Stop listening, and close connections that have not shown a token. Calling it again changes nothing."""
        for server in self._servers:
            server.close()
        self._servers.clear()
        self.port = 0
        for prologue in list(self._groups):
            self._leave(prologue)
            prologue.abort()


class Introducer(Protocol):
    """Interface to p2pd's control (`libp2p/p2pd_control.py`): the members that direct connections use."""

    async def open(self, peer: PeerId, protocol: str, *, timeout_s: float) -> Stream:
        """Open a stream to `peer` within `timeout_s` seconds. Raises PeerLost, NetworkDown."""
        ...

    async def addresses_of(self, peer: PeerId) -> list[str]:
        """Return the multiaddrs at which a peer is connected now. Raises NetworkDown."""
        ...


class DirectConnections:
    """Direct connections of this peer. `serves` returns whether this peer serves a protocol; `on_stream` gets each accepted
    stream."""

    def __init__(self, serves: Callable[[str], bool], on_stream: Callable[[DirectStream], None]) -> None:
        self._serves = serves
        self._on_stream = on_stream
        self._peer_id: PeerId = ""
        self._listener = DirectListener()
        self._backoff = Backoff(
            asyncio.get_running_loop().time, first_s=FIRST_PAUSE_S, ceiling_s=LONGEST_PAUSE_S, forget_s=LONGEST_PAUSE_S
        )
        self._streams: set[DirectStream] = set()

    def __repr__(self) -> str:
        return f"<DirectConnections: {len(self._streams)} open, {self._listener!r}>"

    async def start(self, peer_id: PeerId, addresses: tuple[str, ...]) -> None:
        """Listen on the hosts of p2pd's addresses."""
        self._peer_id = peer_id
        hosts = dict.fromkeys(host for address in addresses if (host := host_of(address)) is not None)
        await self._listener.open(list(hosts))

    def close(self) -> None:
        """Close all connections. Calling it again changes nothing."""
        self._listener.close()
        for stream in list(self._streams):
            stream.drop()

    # -- opening

    async def open(
        self, introducer: Introducer, peer: PeerId, protocol: str, *, timeout_s: float
    ) -> DirectStream | None:
        """Open a stream to a peer; None if there is no direct way to it (it offers none, its port cannot be reached, it is backing
        off), or p2pd does not reach it.

        Raises PeerLost if p2pd reaches the peer but it does not answer in time, NetworkDown if p2pd is gone.
        """
        if self._backoff.pause_s(peer):
            return None
        loop = asyncio.get_running_loop()
        began_s, end_s = loop.time(), loop.time() + timeout_s
        try:
            asking = await introducer.open(peer, PROTOCOL, timeout_s=timeout_s)
        except PeerLost:
            return None
        rtt_s = loop.time() - began_s  # at least one round trip
        try:
            wait_s = min(end_s - loop.time(), ANSWERING.wait_s(rtt_s=rtt_s))
            offer = await self._ask(asking, Occasion(self._peer_id, peer, protocol), wait_s)
            # the IP addresses at which p2pd is connected with the peer without a relay
            direct = (host_of(address) for address in await introducer.addresses_of(peer) if not is_relayed(address))
            hosts = list(dict.fromkeys(filter(None, direct)))[:MAX_HOSTS]
            if offer is None or not hosts:
                return None
            wait_s = min(end_s - loop.time(), DIALLING.wait_s(rtt_s=rtt_s))
            port, agreement = offer
            prologue = None
            with contextlib.suppress(asyncio.TimeoutError):
                prologue = await asyncio.wait_for(_first_to_welcome(hosts, port, agreement), wait_s)
        finally:
            asking.abort()
        if prologue is None:
            log.debug("no direct way to %s for %.0f s", peer, self._backoff.failed(peer))
            return None
        self._backoff.succeeded(peer)
        return self._begin(prologue, peer, protocol, seals=agreement.opener_key, opens=agreement.acceptor_key)

    async def _ask(self, asking: Stream, occasion: Occasion, wait_s: float) -> tuple[int, Agreement] | None:
        """Return the offered port and the agreement; None if the peer offers nothing. Raises PeerLost if it is silent."""
        pair, protocol = KeyPair(), occasion.protocol.encode()
        try:
            asking.write([REQUEST.pack(pair.public, len(protocol)) + protocol])
            offer = await asyncio.wait_for(_read_exactly(asking, OFFER.size), wait_s)
            acceptor_public, port = OFFER.unpack(offer)
            return (port, pair.as_opener(acceptor_public, occasion)) if port >= LOWEST_PORT else None
        except asyncio.TimeoutError:
            raise PeerLost(f"peer {occasion.acceptor} does not answer", peer=occasion.acceptor) from None
        except (PeerLost, ProtocolError):  # p2pd reports late that a peer does not know the protocol
            return None

    # -- accepting

    async def answer(self, asking: Stream) -> None:
        """Answer one question for a direct connection. The offer is valid while its stream is open, at most OFFER_TIMEOUT_S
        seconds.

        Raises PeerLost if the question does not arrive in time, ProtocolError on a bad public key.
        """
        public, size_bytes = REQUEST.unpack(await _in_time(_read_exactly(asking, REQUEST.size), asking.peer))
        name = await _in_time(_read_exactly(asking, size_bytes), asking.peer)
        protocol = name.decode(errors="replace")
        pair = KeyPair()
        if not (self._listener.port and self._serves(protocol)):
            asking.write([OFFER.pack(pair.public, 0)])
            await asking.close()
        else:
            agreement = pair.as_acceptor(public, Occasion(asking.peer, self._peer_id, protocol))
            await self._offer(asking, pair.public, agreement, protocol)

    async def _offer(self, asking: Stream, public: bytes, agreement: Agreement, protocol: str) -> None:
        arrived = asyncio.get_running_loop().create_future()

        def accept(prologue: Prologue) -> None:
            asking.release_place()  # else both streams would count against the peer's limit of half-open ones
            prologue.say(agreement.welcome)
            seals, opens = agreement.acceptor_key, agreement.opener_key
            self._on_stream(self._begin(prologue, asking.peer, protocol, seals=seals, opens=opens))
            arrived.set_result(None)

        self._listener.expect(agreement.token, accept)
        try:
            asking.write([OFFER.pack(public, self._listener.port)])
            await asyncio.wait([arrived], timeout=OFFER_TIMEOUT_S)
        finally:
            self._listener.forget(agreement.token)

    def _begin(self, prologue: Prologue, peer: PeerId, protocol: str, *, seals: bytes, opens: bytes) -> DirectStream:
        stream = DirectStream(peer, protocol, seals=DirectionKey(seals), opens=DirectionKey(opens))
        self._streams.add(stream)
        stream.closed.add_done_callback(lambda _closed: self._streams.discard(stream))
        prologue.hand_over(stream)
        return stream


async def _first_to_welcome(hosts: list[str], port: int, agreement: Agreement) -> Prologue | None:
    """Return a connection on which the peer has shown the agreed welcome; None if there is none."""
    for host in hosts:
        try:
            _, prologue = await asyncio.get_running_loop().create_connection(Prologue, host, port)
        except OSError as error:
            log.debug("no direct connection to %s port %d: %s", host, port, error)
            continue
        try:
            prologue.say(agreement.token)
            if await prologue.word() == agreement.welcome:
                return prologue
        except PeerLost:
            continue
        except BaseException:
            prologue.abort()
            raise
        prologue.abort()
    return None


async def _read_exactly(stream: Stream, size_bytes: int) -> bytes:
    """Read `size_bytes` bytes. Raises PeerLost if the stream ends before."""
    data, filled_bytes = memoryview(bytearray(size_bytes)), 0
    while filled_bytes < size_bytes:
        count = await stream.read_into(data[filled_bytes:])
        if not count:
            raise PeerLost(f"peer {stream.peer} ended the stream", peer=stream.peer)
        filled_bytes += count
    return bytes(data)


async def _in_time(reading: Coroutine[Any, Any, bytes], peer: PeerId) -> bytes:
    """Return the result of `reading`. Raises PeerLost after ASK_TIMEOUT_S seconds."""
    try:
        return await asyncio.wait_for(reading, ASK_TIMEOUT_S)
    except asyncio.TimeoutError:
        raise PeerLost(f"peer {peer} did not complete its question in time", peer=peer) from None
