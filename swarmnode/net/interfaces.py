"""The network as the rest of swarmnode knows it: streams to peers, and the table that all peers keep together.

Two networks stand behind it, `Engine` (`libp2p/engine.py`) and the fake of virtual time (`memory/network.py`); `tests/conformance`
holds both to what is promised here. Everything is used on one event loop, and nothing here blocks it.
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
    """One ordered two-way byte stream to a peer whose id the network has authenticated.

    One reader at a time, and any number of writers. Both sides end by `close` or `abort`, after which only these two may be called.

    Attributes:
        peer: Id of the peer at the other end.
        protocol: Name under which the stream was opened.
        group: Group of the peer's address as the network sees it (`limits/address_group.py`); empty if unknown.
    """

    peer: PeerId
    protocol: str
    group: str = ""

    def let_in(self) -> None:  # noqa: B027  # most streams have nobody who counts them
        """Note that the peer that opened the stream has been admitted, so that it no longer counts among strangers."""

    def give_place_up(self) -> None:  # noqa: B027  # as above
        """Note that the stream is about to end, and that another one counts in its stead."""

    @abstractmethod
    async def read_into(self, buffer: memoryview) -> int:
        """Wait for bytes, and put those that have come at the start of `buffer`.

        Args:
            buffer: Room for at least one byte.

        Returns:
            The number of bytes; 0 at the end of the stream, now and later.

        Raises:
            PeerLost: The stream was reset, or its peer is gone.
            asyncio.CancelledError: The read must then be the last one: bytes may have gone with it.
        """

    async def read(self) -> bytes:
        """Wait for bytes, and return those that have come.

        Returns:
            At most 64 KiB; empty at the end of the stream.

        Raises:
            PeerLost: As `read_into`.
        """
        buffer = bytearray(READ_BYTES)
        return bytes(memoryview(buffer)[: await self.read_into(memoryview(buffer))])

    @abstractmethod
    def write(self, buffers: Sequence[Buffer]) -> None:
        """Queue bytes for sending, behind those of earlier calls, without waiting.

        Args:
            buffers: Not to be changed by anybody from now on.

        Raises:
            PeerLost: The stream is closed. That the peer is gone may show only at `drain` or at a read.
        """

    @property
    @abstractmethod
    def unsent_bytes(self) -> int:
        """Bytes that were written, and that this process still holds."""

    @property
    def receive_bytes(self) -> int:
        """Bytes of memory for what comes in before it is read: buffers, and what nobody has taken yet."""
        return 0

    @abstractmethod
    async def drain(self) -> None:
        """Wait until the send queue is below its high-water mark, for as long as the peer takes nothing.

        Raises:
            PeerLost: The stream died meanwhile.
        """

    @abstractmethod
    async def close(self) -> None:
        """Send what is queued, then close; the peer reads the end of the stream. Safe to call twice."""

    @abstractmethod
    def abort(self) -> None:
        """Drop the stream at once, unsent bytes included. A pending read ends, by 0 or PeerLost. Safe to call twice."""


StreamHandler = Callable[[Stream], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Record:
    """One subkey's value as the DHT gave it; `expires_at` is unix time in seconds."""

    value: bytes
    expires_at: float


Enough = Callable[[bytes, Mapping[bytes, Record]], bool]
"""(key, what has been found under it) -> whether no more of its keepers need be asked"""


class Dht(Protocol):
    """A Kademlia table of small, signed, expiring records, shared by all peers.

    It holds a record at several peers near its key until the record expires. Nothing is certain: a peer that keeps a
    record may be gone, and another may be slow or lie; who reads checks signatures.
    """

    @abstractmethod
    async def store(self, key: bytes, subkey: bytes, value: bytes, *, expires_at: float) -> bool:
        """Store one subkey's value on the peers nearest to the key.

        Args:
            key: Any length; it travels as its digest.
            subkey: Under which the value stands beside others of the key.
            value: At most MAX_RECORD_BYTES, and such that every peer's validator believes it.
            expires_at: Unix time in seconds. It decides between two values of one subkey: the later one stands.

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
            keys: Looked up at once.
            enough: With it the keepers of a key are asked one after another until it says so, and none if what this peer keeps
                is enough; without it all of them are asked. What one of them alone says may be some seconds late.

        Returns:
            For each key its records by subkey, the freshest that are known; empty for a key that nobody holds.

        Raises:
            NetworkDown: This peer is cut off.
        """

    @abstractmethod
    async def population(self) -> float:
        """Estimate how many peers keep the table, by how densely they stand around keys that nobody can foresee.

        Raises:
            NetworkDown: This peer is cut off.
        """


def key_digest(key: bytes) -> bytes:
    """A key of the table as it travels: 20 bytes, of which nobody can tell what they stand for who does not know it."""
    return hashlib.sha1(key, usedforsecurity=False).digest()


RecordValidator = Callable[[bytes, bytes, bytes, float], bool]
"""(digest of the key, subkey, value, expires_at) -> whether this peer keeps or believes it there. Called on every record, in and
out."""


class Network(Protocol):
    """One peer's presence on the network, from its start (`Platform.start_network`) to `close`.

    It mends itself: after NetworkDown the same network may be there again seconds later, with the same id.

    Attributes:
        peer_id: Our own id; the hash of our public key.
    """

    peer_id: PeerId

    @property
    @abstractmethod
    def dht(self) -> Dht:
        """The table that all peers of the swarm keep together."""

    @abstractmethod
    async def open(self, peer: PeerId, protocol: str, *, timeout_s: float) -> Stream:
        """Open a new stream to a peer, whose handler for the protocol is called.

        Args:
            peer: Any peer that the table or an earlier connection leads to.
            protocol: Name of the protocol.
            timeout_s: Deadline in seconds to reach the peer, finding and connecting included.

        Raises:
            PeerLost: The peer is not reached in time, or does not serve the protocol.
            NetworkDown: This peer is cut off.
        """

    @abstractmethod
    async def serve(self, protocol: str, handler: StreamHandler) -> None:
        """Call `handler` for each stream of this protocol that another peer opens from now on.

        Args:
            protocol: Name of the protocol. A later handler takes the place of an earlier one.
            handler: Runs in a task that the network owns and `close` cancels. The stream is over when it returns.
        """

    @abstractmethod
    async def addresses(self) -> list[str]:
        """Return the multiaddrs, with /p2p/<our id>, at which others may reach us now; empty if there is none.

        Raises:
            NetworkDown: This peer is cut off.
        """

    @abstractmethod
    async def connected(self) -> set[PeerId]:
        """Return the peers with which there is a connection now, whoever opened it.

        Raises:
            NetworkDown: This peer is cut off.
        """

    @abstractmethod
    async def visitors(self) -> list[str]:
        """Return the addresses of connected peers that came by themselves: neither we called them, nor did the table.

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
            True as soon as one peer of the table answered; False if none did in time.

        Raises:
            NetworkDown: This peer is cut off.
        """

    @abstractmethod
    async def close(self) -> None:
        """Leave: close streams, stop handlers, end the p2pd. Safe to call twice."""
