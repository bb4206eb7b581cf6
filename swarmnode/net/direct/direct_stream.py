"""Stream over a direct TCP connection, in encrypted records (`direct_stream.py`).

Records of a direct connection, and the agreement on the keys that encrypt them.

A record is its length and then that number of bytes, sealed with AES-256-GCM (RFC 5116). The keys follow from an ephemeral key of
each side.

The nonce is the record's number, so a record that is altered, missing, repeated or out of order does not open. An empty record ends
its sender's direction. After `RENEW_AFTER` records both sides take the next key (as TLS 1.3 does, RFC 8446 section 7.2), long
before AES-GCM's bound for one key.
"""

from __future__ import annotations

import asyncio
import struct
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF, HKDFExpand

from swarmnode.errors import PeerLost, ProtocolError
from swarmnode.net.interfaces import Buffer, PeerId
from swarmnode.net.transport_stream import CLOSE_TIMEOUT_S, TransportStream

HEAD = struct.Struct("<I")
TAG_BYTES = 16
MAX_CONTENT_BYTES = 64 * 1024
MAX_RECORD_BYTES = HEAD.size + MAX_CONTENT_BYTES + TAG_BYTES
READ_BYTES = 4 * MAX_RECORD_BYTES  # per read: each read costs Python more than opening a record
NONCE_BYTES = 12
RENEW_AFTER = 1 << 22  # records: 256 GiB
NEXT_KEY = b"swarmnode direct 1 next key"
PUBLIC_KEY_BYTES = 32
TOKEN_BYTES = 16
KEY_BYTES = 32
LABEL = b"swarmnode direct 1"


@dataclass(frozen=True)
class Occasion:
    """Purpose of a connection: a stream of `protocol` that `opener` opens to `acceptor`."""

    opener: PeerId
    acceptor: PeerId
    protocol: str


@dataclass(frozen=True, repr=False)
class Agreement:
    """Secrets of one connection. The opener shows `token`, the acceptor answers with `welcome`, once each."""

    token: bytes
    welcome: bytes
    opener_key: bytes  # seals the records that the opener sends
    acceptor_key: bytes


class KeyPair:
    """X25519 key pair of one side, made for one connection."""

    def __init__(self, private: bytes | None = None) -> None:
        self._private = X25519PrivateKey.generate() if private is None else X25519PrivateKey.from_private_bytes(private)
        self.public: bytes = self._private.public_key().public_bytes_raw()

    def as_opener(self, acceptor_public: bytes, occasion: Occasion) -> Agreement:
        """Return the keys agreed with the acceptor of the connection. Raises ProtocolError if its public key gives no shared
        secret."""
        return self._agree(acceptor_public, occasion, self.public + acceptor_public)

    def as_acceptor(self, opener_public: bytes, occasion: Occasion) -> Agreement:
        """Return the keys agreed with the opener of the connection. Raises ProtocolError if its public key gives no shared
        secret."""
        return self._agree(opener_public, occasion, opener_public + self.public)

    def _agree(self, theirs: bytes, occasion: Occasion, both_public: bytes) -> Agreement:
        try:
            secret = self._private.exchange(X25519PublicKey.from_public_bytes(theirs))
        except ValueError as error:  # a point of low order
            raise ProtocolError(f"its public key gives no shared secret: {error}") from error
        names = "\0".join((occasion.opener, occasion.acceptor, occasion.protocol)).encode()
        info = b"\0".join((LABEL, names, both_public))
        derived = HKDF(SHA256(), 2 * TOKEN_BYTES + 2 * KEY_BYTES, salt=None, info=info).derive(secret)
        keys_at = 2 * TOKEN_BYTES
        return Agreement(
            token=derived[:TOKEN_BYTES],
            welcome=derived[TOKEN_BYTES:keys_at],
            opener_key=derived[keys_at : keys_at + KEY_BYTES],
            acceptor_key=derived[keys_at + KEY_BYTES :],
        )


class DirectionKey:
    """Key for the records of one direction, and the number of its next record."""

    def __init__(self, key: bytes, *, renew_after: int = RENEW_AFTER) -> None:
        self._key = key
        self._cipher = AESGCM(key)
        self._number = 0
        self._renew_after = renew_after

    def seal(self, content: Buffer) -> tuple[bytes, bytes]:
        """Return the (head, sealed contents) of the next record; `content` has at most MAX_CONTENT_BYTES."""
        head = HEAD.pack(len(content) + TAG_BYTES)
        return head, self._cipher.encrypt(self._nonce(), content, head)

    def open(self, head: Buffer, sealed: Buffer) -> bytes:
        """Return the contents of the next record. Raises ProtocolError if it was altered or is out of order."""
        try:
            return self._cipher.decrypt(self._nonce(), sealed, head)
        except InvalidTag:
            raise ProtocolError("a record was altered or is out of order") from None

    def _nonce(self) -> bytes:
        if self._number == self._renew_after:
            self._key = HKDFExpand(SHA256(), KEY_BYTES, NEXT_KEY).derive(self._key)
            self._cipher, self._number = AESGCM(self._key), 0
        nonce = self._number.to_bytes(NONCE_BYTES, "little")
        self._number += 1
        return nonce


class RecordReader:
    """Reader that takes bytes as they arrive, at `room`, and gives the contents of complete records."""

    def __init__(self, key: DirectionKey) -> None:
        self._key = key
        self._data = memoryview(bytearray(READ_BYTES))
        self._filled_bytes = 0

    def room(self) -> memoryview:
        """Return the buffer for the next bytes, never empty."""
        return self._data[self._filled_bytes :]

    def advance(self, count: int) -> Iterator[bytes]:
        """Take `count` bytes put into `room`, and yield the contents of the records that they complete. Raises ProtocolError on a
        bad record."""
        self._filled_bytes += count
        start = 0
        while (end := self._end_of_record(start)) is not None:
            yield self._key.open(self._data[start : start + HEAD.size], self._data[start + HEAD.size : end])
            start = end
        if start:
            rest = bytes(self._data[start : self._filled_bytes])
            self._data[: len(rest)] = rest
            self._filled_bytes = len(rest)

    def _end_of_record(self, start: int) -> int | None:
        """Return the end of the record that begins at `start`; None if it is incomplete. Raises ProtocolError on a bad length."""
        if self._filled_bytes - start < HEAD.size:
            return None
        (sealed_bytes,) = HEAD.unpack_from(self._data, start)
        if not TAG_BYTES <= sealed_bytes <= MAX_CONTENT_BYTES + TAG_BYTES:
            raise ProtocolError(f"a record of {sealed_bytes} bytes is out of bounds")
        end: int = start + HEAD.size + sealed_bytes
        return end if end <= self._filled_bytes else None


def contents(buffers: Sequence[Buffer]) -> Iterator[Buffer]:
    """Yield the buffers as contents of records: small ones joined, large ones in pieces without a copy."""
    small, small_bytes = [], 0
    for buffer in buffers:
        if len(buffer) + small_bytes <= MAX_CONTENT_BYTES:
            small.append(buffer)
            small_bytes += len(buffer)
            continue
        if small_bytes:
            yield b"".join(small)
        view = memoryview(buffer)
        whole_bytes = len(view) - len(view) % MAX_CONTENT_BYTES
        yield from (view[at : at + MAX_CONTENT_BYTES] for at in range(0, whole_bytes, MAX_CONTENT_BYTES))
        small, small_bytes = [view[whole_bytes:]], len(view) - whole_bytes
    if small_bytes:
        yield b"".join(small) if len(small) > 1 else small[0]


MAX_UNREAD_BYTES = 256 * 1024  # beyond this the sender has to wait; one read may exceed it by its records
LINGER_S = 2.0  # for the peer to end its direction after this side has ended its own


class DirectStream(TransportStream, asyncio.BufferedProtocol):
    """Stream of bytes to and from a peer. Bytes are sealed only as the transport takes them, so that few are held twice."""

    def __init__(self, peer: PeerId, protocol: str, *, seals: DirectionKey, opens: DirectionKey) -> None:
        super().__init__()
        self.peer, self.protocol = peer, protocol
        self._seals = seals
        self._records = RecordReader(opens)
        self._unsealed: deque[Buffer] = deque()
        self._unsealed_bytes = 0
        self._unread: deque[memoryview] = deque()
        self._unread_bytes = 0
        self._reader: asyncio.Future[None] | None = None
        self._closing = False  # closed by this side: nothing more is written, and arriving data is dropped
        self._linger: asyncio.TimerHandle | None = None

    def __repr__(self) -> str:
        return f"<DirectStream {self.protocol} to {self.peer} {self._state}, {self._unread_bytes} bytes unread>"

    # -- asyncio's side

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._records.room()

    def buffer_updated(self, nbytes: int) -> None:
        try:
            arrived = list(self._records.advance(nbytes))
        except ProtocolError as error:
            self._lost = error
            self.drop()
            return
        for content in arrived:
            if not content:
                self._ended = True
            elif not (self._ended or self._closing):
                self._unread.append(memoryview(content))
                self._unread_bytes += len(content)
        if self._unread_bytes >= MAX_UNREAD_BYTES:
            self._pause_reading()
        self._wake_reader()

    def eof_received(self) -> bool:
        if not self._ended:
            self._lost = EOFError("cut short")
        return self._ended and self._linger is None  # the own direction stays open until `close`

    def connection_lost(self, error: Exception | None) -> None:
        super().connection_lost(error)
        if self._linger is not None:
            self._linger.cancel()
        self._wake_reader()

    def resume_writing(self) -> None:
        waiting, self._writable = self._writable, None
        self._seal()
        if self._writable is not None:  # paused again: `drain` goes on waiting
            self._writable = waiting
        elif waiting is not None and not waiting.done():
            waiting.set_result(None)

    # -- reading

    def _wake_reader(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    async def read_into(self, buffer: memoryview) -> int:
        while not (self._unread or self._ended or self._closing):
            self._reader = self._loop.create_future()
            await self._reader
        if self._unread:
            taken = 0
            while self._unread and taken < len(buffer):
                piece = self._unread.popleft()
                count = min(len(piece), len(buffer) - taken)
                buffer[taken : taken + count] = piece[:count]
                taken += count
                if count < len(piece):
                    self._unread.appendleft(piece[count:])
            self._unread_bytes -= taken
            if self._unread_bytes < MAX_UNREAD_BYTES:
                self._read_on()
            return taken
        if self._lost is not None:
            raise PeerLost(f"the stream to peer {self.peer} was reset: {self._lost}", peer=self.peer)
        return 0

    @property
    def receive_bytes(self) -> int:
        return READ_BYTES + self._unread_bytes

    # -- writing

    def write(self, buffers: Sequence[Buffer]) -> None:
        if self._closing:
            raise PeerLost(f"the stream to peer {self.peer} is closed", peer=self.peer)
        self._open_transport()
        for content in contents(buffers):
            self._unsealed.append(content)
            self._unsealed_bytes += len(content)
        self._seal()

    def _seal(self) -> None:
        transport = self._transport
        while self._unsealed and self._writable is None and transport is not None:
            content = self._unsealed.popleft()
            self._unsealed_bytes -= len(content)
            transport.writelines(self._seals.seal(content))

    @property
    def unsent_bytes(self) -> int:
        return self._unsealed_bytes + super().unsent_bytes

    # -- the end

    async def close(self) -> None:
        """Send the end of the stream and close.

        Data from the peer is taken and dropped for a while: a connection that is closed with bytes unread is reset, and a reset
        overtakes the last bytes sent.
        """
        if self._transport is None or self._closing:
            return
        self._closing = True
        self._unread.clear()
        self._unread_bytes = 0
        self._read_on()
        self._wake_reader()
        self._unsealed.append(b"")  # the end
        self._transport.set_write_buffer_limits(high=0)
        self._seal()
        try:
            await asyncio.wait_for(self.drain(), CLOSE_TIMEOUT_S)
        except (PeerLost, asyncio.TimeoutError):
            self.drop()
        else:
            if self._transport.is_closing():  # the peer reset the connection after the last bytes
                return
            self._linger = self._loop.call_later(LINGER_S, self.drop)
            try:
                self._transport.write_eof()
            except OSError:  # the peer's reset is here already, but the loop has not read it
                self.drop()
                return
            if self._ended:
                self._transport.close()

    def abort(self) -> None:
        """Drop the stream, unless it was closed and waits only for the peer's end."""
        if self._linger is None:
            self.drop()

    def drop(self) -> None:
        """Close the connection at once, whatever it waits for."""
        super().abort()
