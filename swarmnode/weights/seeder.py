"""Seeder: it serves the manifest and this machine's weights to any peer that asks (`protocol/records.md`, "Fetching")."""

from __future__ import annotations

import logging
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
from swarmnode.swarm.storage.content import FileContent, fault_of_size
from swarmnode.swarm.storage.swarmfile import Swarm
from swarmnode.swarm.storage.weight_cache import WeightCache
from swarmnode.weights.chunk_server import ChunkServer, Offer

log = logging.getLogger(__name__)

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

    def __repr__(self) -> str:
        start, end = self.units
        return f"<Seeder of {len(self._offers)} files, units [{start}:{end}), {len(self._askers)} peers asking>"

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
