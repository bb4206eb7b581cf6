"""Gives the manifest and the weights that this machine has to whoever asks (`protocol/records.md`, "Weights")."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, replace
from pathlib import Path

from swarmnode.codec.frames import Frame
from swarmnode.codec.messages import Body, Chunk, Error, GetChunks, GetManifest, Hello, Manifest
from swarmnode.errors import ErrorCode, PeerLost
from swarmnode.net.interfaces import Network
from swarmnode.net.link import LinkConfig
from swarmnode.net.switchboard import Channel, Switchboard
from swarmnode.net.tasks import Tasks
from swarmnode.swarm.content import FileContent, chunk_hashes
from swarmnode.swarm.swarmfile import Swarm
from swarmnode.swarm.weight_cache import HAVE, WeightCache

log = logging.getLogger(__name__)

MANIFEST_PROTOCOL = "/swarmnode/manifest/1"
WEIGHTS_PROTOCOL = "/swarmnode/weights/1"
REQUESTS_AT_ONCE = 8
MAX_WAITING = 256  # requests of all peers together; more are told to come back
BUSY_RETRY_S = 2.0


@dataclass(frozen=True)
class _Offer:
    """A file that can be given: a whole one, or the chunks of it that the cache holds."""

    file: FileContent
    path: Path
    cache: WeightCache | None


class Seeder:
    """Answers for one swarm. Chunks are offered as they are: who asks checks them against the manifest."""

    def __init__(self, network: Network, hello: Hello, swarm: Swarm, link_config: LinkConfig) -> None:
        assert swarm.manifest is not None and swarm.manifest_bytes is not None
        self._manifest = swarm.manifest
        self._manifest_bytes = swarm.manifest_bytes
        self._offers: dict[bytes, _Offer] = {}
        self._hashing: dict[bytes, asyncio.Task[bytes]] = {}
        self._turns = asyncio.Semaphore(REQUESTS_AT_ONCE)
        self._tasks = Tasks("seeder")
        bounded = replace(link_config, max_payload_bytes=0)  # questions carry none
        self._boards = [
            Switchboard(network, protocol, hello, bounded, accept=self._accept)
            for protocol in (MANIFEST_PROTOCOL, WEIGHTS_PROTOCOL)
        ]
        self.units = (0, 0)  # whose weights can be had here

    def __repr__(self) -> str:
        return f"<Seeder of {len(self._offers)} files, units [{self.units[0]}:{self.units[1]})>"

    @classmethod
    async def start(cls, network: Network, hello: Hello, swarm: Swarm, link_config: LinkConfig) -> Seeder:
        """Serve the manifest from now on, and what is added later."""
        seeder = cls(network, hello, swarm, link_config)
        for board in seeder._boards:
            await board.start()
        return seeder

    def add_folder(self, folder: Path) -> None:
        """Offer a whole checkpoint. Files that are not of the size that the manifest says are left out."""
        for file in self._manifest.files:
            path = folder / file.name
            if path.is_file() and path.stat().st_size == file.size:
                self._offers[file.root] = _Offer(file, path, None)
        if len(self._offers) == len(self._manifest.files):
            self.units = (0, self._manifest.model.units)

    def add_cache(self, cache: WeightCache, units: tuple[int, int]) -> None:
        """Offer what a cache holds, which is everything of these units."""
        for file in self._manifest.files:
            self._offers.setdefault(file.root, _Offer(file, cache.path(file), cache))
        if self.units == (0, 0):
            self.units = units

    async def close(self) -> None:
        """Stop answering."""
        await self._tasks.close()
        for board in self._boards:
            await board.close()

    def _accept(self, channel: Channel, _frame: Frame, body: Body) -> None:
        if isinstance(body, GetManifest):
            channel.send(Manifest(), payload=[self._manifest_bytes])
            channel.close()
        elif isinstance(body, GetChunks) and len(self._tasks) >= MAX_WAITING:
            channel.close(Error(ErrorCode.BUSY, BUSY_RETRY_S))
        elif isinstance(body, GetChunks):
            self._tasks.spawn(self._answer(channel, body), f"chunks for {channel.peer}")
        else:
            channel.close(Error(ErrorCode.MALFORMED))

    async def _answer(self, channel: Channel, body: GetChunks) -> None:
        offer = self._offers.get(body.root)
        try:
            async with self._turns:
                if offer is None:
                    channel.close(Error(ErrorCode.NOT_FOUND))
                elif body.count == 0:
                    await self._send_hashes(channel, offer)
                elif body.first + body.count > offer.file.chunks():
                    channel.close(Error(ErrorCode.MALFORMED))
                else:
                    await self._send_chunks(channel, offer, range(body.first, body.first + body.count))
        except PeerLost as error:
            log.debug("%s", error)
        except OSError as error:
            log.warning("cannot read what others ask for: %s", error)
            channel.close(Error(ErrorCode.NOT_FOUND))

    async def _send_hashes(self, channel: Channel, offer: _Offer) -> None:
        root = offer.file.root
        known = offer.cache.hashes(offer.file) if offer.cache else None
        if known is None and offer.cache is not None:
            channel.close(Error(ErrorCode.NOT_FOUND))
            return
        if known is None:
            if root not in self._hashing:
                hashing = asyncio.to_thread(chunk_hashes, offer.path, self._manifest.chunk_bytes)
                self._hashing[root] = self._tasks.spawn(hashing, f"hash {offer.file.name}")
            known = await asyncio.shield(self._hashing[root])
        channel.send(Chunk(hashes=True), payload=[known])
        channel.close()

    async def _send_chunks(self, channel: Channel, offer: _Offer, numbers: range) -> None:
        have = offer.cache.have(offer.file) if offer.cache else HAVE * offer.file.chunks()
        for number in numbers:
            if not channel.open:
                return  # who asked gave up
            if have[number : number + 1] != HAVE:
                channel.close(Error(ErrorCode.NOT_FOUND))
                return
            channel.send(Chunk(), seq=number, payload=[await asyncio.to_thread(self._read, offer, number)])
            await channel.drain()
        channel.close()

    def _read(self, offer: _Offer, number: int) -> bytes:
        with offer.path.open("rb") as stream:
            stream.seek(number * self._manifest.chunk_bytes)
            return stream.read(self._manifest.chunk_bytes)
