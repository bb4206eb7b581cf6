"""Questions to a running p2pd, and the streams that it opens or hands over; each has a unix connection of its own.

A message is a protobuf after its length as a varint (go-libp2p-daemon, specs/CONTROL.md).

Peers as p2pd names them: their ids as text and as bytes, and their address groups.

Both are cached: base58 is slow in Python, a question to p2pd is slower, and a node meets the same peers again.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from multiaddr import Multiaddr

from swarmnode.errors import LocalError, NetworkDown, PeerLost, ProtocolError
from swarmnode.net.addressing.addresses import address_group, is_relayed, without_peer
from swarmnode.net.fair_share import Recent
from swarmnode.net.interfaces import Buffer, PeerId
from swarmnode.net.libp2p.from_hivemind import HivemindMultiaddr, PeerID, p2pd_pb2
from swarmnode.net.transport_stream import CLOSE_TIMEOUT_S, TransportStream

SHA_256_HEAD, SHA_256_BYTES = b"\x12\x20", 32  # multihash: code and length before the digest
MAX_INLINE_KEY_BYTES = 42  # libp2p hashes the ids of longer public keys
MOST_IDS, MOST_GROUPS = 4096, 8192  # entries in the caches

Connected = Callable[[], Awaitable[Mapping[PeerId, Sequence[str]]]]
"""Function that returns the connected peers and their multiaddrs. Raises NetworkDown."""


class AddressGroups:
    """Address groups of the latest MOST_GROUPS peers, each as p2pd told it last. p2pd is asked only about peers that are not
    known; callers at the same time share one question."""

    def __init__(self, connected: Connected) -> None:
        self._connected = connected
        self._groups: Recent[PeerId, str] = Recent(MOST_GROUPS)
        self._asking: asyncio.Task[None] | None = None

    def of(self, peer: PeerId) -> str:
        """Return the group of a peer; its id if the group is not known."""
        return self._groups.get(peer, peer)

    async def learn(self, peer: PeerId) -> str:
        """Return the group of a connected peer, asking p2pd if needed; its id if the peer is not connected or p2pd is gone."""
        if peer not in self._groups:
            if self._asking is None or self._asking.done():
                self._asking = asyncio.create_task(self._ask(), name="address groups")
            await asyncio.shield(self._asking)
        return self.of(peer)

    async def _ask(self) -> None:
        try:
            connected = await self._connected()
        except NetworkDown:
            return
        for peer, addresses in connected.items():
            direct = [address for address in addresses if not is_relayed(address)]
            self._groups[peer] = address_group((direct or list(addresses) or [""])[0]) or peer


def peer_name(raw: bytes) -> PeerId:
    """Return the bytes of a peer id as text; empty if they are no peer id."""
    return _name(raw) if _is_peer_id(raw) else ""  # strangers send them: others do not enter the cache


def _is_peer_id(raw: bytes) -> bool:
    """Return whether the bytes are a multihash as libp2p makes it of a public key: the short key itself, or its SHA-256."""
    if raw[:2] == SHA_256_HEAD:
        return len(raw) == 2 + SHA_256_BYTES
    return raw[:1] == b"\0" and 2 < len(raw) == 2 + raw[1] <= 2 + MAX_INLINE_KEY_BYTES


@lru_cache(MOST_IDS)
def _name(raw: bytes) -> PeerId:
    name: PeerId = PeerID(raw).to_base58()
    return name


@lru_cache(MOST_IDS)
def hivemind_id(peer: PeerId) -> PeerID:
    """Return the peer id as hivemind's object. Raises PeerLost if it is no peer id."""
    try:
        return PeerID.from_base58(peer)
    except ValueError as error:
        raise PeerLost(f"{peer!r} is not a peer id", peer=peer) from error


def peer_bytes(peer: PeerId) -> bytes:
    """Return the bytes of a peer id; the inverse of `peer_name`. Raises PeerLost if it is no peer id."""
    raw: bytes = hivemind_id(peer).to_bytes()
    return raw


MAX_ANSWER_BYTES = 4 << 20  # some 60 bytes per address of a connection; a bootstrap peer has thousands
MAX_VARINT_BYTES = 10
MOST_TEXTS = 1024  # cached addresses: the same peers are connected each time
PIECE_BYTES = 1 << 20  # p2pd is slower with larger writes
STAGING_BYTES = 16 * 1024
MAX_PREAMBLE_BYTES = STAGING_BYTES

Request = p2pd_pb2.Request


class SocketStream(TransportStream, asyncio.BufferedProtocol):
    """Stream of bytes to and from a peer. `preamble` is the daemon's length-prefixed message before them.

    The socket is read straight into the buffer of a waiting `read_into`. Without one, data goes into a staging buffer; when that is
    full the peer has to wait.
    """

    def __init__(self, on_preamble: Callable[[SocketStream, bytes], None] = lambda _stream, _preamble: None) -> None:
        super().__init__()
        self._on_preamble = on_preamble
        self._preamble: asyncio.Future[bytes] = self._loop.create_future()
        self._staging = memoryview(bytearray(STAGING_BYTES))
        self._staged_bytes = 0
        self._target: memoryview | None = None  # the buffer of a waiting `read_into`
        self._reader: asyncio.Future[int] | None = None

    def __repr__(self) -> str:
        return f"<SocketStream {self.protocol} to {self.peer} {self._state}, {self._staged_bytes} bytes unread>"

    # -- asyncio's side

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._staging[self._staged_bytes :] if self._target is None else self._target

    def buffer_updated(self, nbytes: int) -> None:
        if self._target is not None:
            self._wake_reader(nbytes)
            return
        self._staged_bytes += nbytes
        if not self._preamble.done():
            data = bytes(self._staging[: self._staged_bytes])
            length, start = read_varint(data)
            if length > MAX_PREAMBLE_BYTES - start:
                self._preamble.set_exception(ProtocolError("p2pd sent a message that is too large"))
            elif start and len(data) >= start + length:
                rest = data[start + length :]
                self._staged_bytes = len(rest)
                self._staging[: len(rest)] = rest
                preamble = data[start : start + length]
                self._preamble.set_result(preamble)
                self._on_preamble(self, preamble)
        if self._staged_bytes == STAGING_BYTES:
            self._pause_reading()

    def eof_received(self) -> bool:
        self._ended = True
        self._wake_reader(0)
        return True  # the other direction stays open until `close`

    def connection_lost(self, error: Exception | None) -> None:
        super().connection_lost(error)
        if not self._preamble.done():
            self._preamble.set_exception(PeerLost("p2pd closed the connection"))
            self._preamble.exception()  # marks it as retrieved: `preamble` may have no caller
        self._wake_reader(0)

    def _wake_reader(self, count: int) -> None:
        self._target = None
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(count)

    # -- the daemon's preamble

    async def preamble(self) -> bytes:
        """Return the daemon's message; to be called once. Raises PeerLost if the daemon closes instead, ProtocolError if the
        message is too large."""
        return await self._preamble

    # -- the peer's bytes

    async def read_into(self, buffer: memoryview) -> int:
        if not self._staged_bytes and not self._ended:
            self._target = buffer
            self._reader = self._loop.create_future()
            try:
                count = await self._reader
            finally:
                self._target = None
            if count:
                return count
        if self._staged_bytes:
            count = min(len(buffer), self._staged_bytes)
            buffer[:count] = self._staging[:count]
            self._staged_bytes -= count
            self._staging[: self._staged_bytes] = self._staging[count : count + self._staged_bytes]
            self._read_on()
            return count
        if self._lost is not None:
            raise PeerLost(f"the stream to peer {self.peer} was reset", peer=self.peer)
        return 0

    @property
    def receive_bytes(self) -> int:
        return STAGING_BYTES

    def write(self, buffers: Sequence[Buffer]) -> None:
        transport = self._open_transport()
        pieces: list[Buffer] = []
        for buffer in buffers:
            if len(buffer) <= PIECE_BYTES:
                pieces.append(buffer)
            else:
                view = memoryview(buffer)
                pieces.extend(view[start : start + PIECE_BYTES] for start in range(0, len(view), PIECE_BYTES))
        transport.writelines(pieces)

    async def close(self) -> None:
        if self._transport is None:
            return
        self._transport.close()
        await asyncio.wait([self.closed], timeout=CLOSE_TIMEOUT_S)
        self._transport.abort()  # drops what the peer has not taken


def read_varint(data: bytes) -> tuple[int, int]:
    """Return the (value, bytes used) of the unsigned LEB128 number at the start of `data`; (0, 0) if it is incomplete."""
    value = shift = 0
    for position, byte in enumerate(data[:MAX_VARINT_BYTES]):
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position + 1
        shift += 7
    return 0, 0


def write_varint(value: int) -> bytes:
    """Return `value` in unsigned LEB128 encoding."""
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


class P2pdControl:
    """Questions to p2pd. All raise NetworkDown if p2pd does not answer, ProtocolError if its answer is too large."""

    def __init__(self, socket: Path) -> None:
        self.socket = socket

    async def identify(self) -> tuple[PeerId, list[str]]:
        """Return this peer's id and the multiaddrs at which it may be reached now."""
        answer = await self._ask(Request(type=Request.IDENTIFY))
        return peer_name(answer.identify.id), _texts(answer.identify.addrs)

    async def connect(self, peer: PeerId, *addresses: str, timeout_s: float) -> None:
        """Dial the addresses until this peer answers at one of them. Raises PeerLost if it answers at none."""
        target = peer_bytes(peer)
        places = [Multiaddr(without_peer(address)).to_bytes() for address in addresses]
        connect = p2pd_pb2.ConnectRequest(peer=target, addrs=places, timeout=math.ceil(timeout_s))
        answer = await self._ask(Request(type=Request.CONNECT, connect=connect))
        if answer.type != p2pd_pb2.Response.OK:
            tried = " or ".join(addresses)
            raise PeerLost(f"peer {peer} cannot be reached at {tried}: {_reason(answer)}", peer=peer)

    async def connected(self) -> dict[PeerId, list[str]]:
        """Return the connected peers and the multiaddrs of their connections."""
        connected: dict[PeerId, list[str]] = {}
        for connection in await self._connections():
            connected.setdefault(peer_name(connection.id), []).extend(_texts(connection.addrs))
        return connected

    async def addresses_of(self, peer: PeerId) -> list[str]:
        """Return the multiaddrs of the connections with one peer; empty if there is none."""
        wanted = peer_bytes(peer)
        return [text for each in await self._connections() if each.id == wanted for text in _texts(each.addrs)]

    async def _connections(self) -> Any:
        return (await self._ask(Request(type=Request.LIST_PEERS))).peers

    async def disconnect(self, peer: PeerId) -> None:
        """Close all connections with a peer, if there are any."""
        disconnect = p2pd_pb2.DisconnectRequest(peer=peer_bytes(peer))
        await self._ask(Request(type=Request.DISCONNECT, disconnect=disconnect))

    async def serve(self, protocol: str, inbox: Path) -> None:
        """Let p2pd connect to the unix socket `inbox` for each incoming stream of the protocol. Raises LocalError if it refuses."""
        # py-multiaddr drops the leading slash of a unix path, hivemind's own keeps it
        place = HivemindMultiaddr(f"/unix{inbox}").to_bytes()
        handler = p2pd_pb2.StreamHandlerRequest(addr=place, proto=[protocol], balanced=False)
        answer = await self._ask(Request(type=Request.STREAM_HANDLER, streamHandler=handler))
        if answer.type != p2pd_pb2.Response.OK:
            raise LocalError(f"p2pd refused the protocol {protocol}: {_reason(answer)}; start the node again")

    async def open(self, peer: PeerId, protocol: str, *, timeout_s: float) -> SocketStream:
        """Open a stream to a peer. Raises PeerLost if it is not reached within `timeout_s` seconds or does not serve the
        protocol."""
        opening = p2pd_pb2.StreamOpenRequest(peer=peer_bytes(peer), proto=[protocol], timeout=math.ceil(timeout_s))
        question = self._exchange(Request(type=Request.STREAM_OPEN, streamOpen=opening))
        try:
            stream, answer = await asyncio.wait_for(question, timeout_s)
        except asyncio.TimeoutError:
            raise PeerLost(f"peer {peer} cannot be reached within {timeout_s:.0f} s", peer=peer) from None
        if answer.type != p2pd_pb2.Response.OK:
            stream.abort()
            raise PeerLost(f"peer {peer} cannot be reached: {_reason(answer)}", peer=peer)
        stream.peer, stream.protocol = peer, protocol
        return stream

    async def _ask(self, request: Any) -> Any:
        """Return the answer to a request. Raises NetworkDown if p2pd is gone, ProtocolError if the answer is too large."""
        with _reached():
            reader, writer = await asyncio.open_unix_connection(str(self.socket))
        try:
            writer.write(_framed(request))
            answer = p2pd_pb2.Response()
            head = b""  # the length, as a varint
            while not head or (head[-1] & 0x80 and len(head) < MAX_VARINT_BYTES):
                head += await reader.readexactly(1)
            length, used_bytes = read_varint(head)
            if not used_bytes or length > MAX_ANSWER_BYTES:
                raise ProtocolError("p2pd sent a message that is too large")
            answer.ParseFromString(await reader.readexactly(length))
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            raise NetworkDown("p2pd ended before it answered; the node starts it again") from error
        finally:
            writer.transport.abort()
        return answer

    async def _exchange(self, request: Any) -> tuple[SocketStream, Any]:
        """Send a request on a new connection, which becomes the stream asked for; return the connection and the answer. Raises
        NetworkDown if p2pd is gone."""
        loop = asyncio.get_running_loop()
        with _reached():
            _, stream = await loop.create_unix_connection(SocketStream, str(self.socket))
        try:
            stream.write([_framed(request)])
            answer = p2pd_pb2.Response()
            answer.ParseFromString(await stream.preamble())
        except PeerLost as error:
            raise NetworkDown("p2pd ended before it answered; the node starts it again") from error
        except BaseException:
            stream.abort()
            raise
        return stream, answer


class Inbox:
    """Unix socket that p2pd connects to for each incoming stream."""

    def __init__(self, path: Path, on_stream: Callable[[SocketStream], None]) -> None:
        self.path = path
        self._on_stream = on_stream
        self._server: asyncio.AbstractServer | None = None

    async def open(self) -> None:
        """Listen; from now on p2pd can hand streams over."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_unix_server(lambda: SocketStream(self._arrived), str(self.path))

    def _arrived(self, stream: SocketStream, preamble: bytes) -> None:
        info = p2pd_pb2.StreamInfo()
        info.ParseFromString(preamble)
        stream.peer, stream.protocol = peer_name(info.peer), info.proto
        self._on_stream(stream)

    def close(self) -> None:
        """Stop listening; open streams stay open. Calling it again changes nothing."""
        if self._server is not None:
            self._server.close()
            self._server = None


@contextlib.contextmanager
def _reached() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise NetworkDown(f"p2pd does not answer: {error.strerror or error}") from error


def _framed(request: Any) -> bytes:
    data: bytes = request.SerializeToString()
    return write_varint(len(data)) + data


def _texts(addresses: Iterable[bytes]) -> list[str]:
    return list(map(_text, addresses))


@lru_cache(MOST_TEXTS)
def _text(address: bytes) -> str:
    return str(Multiaddr(address))


def _reason(answer: Any) -> str:
    text: str = answer.error.msg
    return text.partition("\n")[0].replace("failed to dial: failed to dial", "failed to dial")  # libp2p says it twice
