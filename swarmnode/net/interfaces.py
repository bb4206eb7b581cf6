"""What the rest of swarmnode knows of a network. Two things stand behind it: the engine (`engine.py`) and the fake
(`network.py`)."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Union

Buffer = Union[bytes, bytearray, memoryview]
PeerId = str  # base58, as libp2p prints it
READ_BYTES = 64 * 1024
MAX_RECORD_BYTES = 4096


class Stream(ABC):
    """One ordered two-way byte stream to a peer whose id the network has authenticated."""

    peer: PeerId
    protocol: str
    group: str = ""  # of the peer's address, as the network sees it (`limits/address_group.py`)

    def let_in(self) -> None:  # noqa: B027  # most streams have nobody who counts them
        """The peer that opened it has been admitted: it is no stranger's any more."""

    def give_place_up(self) -> None:  # noqa: B027  # as above
        """It is about to end, and another one counts in its stead."""

    @abstractmethod
    async def read_into(self, buffer: memoryview) -> int:
        """Put the next bytes at the start of `buffer`, as they come; how many, 0 at the end of the stream.

        Raises PeerLost on a reset. A read that is cancelled must be the last one: bytes may have gone with it.
        """

    async def read(self) -> bytes:
        """The next bytes as they come, at most 64 KiB; empty at the end of the stream. Raises PeerLost on a reset."""
        buffer = bytearray(READ_BYTES)
        return bytes(memoryview(buffer)[: await self.read_into(memoryview(buffer))])

    @abstractmethod
    def write(self, buffers: Sequence[Buffer]) -> None:
        """Queue bytes for sending, in order, without waiting. Raises PeerLost on a stream that is closed."""

    @property
    @abstractmethod
    def unsent_bytes(self) -> int:
        """Written, and still held by this process."""

    @property
    def receive_bytes(self) -> int:
        """Of memory for what comes in, before it is read: buffers, and what nobody has taken yet."""
        return 0

    @abstractmethod
    async def drain(self) -> None:
        """Wait until the send queue is below its high-water mark. Raises PeerLost where the stream died meanwhile."""

    @abstractmethod
    async def close(self) -> None:
        """Flush and close; the peer reads the end of the stream. Safe to call twice."""

    @abstractmethod
    def abort(self) -> None:
        """Drop the stream at once, unsent bytes included."""


StreamHandler = Callable[[Stream], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Record:
    """One subkey's value as the DHT gave it; `expires_at` is unix time in seconds."""

    value: bytes
    expires_at: float


Enough = Callable[[bytes, Mapping[bytes, Record]], bool]
"""(key, what has been found under it) -> whether no more of its keepers need be asked"""


class Dht(ABC):
    """A Kademlia table of small, signed, expiring records, shared by all peers."""

    @abstractmethod
    async def store(self, key: bytes, subkey: bytes, value: bytes, *, expires_at: float) -> bool:
        """Store one subkey's value on the nearest peers. False where no peer but ourselves took it: nobody else is there,
        its validator refuses it, it is over MAX_RECORD_BYTES, or a record that expires later is known."""

    @abstractmethod
    async def get(
        self, keys: Sequence[bytes], *, enough: Enough | None = None
    ) -> Mapping[bytes, Mapping[bytes, Record]]:
        """The subkeys of several keys, freshest known; a key that nobody holds gives an empty mapping.

        All keepers of a key are asked; with `enough` one after another, and nobody where this peer itself keeps enough. What one of
        them alone says may be some seconds late.
        """

    @abstractmethod
    async def population(self) -> float:
        """About how many peers keep the table, by how densely they stand around keys that nobody can foresee."""


def key_digest(key: bytes) -> bytes:
    """A key of the table as it travels: 20 bytes, of which nobody can tell what they stand for who does not know it."""
    return hashlib.sha1(key, usedforsecurity=False).digest()


RecordValidator = Callable[[bytes, bytes, bytes, float], bool]
"""(digest of the key, subkey, value, expires_at) -> whether this peer keeps or believes it there. Called on every record, in and
out."""


class Network(ABC):
    """One peer's presence on the network, from `start` to `close`."""

    peer_id: PeerId

    @property
    @abstractmethod
    def dht(self) -> Dht:
        """The table that all peers of the swarm keep together."""

    @abstractmethod
    async def open(self, peer: PeerId, protocol: str, *, timeout_s: float) -> Stream:
        """A new stream to a peer. Raises PeerLost where it cannot be reached in time, NetworkDown where we are cut off."""

    @abstractmethod
    async def serve(self, protocol: str, handler: StreamHandler) -> None:
        """Call `handler` for each incoming stream of this protocol, each in a task that the network owns."""

    @abstractmethod
    async def addresses(self) -> list[str]:
        """Multiaddrs with /p2p/<our id> at which others may reach us now."""

    @abstractmethod
    async def connected(self) -> set[PeerId]:
        """The peers that there is a connection with now, whoever opened it. Raises NetworkDown."""

    @abstractmethod
    async def visitors(self) -> list[str]:
        """Where the connected peers are that came by themselves: nobody here called them, nor did the DHT. Raises NetworkDown."""

    @abstractmethod
    async def connect(self, addresses: Sequence[str], *, timeout_s: float) -> bool:
        """Try to join through any of these multiaddrs, all at once; True as soon as one peer of the DHT answered."""

    @abstractmethod
    async def close(self) -> None:
        """Leave: close streams, stop handlers, end the p2pd. Safe to call twice."""
