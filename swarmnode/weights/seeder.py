"""Gives the manifest and the weights that this machine has to whoever asks (`protocol/records.md`, "Fetching")."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType

from swarmnode.codec.body import Body
from swarmnode.codec.messages import GetManifest, ManifestReply
from swarmnode.errors import ErrorCode
from swarmnode.net.links.switchboard import Channel
from swarmnode.peer.local_peer import LocalPeer
from swarmnode.peer.newcomer import MANIFEST_PROTOCOL
from swarmnode.swarm.storage.chunk_folder import ChunkFolder
from swarmnode.swarm.storage.content import FileContent
from swarmnode.swarm.storage.swarmfile import Swarm
from swarmnode.swarm.storage.weight_cache import WeightCache
from swarmnode.weights.chunk_server import ChunkServer, Offer

WEIGHTS_PROTOCOL = "/swarmnode/weights/1"


class Seeder(ChunkServer):
    """Answers for one swarm. Chunks are offered as they are: who asks checks them against the manifest."""

    questions = (GetManifest,)

    def __init__(self, peer: LocalPeer, swarm: Swarm) -> None:
        assert swarm.manifest is not None and swarm.manifest_bytes is not None
        super().__init__(peer, (MANIFEST_PROTOCOL, WEIGHTS_PROTOCOL))
        self._manifest = swarm.manifest
        self._manifest_bytes = swarm.manifest_bytes
        self._cached_units = (0, 0)

    def __repr__(self) -> str:
        start, end = self.units
        return f"<Seeder of {len(self._offers)} files, units [{start}:{end}), {len(self._askers)} peers asking>"

    @classmethod
    async def start(cls, peer: LocalPeer, swarm: Swarm) -> Seeder:
        """Serve the manifest from now on, and what is added later."""
        seeder = cls(peer, swarm)
        await seeder.serve()
        return seeder

    @property
    def units(self) -> tuple[int, int]:
        """Units [i, j) whose weights can be had here; (0, 0) for none."""
        whole = all(file.root in self._offers for file in self._manifest.files)
        if whole and not any(self._offers[file.root].cache for file in self._manifest.files):
            return (0, self._manifest.model.units)
        return self._cached_units

    def add_folder(self, folder: Path, verified: Mapping[bytes, bytes] = MappingProxyType({})) -> None:
        """Offer a whole checkpoint. Files that are not of the size that the manifest says are left out.

        `verified` has the chunk hashes, by root, of files that were read already. Those of the others are worked out from now on,
        so that who asks need not wait for it.
        """
        self._offer_whole(self._manifest.files, folder)
        self._hashes.update(verified)
        self._tasks.spawn(self._hash_all(), "hash what is offered")

    def add_adapters(self, folder: Path) -> None:
        """Offer the swarm's adapters, of which the founder has all in a folder."""
        self._offer_whole([file for adapter in self._manifest.adapters or () for file in adapter.files], folder)
        self._tasks.spawn(self._hash_all(), "hash what is offered")

    def add_files(self, files: Iterable[FileContent], cache: ChunkFolder) -> None:
        """Offer what a cache has of these files, beside what is offered of them already."""
        for file in files:
            self._offers.setdefault(file.root, Offer(file, cache.path(file), cache))

    def _offer_whole(self, files: Iterable[FileContent], folder: Path) -> None:
        for file in files:
            path = folder / file.name
            if path.is_file() and path.stat().st_size == file.size:
                self._offers[file.root] = Offer(file, path)

    def add_cache(self, cache: WeightCache, units: tuple[int, int]) -> None:
        """Offer what a cache holds, which is everything of these units; beside those added before, where they adjoin."""
        self.add_files(self._manifest.files, cache)
        start, end = self._cached_units
        adjoin = start < end and units[0] <= end and start <= units[1]
        self._cached_units = (min(start, units[0]), max(end, units[1])) if adjoin else units

    async def _send(self, channel: Channel, body: Body) -> ErrorCode | None:
        if isinstance(body, GetManifest):
            channel.send(ManifestReply(), payload=[self._manifest_bytes])
            return None
        return await super()._send(channel, body)
