"""Weights of a swarm on this machine: read from the founder's folder if it is here, else copied from the owner's own model files
and fetched from peers or the hub."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from swarmnode.errors import CheckpointError, PeerRefused
from swarmnode.files import linked_file
from swarmnode.links.switchboard import Switchboard
from swarmnode.peer.host import Host
from swarmnode.plan.view import Span
from swarmnode.swarm.records.announcement import Announcement, peer_digest
from swarmnode.swarm.records.manifest import CAUSAL_LM
from swarmnode.swarm.storage.chunk_folder import FOLDER, WeightCache
from swarmnode.swarm.storage.content import (
    CHUNK_BYTES,
    GGUF_SUFFIX,
    FileContent,
    Progress,
    fault_of_size,
    is_weights,
    matching_hashes,
)
from swarmnode.weights.chunk_server import WEIGHTS_PROTOCOL
from swarmnode.weights.fetcher import Fetcher
from swarmnode.weights.sources import HubSource, LocalFiles, PeerSource, Source, largest_answer_bytes

if TYPE_CHECKING:
    from swarmnode.compute.model.checkpoint import Checkpoint
    from swarmnode.compute.packing.tensor_entry import TensorEntry

log = logging.getLogger(__name__)

DAMAGED_PATIENCE_S = 5.0  # for peers to turn up if the founder's own folder cannot be used
HEADER_LENGTH_BYTES = 8
MAX_HEADER_BYTES = 100 << 20  # the limit of the safetensors library


def header_chunks(path: Path, file: FileContent) -> range:
    """Return the numbers of the chunks of the header of `file`. Its first 8 bytes, which must be in `path`, give the
    header's length. Of a GGUF file the first chunk is enough: the packed index has what is used of its header.

    Raises CheckpointError if it is longer than safetensors allows.
    """
    if file.name.endswith(GGUF_SUFFIX):
        return range(min(1, file.chunks()))
    with path.open("rb") as stream:
        length = int.from_bytes(stream.read(HEADER_LENGTH_BYTES), "little")
    if length > MAX_HEADER_BYTES:
        raise CheckpointError(
            f"{file.name} declares a header of {length} bytes, more than a safetensors file may have; fetch it again"
        )
    return range(min(file.chunks(), -(-(HEADER_LENGTH_BYTES + length) // CHUNK_BYTES)))


def chunks_of(tensors: Iterable[TensorEntry]) -> set[int]:
    """Return the numbers of the chunks that contain these tensors of one file."""
    return {
        number
        for tensor in tensors
        if tensor.end > tensor.begin
        for number in range(tensor.begin // CHUNK_BYTES, (tensor.end - 1) // CHUNK_BYTES + 1)
    }


class Weights:
    """The checkpoint of a swarm. Each method fetches the files that it needs, verifies them and returns them; `close` ends
    the use of the files.

    Methods that return files raise CheckpointError if the checkpoint is damaged (for the founder's folder: if no peer has
    the weights either), LocalError if the disk is full.
    """

    def __init__(self, host: Host) -> None:
        assert host.swarm.manifest is not None
        self._host = host
        self._manifest = host.swarm.manifest
        self._hint = host.swarm.checkpoint
        if self._hint is not None and not self._hint.is_dir():
            log.info("%s is not on this machine; your node fetches the weights from peers", self._hint)
            self._hint = None
        self._outline: Checkpoint | None = None
        self._damaged = ""  # the fault, if the founder's folder is here but cannot be used
        bounded = replace(host.link_config, max_payload_bytes=largest_answer_bytes(self._manifest))
        self._board = Switchboard(host.network, WEIGHTS_PROTOCOL, host.hello, bounded)
        self._cache: WeightCache | None = None
        self._fetcher: Fetcher | None = None
        places = host.config.weights
        self._local = None if places is None else LocalFiles(places, self._manifest.files)
        self.verified: dict[bytes, bytes] = {}  # chunk hashes of the founder's files that were read whole, by root
        self._units: Sequence[Span] = ()  # whose tensors are being fetched

    @property
    def units(self) -> int:
        """Number of layers of the whole model."""
        return self._manifest.model.units

    @property
    def cache(self) -> WeightCache | None:
        """The cache of fetched chunks; None while the founder's own folder serves or before the first fetch."""
        return None if self._hint is not None else self._cache

    @property
    def copied_bytes(self) -> int:
        """Bytes of weights that were copied from the owner's own files."""
        return 0 if self._local is None else self._local.copied_bytes

    async def small_files(self) -> Path:
        """Return the folder with the config and tokenizer files."""
        return await self._bring(
            {file: range(file.chunks()) for file in self._manifest.files if not is_weights(file.name)}
        )

    async def everything(self) -> Path:
        """Return the folder with all files, each complete."""
        return await self._bring({file: range(file.chunks()) for file in self._manifest.files})

    async def outline(self) -> Checkpoint:
        """Return the checkpoint with config, index and headers: enough to know every tensor's place and size. It is read once."""
        if self._outline is None:
            self._outline = await self._read_outline()
        return self._outline

    async def _read_outline(self) -> Checkpoint:
        hint = self._hint
        await self.small_files()
        weights = [file for file in self._manifest.files if is_weights(file.name)]
        await self._bring({file: range(min(1, file.chunks())) for file in weights}, verify=False)
        if self._hint is None and hint is not None:
            # The folder was given up half-way: the files read from it before do not count.
            return await self._read_outline()
        headers = {file: header_chunks(self._folder() / file.name, file) for file in weights}
        folder = await self._bring(headers, verify=False)
        try:
            return await asyncio.to_thread(self._open, folder)
        except CheckpointError as error:
            if self._hint is None:
                raise
            self._give_up_hint(str(error))
            return await self._read_outline()

    async def span(self, units: Span, progress: Progress | None = None) -> Checkpoint:
        """Return the checkpoint with the tensors of `units` on the disk and verified."""
        return await self._with_units([units], progress)

    async def tensors(self, names: Iterable[str], units: Span, patience_s: float) -> bool:
        """Bring the named tensors onto the disk, from the holders of `units` first. Returns False if no source has had them for
        `patience_s` seconds."""
        try:
            await self._with_tensors(names, [units], None, patience_s)
        except PeerRefused:
            return False
        return True

    async def ends(self) -> Checkpoint:
        """Return the checkpoint with the tensors of the embedding and the head on the disk and verified."""
        units = self._manifest.model.units
        return await self._with_units([Span(0, 1), Span(units - 1, units)], None)

    async def file_of_adapter(self, file: FileContent, patience_s: float) -> bytes:
        """Return the content of an adapter's small file, which peers with weights give. Raises PeerRefused if no source has had it
        for `patience_s` seconds."""
        cache = self.open_cache()
        fetcher = Fetcher(cache, lambda: self.seeders([]), self.drop)
        await fetcher.fetch({file: range(file.chunks())}, news=self.news, patience_s=patience_s)
        return await asyncio.to_thread(cache.path(file).read_bytes)

    async def close(self) -> None:
        """Close the links to the sources and release the cache."""
        await self._board.close()
        if self._cache is not None:
            self._cache.close()

    async def with_tensors(
        self, names: Iterable[str], spans: Sequence[Span], progress: Progress | None = None
    ) -> Checkpoint:
        """Return the checkpoint with the named tensors on the disk and verified, asking holders of `spans` first."""
        checkpoint, names = await self.outline(), list(names)
        folder = await self._with_tensors(names, spans, progress)
        return checkpoint if folder == checkpoint.path else await self.with_tensors(names, spans, progress)

    async def _with_units(self, spans: Sequence[Span], progress: Progress | None) -> Checkpoint:
        checkpoint = await self.outline()
        names = {name for span in spans for name in checkpoint.tensors_of(span.start, span.end)}
        return await self.with_tensors(names, spans, progress)

    async def _with_tensors(
        self, names: Iterable[str], spans: Sequence[Span], progress: Progress | None, patience_s: float | None = None
    ) -> Path:
        """Return the folder with the named tensors, asking holders of `spans` first. Raises PeerRefused if no source has had them
        for `patience_s` seconds."""
        checkpoint = await self.outline()
        by_file: dict[str, list[TensorEntry]] = {}
        for entry in map(checkpoint.entries.__getitem__, sorted(set(names))):
            by_file.setdefault(entry.file.name, []).append(entry)
        files = {file: by_file[file.name] for file in self._manifest.files if file.name in by_file}
        wanted = {file: chunks_of(entries) for file, entries in files.items()}
        self._units = spans
        try:
            return await self._bring(wanted, progress, patience_s=patience_s)
        finally:
            self._units = ()

    def _open(self, folder: Path) -> Checkpoint:
        """Open the checkpoint. This imports torch, which a client that needs only config and tokenizer never loads."""
        from swarmnode.compute.graph.serialise import GraphCheckpoint
        from swarmnode.compute.model.checkpoint import Checkpoint

        if self._manifest.kind != CAUSAL_LM:
            return GraphCheckpoint(folder)
        checkpoint = Checkpoint(folder)
        narrow = checkpoint.family.bottleneck
        named = (0, 0) if narrow is None else (narrow.rank, narrow.anchor)
        if named != (self._manifest.bottleneck or 0, self._manifest.anchor or 0):
            raise CheckpointError("config.json has another bottleneck than the swarm's manifest; ask its founder")
        return checkpoint

    def _folder(self) -> Path:
        if self._hint is not None:
            return self._hint
        assert self._cache is not None
        return self._cache.folder

    # -- bringing chunks

    async def _bring(
        self,
        wanted: Mapping[FileContent, Iterable[int]],
        progress: Progress | None = None,
        *,
        verify: bool = True,
        patience_s: float | None = None,
    ) -> Path:
        """Return the folder that holds the `wanted` chunks: the founder's if it is sound, else the cache, after copying those
        that are elsewhere on this machine and fetching the others.

        Chunks from peers are always verified; `verify` applies to the founder's folder, whose headers are read unverified.
        """
        if self._hint is not None:
            fault = await self._fault_of_hint(wanted, verify)
            if fault is not None:
                self._give_up_hint(fault)
        if self._hint is None:
            await self._fetch(wanted, progress, patience_s)
        return self._folder()

    async def _fault_of_hint(self, wanted: Iterable[FileContent], verify: bool) -> str | None:
        """Return the fault of these files in the founder's folder, or None if there is none. With `verify` each file is
        read whole, once."""
        assert self._hint is not None
        for file in wanted:
            if (fault := fault_of_size(file, self._hint)) is not None:
                return fault
            path = linked_file(self._hint / file.name)
            try:
                if verify and file.root not in self.verified:
                    hashes = await asyncio.to_thread(matching_hashes, path, file)
                    if hashes is None:
                        return f"{path} differs from the file that the swarm was founded on"
                    self.verified[file.root] = hashes
            except OSError as error:
                return f"{path} cannot be read: {error.strerror or error}"
        return None

    def _give_up_hint(self, fault: str) -> None:
        log.warning("%s (changed or damaged); your node asks the peers instead", fault)
        self._hint, self._damaged, self._outline = None, fault, None

    async def _fetch(
        self, wanted: Mapping[FileContent, Iterable[int]], progress: Progress | None, patience_s: float | None
    ) -> None:
        if self._fetcher is None:
            self._fetcher = Fetcher(self.open_cache(), self._sources, self.drop)
        if self._local is not None:
            await self._local.copy(wanted, self.open_cache(), self._fetcher.hashes, progress)
        if self._damaged:  # else a node that has only an invite waits
            patience_s = DAMAGED_PATIENCE_S
        try:
            await self._fetcher.fetch(wanted, news=self.news, progress=progress, patience_s=patience_s)
        except PeerRefused as error:
            if not self._damaged:
                raise
            raise CheckpointError(
                "the model was moved, changed or damaged since the swarm was founded, and no peer has the weights: "
                f"{self._damaged}; restore it"
            ) from error

    def open_cache(self) -> WeightCache:
        """Return the cache of this swarm's fetched chunks. The first call opens it; it stays protected from eviction until
        `close`."""
        if self._cache is None:
            config = self._host.config
            self._cache = WeightCache(config.home / FOLDER, self._host.swarm.id, config.max_cache_bytes)
        return self._cache

    async def news(self) -> None:
        """Wait until the peer directory changes: other peers may have the wanted chunks then."""
        directory = self._host.directory
        await directory.changed(directory.revision)

    def seeders(self, units: Sequence[Span]) -> list[Source]:
        """Return the peers that announce any of `units` (if it is empty: any layer), those with the most of them first, then
        the least busy.

        Equal peers are in a different order on each asking node, so that not all ask the same peer. If no peer announces
        any, returns the bootstrap peers.
        """
        own = self._host.peer_id
        others = (peer for peer in self._host.directory.peers().values() if peer.peer != own)
        able = [(covered, peer) for peer in others if (covered := _covered(peer, units)) > 0]
        able.sort(key=lambda one: (-one[0], one[1].sessions, peer_digest(own + one[1].peer)))
        names = [peer.peer for _, peer in able] or self._host.bootstraps()
        return [PeerSource(self._board, name) for name in names]

    def _sources(self) -> list[Source]:
        """Return the peers for the layers being fetched, then the hub if the manifest names one."""
        sources = self.seeders(self._units)
        if self._manifest.model.hub_id is not None:
            sources.append(HubSource(self._manifest.model))
        return sources

    def drop(self, source: Source, reason: str) -> None:
        """Report a source that failed or sent false data. A peer becomes suspect in the directory; a hub is ignored."""
        if isinstance(source, PeerSource):
            self._host.directory.suspect(source.name, reason)


def _covered(peer: Announcement, units: Sequence[Span]) -> int:
    """Return how many of `units` the peer seeds. If `units` is empty (config and headers), returns 1 if it seeds any layer,
    else 0."""
    start, end = peer.seeds
    if not units:
        return min(1, end - start)
    return sum(max(0, min(end, span.end) - max(start, span.start)) for span in units)
