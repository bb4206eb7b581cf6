"""Server of file chunks. It answers the requests of one peer one after another, and those of at most `PEERS_AT_ONCE` peers
at once.

Seeder: it serves the manifest and this machine's weights to any peer that asks (`protocol/records.md`, "Fetching").
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType

from swarmnode.codec.body import Body
from swarmnode.codec.frames import Frame
from swarmnode.codec.messages import Chunk, Error, GetChunks, GetManifest, ManifestReply
from swarmnode.errors import ErrorCode, PeerError, ProtocolError
from swarmnode.links.switchboard import Channel, Switchboard
from swarmnode.net.interfaces import PeerId
from swarmnode.net.tasks import Tasks
from swarmnode.peer.host import MANIFEST_PROTOCOL
from swarmnode.peer.questions import LocalPeer
from swarmnode.swarm.storage.chunk_folder import HAVE, ChunkFolder, WeightCache
from swarmnode.swarm.storage.content import CHUNK_BYTES, FileContent, fault_of_size, matching_hashes
from swarmnode.swarm.storage.swarmfile import Swarm

log = logging.getLogger(__name__)

REQUESTS_PER_PEER = 16  # open at once; they are answered one after another, so that a peer costs one chunk of memory
PEERS_AT_ONCE = 64  # with open requests; further peers get BUSY
BUSY_RETRY_S = 2.0


Stamp = tuple[int, int, int]
"""Inode, size and time of the last change of a file"""


def _stamp(stat: os.stat_result) -> Stamp:
    return stat.st_ino, stat.st_size, stat.st_mtime_ns


@dataclass(frozen=True)
class Offer:
    """A file on offer: the whole file at `path`, or, with a `cache`, the chunks of it that the cache holds."""

    file: FileContent
    path: Path
    cache: ChunkFolder | None = None


@dataclass
class Asker:
    """A peer with open requests: their number, and the lock that serialises them."""

    open: int = 0
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)


class ChunkServer:
    """Server of files by their root hashes. Chunks are sent as they are on the disk: the receiver verifies them.

    A whole file that was written to after it was hashed is hashed again before a chunk is sent, and withdrawn if it differs.

    A subclass names further question types in `questions` and answers them in `_send`.
    """

    questions: tuple[type[Body], ...] = ()

    def __init__(self, peer: LocalPeer, protocols: Sequence[str]) -> None:
        self._offers: dict[bytes, Offer] = {}  # by root
        self._hashes: dict[bytes, bytes] = {}  # chunk hashes of whole files, by root
        self._stamps: dict[bytes, Stamp] = {}  # of whole files when they were hashed, by root
        self.on_withdraw: Callable[[], None] = lambda: None
        """Function that is called after a file was withdrawn"""
        self._hashing: dict[bytes, asyncio.Task[bytes | None]] = {}
        self._askers: dict[PeerId, Asker] = {}
        self._tasks = Tasks(type(self).__name__, on_crash=peer.link_config.supervisor.ends_conversation)
        bare = replace(peer.link_config, max_payload_bytes=0)  # questions carry no payload
        self._boards = [
            Switchboard(peer.network, protocol, peer.hello, bare, accept=self._accept) for protocol in protocols
        ]

    async def serve(self) -> None:
        """Start answering other peers' requests for chunks of weights."""
        for board in self._boards:
            await board.start()

    async def close(self) -> None:
        """Stop answering other peers' requests for chunks."""
        await self._tasks.close()
        for board in self._boards:
            await board.close()

    def _accept(self, channel: Channel, _frame: Frame, body: Body) -> None:
        if not isinstance(body, (GetChunks, *self.questions)):
            channel.close(Error(ErrorCode.MALFORMED))
            return
        asker = self._askers.get(channel.peer)
        if asker is None:
            if len(self._askers) >= PEERS_AT_ONCE:
                channel.close(Error(ErrorCode.BUSY, BUSY_RETRY_S))
                return
            asker = self._askers[channel.peer] = Asker()
        self._enqueue(channel, body, asker)

    def _enqueue(self, channel: Channel, body: Body, asker: Asker) -> None:
        """Answer a question after the earlier ones of its peer. Raises ProtocolError if too many of them wait."""
        if asker.open >= REQUESTS_PER_PEER:
            raise ProtocolError("it has more requests open than the protocol allows", code=ErrorCode.TOO_LARGE)
        asker.open += 1
        self._tasks.spawn(self._answer(channel, body, asker), f"answer {channel.peer}")

    async def _answer(self, channel: Channel, body: Body, asker: Asker) -> None:
        try:
            async with asker.turn:
                self._finish(channel, await self._send(channel, body))
                await channel.drain()
        except PeerError as error:
            log.debug("%s", error)
        finally:
            asker.open -= 1
            if not asker.open:
                self._askers.pop(channel.peer, None)

    def _finish(self, channel: Channel, refused: ErrorCode | None) -> None:
        """End the conversation of an answered question; `refused` is None if the answer was sent."""
        channel.close(None if refused is None else Error(refused))

    async def _send(self, channel: Channel, body: Body) -> ErrorCode | None:
        """Send the requested chunks, or the hash list if their count is 0. Returns None, or the code of the refusal if they
        are not on offer."""
        assert isinstance(body, GetChunks)
        offer = self._offers.get(body.root)
        if offer is None:
            return ErrorCode.NOT_FOUND
        if body.first + body.count > offer.file.chunks():
            return ErrorCode.MALFORMED
        try:
            if body.count == 0:
                return await self._send_hashes(channel, offer)
            return await self._send_chunks(channel, offer, range(body.first, body.first + body.count))
        except OSError as error:
            self._withdraw(offer, str(error))
            return ErrorCode.NOT_FOUND

    async def _send_hashes(self, channel: Channel, offer: Offer) -> ErrorCode | None:
        hashes = offer.cache.hashes(offer.file) if offer.cache else await self._hash(offer)
        if hashes is None:
            return ErrorCode.NOT_FOUND
        channel.send(Chunk(hashes=True), payload=[hashes])
        return None

    async def _send_chunks(self, channel: Channel, offer: Offer, numbers: range) -> ErrorCode | None:
        have = offer.cache.have(offer.file) if offer.cache else HAVE * offer.file.chunks()
        if offer.cache is None and await self._hash(offer) is None:
            return ErrorCode.NOT_FOUND
        for number in numbers:
            if not channel.open:
                return None  # the receiver gave up
            if have[number : number + 1] != HAVE:
                return ErrorCode.NOT_FOUND
            data, stamp = await asyncio.to_thread(self._read, offer, number)
            if offer.cache is None and stamp != self._stamps.get(offer.file.root):
                self._hashes.pop(offer.file.root, None)
                if await self._hash(offer) is None:
                    return ErrorCode.NOT_FOUND
                data, _ = await asyncio.to_thread(self._read, offer, number)
            channel.send(Chunk(), seq=number, payload=[data])
            await channel.drain()
        return None

    def _read(self, offer: Offer, number: int) -> tuple[bytes, Stamp]:
        """Return a chunk, and the file's stamp after it was read. Raises OSError if the file cannot be read or is too short."""
        with offer.path.open("rb") as stream:
            stream.seek(number * CHUNK_BYTES)
            data = stream.read(CHUNK_BYTES)
            stamp = _stamp(os.fstat(stream.fileno()))
        if len(data) != offer.file.chunk_size(number):
            raise OSError(f"{offer.path} was cut short")
        return data, stamp

    async def _hash_all(self) -> None:
        """Compute the hash lists of all whole files, one after another."""
        for offer in list(self._offers.values()):
            if offer.cache is None:
                await self._hash(offer)

    async def _hash(self, offer: Offer) -> bytes | None:
        """Return the hash list of a whole file, computed once; None, and the file is withdrawn, if it has changed or cannot
        be read."""
        root = offer.file.root
        if root in self._hashes:
            return self._hashes[root]
        if root not in self._hashing:
            self._hashing[root] = self._tasks.spawn(self._hash_file(offer), f"hash {offer.file.name}")
        return await asyncio.shield(self._hashing[root])

    async def _hash_file(self, offer: Offer) -> bytes | None:
        try:
            stamp = _stamp(await asyncio.to_thread(offer.path.stat))
            hashes = await asyncio.to_thread(matching_hashes, offer.path, offer.file)
        except OSError as error:
            self._withdraw(offer, str(error))
            return None
        finally:
            self._hashing.pop(offer.file.root, None)
        if hashes is None:
            self._withdraw(offer, f"{offer.path} was changed or damaged since its hashes were taken")
        else:
            self._hashes[offer.file.root], self._stamps[offer.file.root] = hashes, stamp
        return hashes

    def _took_hashes(self, offer: Offer, hashes: bytes) -> None:
        """Keep the chunk hashes of a whole file that was verified just now."""
        with contextlib.suppress(OSError):  # it is hashed, and withdrawn, when a peer asks for it
            self._hashes[offer.file.root], self._stamps[offer.file.root] = hashes, _stamp(offer.path.stat())

    def _withdraw(self, offer: Offer, reason: str) -> None:
        if self._offers.get(offer.file.root) is offer:
            del self._offers[offer.file.root]
            self._hashes.pop(offer.file.root, None)
            log.warning("your node no longer offers %s to others: %s", offer.file.name, reason)
            self.on_withdraw()


WEIGHTS_PROTOCOL = "/swarmnode/weights/1"


class Seeder(ChunkServer):
    """Server of one swarm's manifest, weights and adapters. Chunks are sent as they are: the receiver verifies them against
    the manifest."""

    questions = (GetManifest,)

    def __init__(self, peer: LocalPeer, swarm: Swarm) -> None:
        assert swarm.manifest is not None and swarm.manifest_bytes is not None
        super().__init__(peer, (MANIFEST_PROTOCOL, WEIGHTS_PROTOCOL))
        self._manifest = swarm.manifest
        self._manifest_bytes = swarm.manifest_bytes
        self._cached_units = (0, 0)

    @classmethod
    async def start(cls, peer: LocalPeer, swarm: Swarm) -> Seeder:
        """Create a seeder that serves the manifest, and each file that is added later."""
        seeder = cls(peer, swarm)
        await seeder.serve()
        return seeder

    @property
    def units(self) -> tuple[int, int]:
        """Range [i, j) of the layers whose weights this node serves; (0, 0) if none."""
        whole = all(file.root in self._offers for file in self._manifest.files)
        if whole and not any(self._offers[file.root].cache for file in self._manifest.files):
            return (0, self._manifest.model.units)
        return self._cached_units

    def add_folder(self, folder: Path, verified: Mapping[bytes, bytes] = MappingProxyType({})) -> None:
        """Offer the files of a whole checkpoint. Files whose size differs from the manifest are left out.

        `verified` maps the roots of files that were already read to their chunk hashes. The hashes of the other files are
        computed in the background, before a peer asks for them.
        """
        self._offer_whole(self._manifest.files, folder)
        for root, hashes in verified.items():
            if (offer := self._offers.get(root)) is not None:
                self._took_hashes(offer, hashes)
        self._tasks.spawn(self._hash_all(), "hash what is offered")

    def add_adapters(self, folder: Path) -> None:
        """Offer the swarm's adapters from the founder's `folder`, which holds all of them."""
        self._offer_whole([file for adapter in self._manifest.adapters or () for file in adapter.files], folder)
        self._tasks.spawn(self._hash_all(), "hash what is offered")

    def add_files(self, files: Iterable[FileContent], cache: ChunkFolder) -> None:
        """Offer the chunks of `files` that `cache` holds. Files that are already on offer stay as they are."""
        for file in files:
            self._offers.setdefault(file.root, Offer(file, cache.path(file), cache))

    def add_paths(self, files: Mapping[FileContent, Path]) -> None:
        """Offer whole files, each at its path."""
        for file, path in files.items():
            if file.root not in self._offers or self._offers[file.root].cache is not None:
                self._offers[file.root] = Offer(file, path)

    def withdraw(self, files: Iterable[FileContent]) -> None:
        """Offer these files no longer. A file of another name with the same content stays on offer."""
        for file in files:
            offer = self._offers.get(file.root)
            if offer is not None and offer.file == file:
                del self._offers[file.root]
                self._hashes.pop(file.root, None)

    def _offer_whole(self, files: Iterable[FileContent], folder: Path) -> None:
        for file in files:
            fault = fault_of_size(file, folder)
            if fault is None:
                self._offers[file.root] = Offer(file, folder / file.name)
            else:
                log.warning("%s: others cannot fetch it from here", fault)

    def add_cache(self, cache: WeightCache, units: tuple[int, int]) -> None:
        """Offer the chunks in `cache`, which holds all weights of `units` ([start, end)). Adjoining or overlapping ranges
        are joined; otherwise the new range replaces the old one."""
        self.add_files(self._manifest.files, cache)
        start, end = self._cached_units
        adjoin = start < end and units[0] <= end and start <= units[1]
        self._cached_units = (min(start, units[0]), max(end, units[1])) if adjoin else units

    async def _send(self, channel: Channel, body: Body) -> ErrorCode | None:
        if isinstance(body, GetManifest):
            channel.send(ManifestReply(), payload=[self._manifest_bytes])
            return None
        return await super()._send(channel, body)
