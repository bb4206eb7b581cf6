"""The network as the rest of swarmnode sees it: streams to peers, and the table (DHT) that all peers keep together.

Two networks implement it, `Engine` (`libp2p/engine.py`) and the fake in virtual time (`memory/network.py`); `tests/conformance`
tests both. Everything is used on one event loop, and nothing here blocks it.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, Union

Buffer = Union[bytes, bytearray, memoryview]
PeerId = str  # base58, as libp2p prints it
READ_BYTES = 64 * 1024
MAX_RECORD_BYTES = 4096


class Stream(ABC):
    """Ordered two-way byte stream to a peer whose id the network has authenticated.

    One reader at a time, and any number of writers. Both sides end it by `close` or `abort`; afterwards only these two may be
    called.

    Attributes:
        peer: Id of the peer at the other end.
        protocol: Name under which the stream was opened.
        group: Group of the peer's address as the network sees it (`addressing/addresses.py`); empty if unknown.
    """

    peer: PeerId
    protocol: str
    group: str = ""

    def let_in(self) -> None:  # noqa: B027  # most streams are not counted
        """Note that the peer that opened the stream has been admitted: the stream no longer counts among those of strangers."""

    def release_place(self) -> None:  # noqa: B027  # as above
        """Note that the stream is about to end, so that it no longer counts against the limit of streams: another one takes its
        place."""

    @abstractmethod
    async def read_into(self, buffer: memoryview) -> int:
        """Wait for bytes, and put those that have arrived at the start of `buffer`.

        Args:
            buffer: Room for at least one byte.

        Returns:
            The number of bytes; 0 at the end of the stream, now and later.

        Raises:
            PeerLost: The stream was reset, or its peer is gone.
            asyncio.CancelledError: No further read may follow: bytes may have been lost with this one.
        """

    async def read(self) -> bytes:
        """Wait for bytes, and return those that have arrived.

        Returns:
            At most 64 KiB; empty at the end of the stream.

        Raises:
            PeerLost: As `read_into`.
        """
        buffer = bytearray(READ_BYTES)
        return bytes(memoryview(buffer)[: await self.read_into(memoryview(buffer))])

    @abstractmethod
    def write(self, buffers: Sequence[Buffer]) -> None:
        """Queue bytes for sending, after those of earlier calls, without waiting.

        Args:
            buffers: Must not be changed from now on.

        Raises:
            PeerLost: The stream is closed. The loss of the peer may show only at `drain` or at a read.
        """

    @property
    @abstractmethod
    def unsent_bytes(self) -> int:
        """Bytes that were written to the stream and that this process has not sent yet."""

    @property
    def receive_bytes(self) -> int:
        """Bytes of memory for receiving: buffers, and data that has not been read yet."""
        return 0

    @abstractmethod
    async def drain(self) -> None:
        """Wait until the send queue is below its high-water mark; without end if the peer takes nothing.

        Raises:
            PeerLost: The stream died meanwhile.
        """

    @abstractmethod
    async def close(self) -> None:
        """Send the queued bytes, then close; the peer reads the end of the stream. Calling it again changes nothing."""

    @abstractmethod
    def abort(self) -> None:
        """Drop the stream at once, unsent bytes included. A pending read ends with 0 or PeerLost. Calling it again changes
        nothing."""


StreamHandler = Callable[[Stream], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Record:
    """Value of one subkey in the DHT; `expires_at` is unix time in seconds."""

    value: bytes
    expires_at: float


Enough = Callable[[bytes, Mapping[bytes, Record]], bool]
"""Function of (key, records found under it) that returns whether no more of the key's keepers need be asked."""


class Dht(Protocol):
    """A Kademlia table of small, signed, expiring records, shared by all peers.

    It holds a record at several peers near its key until the record expires. Nothing is certain: a keeper may be gone, slow or
    lying, so readers check signatures.
    """

    @abstractmethod
    async def store(self, key: bytes, subkey: bytes, value: bytes, *, expires_at: float) -> bool:
        """Store one subkey's value on the peers nearest to the key.

        Args:
            key: Any length; it travels as its digest.
            subkey: Name of the value among the values of the key.
            value: At most MAX_RECORD_BYTES, and accepted by every peer's validator.
            expires_at: Unix time in seconds. Of two values of one subkey the one that expires later is kept.

        Returns:
            Whether another peer took it. False if there is none, its validator refuses the value, the value is too large, or a
            record that expires later is known.

        Raises:
            NetworkDown: This peer is cut off.
        """

    @abstractmethod
    async def get(
        self, keys: Sequence[bytes], *, enough: Enough | None = None
    ) -> Mapping[bytes, Mapping[bytes, Record]]:
        """Look up all subkeys of several keys.

        Args:
            keys: Looked up at the same time.
            enough: With it, the keepers of a key are asked one after another until it returns true, and none if this peer's own
                records are enough. Without it all of them are asked. The records of a single keeper may be some seconds old.

        Returns:
            For each key its records by subkey, the freshest found; empty for a key without records.

        Raises:
            NetworkDown: This peer is cut off.
        """

    @abstractmethod
    async def population(self) -> float:
        """Estimate the number of peers that keep the table, from their density around unpredictable keys.

        Raises:
            NetworkDown: This peer is cut off.
        """


def key_digest(key: bytes) -> bytes:
    """Return the digest of a key under which it travels: 20 bytes, which reveal nothing to a peer that does not know the key."""
    return hashlib.sha1(key, usedforsecurity=False).digest()


RecordValidator = Callable[[bytes, bytes, bytes, float], bool]
"""Function of (digest of the key, subkey, value, expires_at) that returns whether this peer keeps and believes the record. Called
for every record, in and out."""


class Network(Protocol):
    """Presence of one peer on the network, from its start (`Platform.start_network`) to `close`.

    It recovers by itself: after NetworkDown the same network may be back seconds later, with the same id.

    Attributes:
        peer_id: Id of this peer; the hash of its public key.
    """

    peer_id: PeerId

    @property
    @abstractmethod
    def dht(self) -> Dht:
        """Distributed hash table that the peers of the swarm keep together."""

    @abstractmethod
    async def open(self, peer: PeerId, protocol: str, *, timeout_s: float, addresses: Sequence[str] = ()) -> Stream:
        """Open a new stream to a peer, whose handler for the protocol is called.

        Args:
            peer: Any peer that the table, an earlier connection or one of `addresses` leads to.
            protocol: Name of the protocol.
            addresses: Multiaddrs at which the peer says it is, without /p2p/. Some of them are dialled if nothing else leads to it.
            timeout_s: Deadline in seconds for finding, connecting to and reaching the peer.

        Raises:
            PeerLost: The peer is not reached in time, or does not serve the protocol.
            NetworkDown: This peer is cut off.
        """

    @abstractmethod
    async def serve(self, protocol: str, handler: StreamHandler) -> None:
        """Call `handler` for each stream of this protocol that another peer opens from now on.

        Args:
            protocol: Name of the protocol. A later handler replaces an earlier one.
            handler: Runs in a task that the network owns and `close` cancels. The stream ends when it returns.
        """

    @abstractmethod
    async def addresses(self) -> list[str]:
        """Return the multiaddrs, with /p2p/<own id>, at which others may reach this peer now; empty if there is none.

        Raises:
            NetworkDown: This peer is cut off.
        """

    @abstractmethod
    async def connected(self) -> set[PeerId]:
        """Return the peers with a connection to this one now, whoever opened it.

        Raises:
            NetworkDown: This peer is cut off.
        """

    @abstractmethod
    async def visitors(self) -> list[str]:
        """Return the addresses of connected peers that connected by themselves, without a call from this peer or its table.

        Raises:
            NetworkDown: This peer is cut off.
        """

    @abstractmethod
    async def connect(self, addresses: Sequence[str], *, timeout_s: float) -> bool:
        """Try to join through any of these multiaddrs, all at once.

        Args:
            addresses: With /p2p/<id> at their ends.
            timeout_s: Deadline in seconds.

        Returns:
            True once a peer of the table has answered; False if none did in time.

        Raises:
            NetworkDown: This peer is cut off.
        """

    @abstractmethod
    async def close(self) -> None:
        """Leave: close streams, stop handlers, end the p2pd. Calling it again changes nothing."""
