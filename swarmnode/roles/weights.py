"""The checkpoint of a swarm as this machine needs it: from the founder's own folder where that is at hand, else from peers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from swarmnode.compute.checkpoint import Checkpoint
from swarmnode.errors import CheckpointError
from swarmnode.net.switchboard import Switchboard
from swarmnode.plan.view import Span
from swarmnode.presence import Presence
from swarmnode.roles.fetcher import Fetcher
from swarmnode.roles.seeder import WEIGHTS_PROTOCOL
from swarmnode.roles.sources import HubSource, PeerSource, Source, largest_answer_bytes
from swarmnode.swarm.content import FileContent, Progress, is_weights, verify_file
from swarmnode.swarm.weight_cache import WeightCache

log = logging.getLogger(__name__)

HEADER_LENGTH_BYTES = 8


class Weights:
    """Gets what is asked for, verified against the manifest. `close` when the files are not needed any more."""

    def __init__(self, presence: Presence) -> None:
        assert presence.swarm.manifest is not None
        self._presence = presence
        self._manifest = presence.swarm.manifest
        self._hint = presence.swarm.checkpoint
        bounded = replace(presence.link_config, max_payload_bytes=largest_answer_bytes(self._manifest))
        self._board = Switchboard(presence.network, WEIGHTS_PROTOCOL, presence.hello, bounded)
        self._cache: WeightCache | None = None
        self._fetcher: Fetcher | None = None
        self._verified: set[str] = set()

    def __repr__(self) -> str:
        return f"<Weights of {self._manifest.name} from {self._fetcher or self._hint}>"

    @property
    def cache(self) -> WeightCache | None:
        """What was fetched; None while the founder's own folder serves."""
        return self._cache

    async def small_files(self) -> Path:
        """The folder with config and tokenizer."""
        return await self._bring(
            {file: range(file.chunks()) for file in self._manifest.files if not is_weights(file.name)}
        )

    async def outline(self) -> Checkpoint:
        """Config, index and headers: enough to know every tensor's place and size."""
        await self.small_files()
        weights = [file for file in self._manifest.files if is_weights(file.name)]
        await self._bring({file: range(min(1, file.chunks())) for file in weights}, verify=False)
        folder = await self._bring({file: range(self._header_chunks(file)) for file in weights}, verify=False)
        return await asyncio.to_thread(Checkpoint, folder)

    async def span(self, units: Span, progress: Progress | None = None) -> Checkpoint:
        """The checkpoint with the tensors of these units present and verified."""
        return await self._with_units([units], progress)

    async def ends(self) -> Checkpoint:
        """The checkpoint with the tensors of embedding and head."""
        units = self._manifest.model.units
        return await self._with_units([Span(0, 1), Span(units - 1, units)], None)

    async def close(self) -> None:
        """End the links to the sources, and let the cache go."""
        await self._board.close()
        if self._cache is not None:
            self._cache.close()

    async def _with_units(self, spans: Iterable[Span], progress: Progress | None) -> Checkpoint:
        checkpoint = await self.outline()
        wanted: dict[FileContent, set[int]] = {}
        for span in spans:
            for name in checkpoint.tensors_of(span.start, span.end):
                entry = checkpoint.entries[name]
                file = self._manifest.file(entry.file.name)
                if file is not None and entry.end > entry.begin:
                    first, last = (
                        entry.begin // self._manifest.chunk_bytes,
                        (entry.end - 1) // self._manifest.chunk_bytes,
                    )
                    wanted.setdefault(file, set()).update(range(first, last + 1))
        folder = await self._bring(wanted, progress)
        return checkpoint if folder == checkpoint.path else await self._with_units(spans, progress)

    def _header_chunks(self, file: FileContent) -> int:
        """How many chunks a safetensors header takes; its first 8 bytes say so."""
        with (self._folder() / file.name).open("rb") as stream:
            length = int.from_bytes(stream.read(HEADER_LENGTH_BYTES), "little")
        return min(file.chunks(), -(-(HEADER_LENGTH_BYTES + length) // self._manifest.chunk_bytes))

    def _folder(self) -> Path:
        if self._hint is not None:
            return self._hint
        assert self._cache is not None
        return self._cache.folder

    # -- bringing chunks

    async def _bring(
        self, wanted: Mapping[FileContent, Iterable[int]], progress: Progress | None = None, *, verify: bool = True
    ) -> Path:
        """The folder in which these chunks are, after fetching those that were not there.

        Chunks from peers are always verified; `verify` is for the founder's folder, of which headers are read as they are.
        """
        if self._hint is not None and not await self._hint_is_good(wanted, verify):
            log.warning(
                "%s is not what the swarm was founded on (changed or damaged); asking the peers instead", self._hint
            )
            self._hint = None
        if self._hint is None:
            await self._fetch(wanted, progress)
        return self._folder()

    async def _hint_is_good(self, wanted: Iterable[FileContent], verify: bool) -> bool:
        """Whether the founder's folder still has these files; with `verify` each is read whole, once."""
        assert self._hint is not None
        for file in wanted:
            path = self._hint / file.name
            if not path.is_file() or path.stat().st_size != file.size:
                return False
            if not verify or file.name in self._verified:
                continue
            if not await asyncio.to_thread(verify_file, path, file):
                return False
            self._verified.add(file.name)
        return True

    async def _fetch(self, wanted: Mapping[FileContent, Iterable[int]], progress: Progress | None) -> None:
        if self._fetcher is None:
            root = self._presence.config.home / "weights"
            self._cache = WeightCache(root, self._presence.swarm.id, self._manifest)
            self._fetcher = Fetcher(self._cache, self._sources, self._drop)
        await self._fetcher.fetch(wanted, news=self._news, progress=progress)

    def _sources(self) -> list[Source]:
        """Peers that say they have weights, those with most first; the hub last."""
        announced = self._presence.directory.peers()
        seeders = [peer for peer in announced.values() if peer.seeds[1] > 0 and peer.peer != self._presence.peer_id]
        seeders.sort(key=lambda peer: (peer.seeds[0] - peer.seeds[1], peer.sessions, peer.peer))
        sources: list[Source] = [PeerSource(self._board, peer.peer) for peer in seeders]
        if self._manifest.model.hub_id is not None:
            sources.append(HubSource(self._manifest.model, self._manifest.chunk_bytes))
        return sources

    def _drop(self, source: Source, reason: str) -> None:
        if isinstance(source, PeerSource):
            self._presence.directory.suspect(source.name, reason)

    async def _news(self) -> None:
        directory = self._presence.directory
        if self._presence.swarm.checkpoint is not None and not self._sources():
            raise CheckpointError(
                f"{self._presence.swarm.checkpoint} is not what the swarm was founded on: it was changed or damaged, "
                "and no peer has the weights"
            )
        await directory.changed(directory.revision)
