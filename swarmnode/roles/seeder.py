"""Gives the manifest and the weights that this machine has to whoever asks (`protocol/records.md`, "Fetching")."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field, replace
from pathlib import Path

from swarmnode.codec.frames import Frame
from swarmnode.codec.messages import Body, Chunk, Error, GetChunks, GetManifest, Hello, Manifest
from swarmnode.errors import ErrorCode, PeerLost, ProtocolError
from swarmnode.net.interfaces import Network, PeerId
from swarmnode.net.link import LinkConfig
from swarmnode.net.switchboard import Channel, Switchboard
from swarmnode.net.tasks import Tasks
from swarmnode.swarm.content import FileContent, chunk_hashes, verify_hashes
from swarmnode.swarm.swarmfile import Swarm
from swarmnode.swarm.weight_cache import HAVE, WeightCache

log = logging.getLogger(__name__)

MANIFEST_PROTOCOL = "/swarmnode/manifest/1"
WEIGHTS_PROTOCOL = "/swarmnode/weights/1"
REQUESTS_PER_PEER = 16  # open at once; answered one after the other, so that a peer costs one chunk of memory
PEERS_AT_ONCE = 64  # with open requests; more are told to come back
BUSY_RETRY_S = 2.0
SLOWEST_BYTES_PER_S = 32 * 1024  # of a link with weights: a slow uplink takes its time for a chunk


@dataclass(frozen=True)
class _Offer:
    """A file that can be given: a whole one, or the chunks of it that the cache holds."""

    file: FileContent
    path: Path
    cache: WeightCache | None


@dataclass
class _Asker:
    """A peer with open requests."""

    open: int = 0
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)


class Seeder:
    """Answers for one swarm. Chunks are offered as they are: who asks checks them against the manifest."""

    def __init__(self, network: Network, hello: Hello, swarm: Swarm, link_config: LinkConfig) -> None:
        assert swarm.manifest is not None and swarm.manifest_bytes is not None
        self._manifest = swarm.manifest
        self._manifest_bytes = swarm.manifest_bytes
        self._offers: dict[bytes, _Offer] = {}  # by root
        self._cached_units = (0, 0)
        self._hashing: dict[bytes, asyncio.Task[bytes | None]] = {}
        self._askers: dict[PeerId, _Asker] = {}
        self._tasks = Tasks("seeder")
        patient = weights_link(link_config, 0)  # questions carry no payload
        self._boards = [
            Switchboard(network, protocol, hello, patient, accept=self._accept)
            for protocol in (MANIFEST_PROTOCOL, WEIGHTS_PROTOCOL)
        ]

    def __repr__(self) -> str:
        start, end = self.units
        return f"<Seeder of {len(self._offers)} files, units [{start}:{end}), {len(self._askers)} peers asking>"

    @classmethod
    async def start(cls, network: Network, hello: Hello, swarm: Swarm, link_config: LinkConfig) -> Seeder:
        """Serve the manifest from now on, and what is added later."""
        seeder = cls(network, hello, swarm, link_config)
        for board in seeder._boards:
            await board.start()
        return seeder

    @property
    def units(self) -> tuple[int, int]:
        """Units [i, j) whose weights can be had here; (0, 0) for none."""
        whole = all(file.root in self._offers for file in self._manifest.files)
        if whole and not any(offer.cache for offer in self._offers.values()):
            return (0, self._manifest.model.units)
        return self._cached_units

    def add_folder(self, folder: Path) -> None:
        """Offer a whole checkpoint. Files that are not of the size that the manifest says are left out."""
        for file in self._manifest.files:
            path = folder / file.name
            if path.is_file() and path.stat().st_size == file.size:
                self._offers[file.root] = _Offer(file, path, None)

    def add_cache(self, cache: WeightCache, units: tuple[int, int]) -> None:
        """Offer what a cache holds, which is everything of these units; beside those added before, where they adjoin."""
        for file in self._manifest.files:
            self._offers.setdefault(file.root, _Offer(file, cache.path(file), cache))
        start, end = self._cached_units
        adjoin = start < end and units[0] <= end and start <= units[1]
        self._cached_units = (min(start, units[0]), max(end, units[1])) if adjoin else units

    async def close(self) -> None:
        """Stop answering."""
        await self._tasks.close()
        for board in self._boards:
            await board.close()

    # -- answering

    def _accept(self, channel: Channel, _frame: Frame, body: Body) -> None:
        if not isinstance(body, GetManifest | GetChunks):
            channel.close(Error(ErrorCode.MALFORMED))
            return
        asker = self._askers.get(channel.peer)
        if asker is None:
            if len(self._askers) >= PEERS_AT_ONCE:
                channel.close(Error(ErrorCode.BUSY, BUSY_RETRY_S))
                return
            asker = self._askers[channel.peer] = _Asker()
        if asker.open >= REQUESTS_PER_PEER:
            raise ProtocolError("a peer asks for more at once than the protocol allows", code=ErrorCode.TOO_LARGE)
        asker.open += 1
        self._tasks.spawn(self._answer(channel, body, asker), f"answer {channel.peer}")

    async def _answer(self, channel: Channel, body: GetManifest | GetChunks, asker: _Asker) -> None:
        try:
            async with asker.turn:
                refused = await self._send(channel, body)
                channel.close(None if refused is None else Error(refused))
                await channel.drain()
        except PeerLost as error:
            log.debug("%s", error)
        finally:
            asker.open -= 1
            if not asker.open:
                self._askers.pop(channel.peer, None)

    async def _send(self, channel: Channel, body: GetManifest | GetChunks) -> ErrorCode | None:
        """Send what was asked for; the code of the refusal where it cannot be had here."""
        if isinstance(body, GetManifest):
            channel.send(Manifest(), payload=[self._manifest_bytes])
            return None
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

    async def _send_hashes(self, channel: Channel, offer: _Offer) -> ErrorCode | None:
        hashes = offer.cache.hashes(offer.file) if offer.cache else await self._hash(offer)
        if hashes is None:
            return ErrorCode.NOT_FOUND
        channel.send(Chunk(hashes=True), payload=[hashes])
        return None

    async def _send_chunks(self, channel: Channel, offer: _Offer, numbers: range) -> ErrorCode | None:
        have = offer.cache.have(offer.file) if offer.cache else HAVE * offer.file.chunks()
        for number in numbers:
            if not channel.open:
                return None  # who asked gave up
            if have[number : number + 1] != HAVE:
                return ErrorCode.NOT_FOUND
            channel.send(Chunk(), seq=number, payload=[await asyncio.to_thread(self._read, offer, number)])
            await channel.drain()
        return None

    def _read(self, offer: _Offer, number: int) -> bytes:
        with offer.path.open("rb") as stream:
            stream.seek(number * self._manifest.chunk_bytes)
            data = stream.read(self._manifest.chunk_bytes)
        if len(data) != offer.file.chunk_size(number, self._manifest.chunk_bytes):
            raise OSError(f"{offer.path} was cut short")
        return data

    async def _hash(self, offer: _Offer) -> bytes | None:
        """The hash list of a whole file, worked out once; None where the file is not the manifest's any more."""
        root = offer.file.root
        if root not in self._hashing:
            self._hashing[root] = self._tasks.spawn(self._hash_file(offer), f"hash {offer.file.name}")
        return await asyncio.shield(self._hashing[root])

    async def _hash_file(self, offer: _Offer) -> bytes | None:
        try:
            hashes = await asyncio.to_thread(chunk_hashes, offer.path, self._manifest.chunk_bytes)
        except OSError as error:
            self._withdraw(offer, str(error))
            return None
        if not verify_hashes(offer.file, hashes, self._manifest.chunk_bytes):
            self._withdraw(offer, f"{offer.path} was changed or damaged after the swarm was founded on it")
            return None
        return hashes

    def _withdraw(self, offer: _Offer, reason: str) -> None:
        if self._offers.get(offer.file.root) is offer:
            del self._offers[offer.file.root]
            self._hashing.pop(offer.file.root, None)
            log.warning("%s is not given to others any more: %s", offer.file.name, reason)


def weights_link(config: LinkConfig, max_payload_bytes: int) -> LinkConfig:
    """The link's configuration where weights travel: bounded answers, patience with slow uplinks."""
    return replace(config, max_payload_bytes=max_payload_bytes, slowest_bytes_per_s=SLOWEST_BYTES_PER_S)
