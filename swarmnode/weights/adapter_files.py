"""Adapter files of a swarm: read from the founder's folder if this machine has it, else fetched from peers or their owner.

Only the chunks for this machine's layers are fetched. They are verified by their hashes and offered to other peers.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import UNSET

from swarmnode.codec.messages import Open
from swarmnode.errors import ErrorCode, PeerRefused, ProtocolError
from swarmnode.net.interfaces import PeerId
from swarmnode.net.tasks import until_first
from swarmnode.plan.view import Span
from swarmnode.swarm.records.manifest import AdapterInfo
from swarmnode.swarm.storage.content import FileContent, matching_hashes
from swarmnode.swarm.storage.swarmfile import Swarm
from swarmnode.weights.brought_adapters import BroughtAdapters
from swarmnode.weights.chunk_server import Seeder
from swarmnode.weights.fetcher import Fetcher
from swarmnode.weights.sources import Source
from swarmnode.weights.weights import Weights, chunks_of, header_chunks

if TYPE_CHECKING:
    from swarmnode.compute.model.adapters.adapter_file import AdapterFile

log = logging.getLogger(__name__)

PATIENCE_S = 10.0  # longest wait while no peer has a missing chunk
CHAT_PATIENCE_S = 1.0  # the same for a chat template, which no pass needs


class AdapterFiles:
    """Adapters that sessions may ask for: those of the manifest by their names, and those that members bring by their ids.

    `weights` finds the sources of the manifest's adapters and holds the cache; the founder's machine has a folder with all of them.
    """

    def __init__(self, swarm: Swarm, weights: Weights, seeder: Seeder, brought: BroughtAdapters) -> None:
        assert swarm.manifest is not None
        self.brought = brought
        self._known = {adapter.name: adapter for adapter in swarm.manifest.adapters or ()}
        self._units = swarm.manifest.model.units
        self._own = swarm.adapters
        self._weights = weights
        self._seeder = seeder
        self._fetcher: Fetcher | None = None

    def __contains__(self, name: str) -> bool:
        """Return whether the swarm has an adapter called `name`, or a member has brought one with this id."""
        return name in self._known or name in self.brought

    def tell(self, *, is_used: Callable[[str], bool], on_gone: Callable[[str, ErrorCode], None]) -> None:
        """Set the stage's functions: `is_used` returns whether a session uses an adapter, `on_gone` is called for one that must
        go."""
        self.brought.is_used, self.brought.on_gone = is_used, on_gone

    def admit(self, opened: Open, sender: PeerId) -> None:
        """Check that a session from `sender` may use the adapter that it names. Raises ProtocolError or Busy if not; see
        `BroughtAdapters.admit`."""
        if opened.adapter not in self._known:
            self.brought.admit(opened, sender)
        elif not self.brought.takes_any:
            raise ProtocolError("this node serves no adapters", code=ErrorCode.ADAPTER_REFUSED)

    async def bring(self, name: str, span: Span) -> AdapterFile:
        """Return the adapter `name` after its matrices for the layers in `span` are on this machine and verified.

        Raises PeerRefused (NOT_FOUND) if no peer has them in time, CheckpointError if a file is damaged, LocalError if the
        disk is full.
        """
        if name not in self._known:
            return await self._bring_of_member(name, span)
        adapter = self._known[name]
        if self._own is not None and await asyncio.to_thread(_is_whole, adapter, self._own):
            return await asyncio.to_thread(_open, self._own, adapter)
        if self._fetcher is None:
            self._fetcher = Fetcher(self._weights.open_cache(), self._sources, self._weights.drop)
        file = await self._fetch(adapter, span, self._fetcher, self._weights.news)
        self._seeder.add_files(adapter.files, self._weights.open_cache())
        return file

    async def _bring_of_member(self, name: str, span: Span) -> AdapterFile:
        brought, weights = self.brought, self._weights
        if (own := brought.own(name)) is not None:
            return await asyncio.to_thread(_open_files, own.paths[own.config.root], own.paths[own.weights.root])
        fetcher = Fetcher(weights.open_cache(), partial(brought.sources, name), weights.drop)

        async def news() -> None:
            await until_first(weights.news(), brought.offers.changed())

        await brought.begin(name)
        try:
            return await self._fetch(brought.info(name), span, fetcher, news)
        finally:
            await brought.settle(name)

    async def _fetch(
        self, adapter: AdapterInfo, span: Span, fetcher: Fetcher, news: Callable[[], Awaitable[None]]
    ) -> AdapterFile:
        """Fetch the config, the header, and then the chunks with the matrices of `span`. Clients may ask this node for the template
        of the adapter's chats; without it the adapter works, too, and peers of earlier versions have none."""
        cache, family = self._weights.open_cache(), (await self._weights.outline()).family

        async def fetch(wanted: Mapping[FileContent, Iterable[int]]) -> None:
            await fetcher.fetch(wanted, news=news, patience_s=PATIENCE_S)

        await fetch({adapter.config: range(adapter.config.chunks()), adapter.weights: range(1)})
        await fetch({adapter.weights: header_chunks(cache.path(adapter.weights), adapter.weights)})
        file = await asyncio.to_thread(_open, cache.folder, adapter)
        await fetch({adapter.weights: chunks_of(file.tensors_of(family, span.start, span.end))})
        if adapter.chat is not UNSET:
            with contextlib.suppress(PeerRefused):
                await fetcher.fetch({adapter.chat: range(1)}, news=news, patience_s=CHAT_PATIENCE_S)
        return file

    def _sources(self) -> list[Source]:
        """Return the peers with the most of the checkpoint first: the founder, or the node that took its place, has all of it."""
        return self._weights.seeders([Span(0, self._units)])


def _open(folder: Path, adapter: AdapterInfo) -> AdapterFile:
    return _open_files(folder / adapter.config.name, folder / adapter.weights.name)


def _open_files(config: Path, weights: Path) -> AdapterFile:
    from swarmnode.compute.model.adapters.adapter_file import AdapterFile

    return AdapterFile(config, weights)


def _is_whole(adapter: AdapterInfo, folder: Path) -> bool:
    """Return whether both files in the founder's `folder` still are those of the manifest; log a warning if not."""
    try:
        whole = all(matching_hashes(folder / file.name, file) is not None for file in adapter.files)
    except OSError as error:
        log.warning("the adapter %s cannot be read: %s; your node asks the peers instead", adapter.name, error)
        return False
    if not whole:
        log.warning(
            "the adapter %s has changed since the swarm was founded; your node asks the peers instead", adapter.name
        )
    return whole
