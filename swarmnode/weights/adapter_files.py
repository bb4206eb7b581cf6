"""Adapter files of a swarm: read from the founder's folder if this machine has it, else fetched from peers or their owner.

Only the chunks for this machine's layers are fetched. They are verified by their hashes and offered to other peers.

Adapters of members at one node: which of them it takes, where it fetches them, and when their files go.

A session brings the adapter's signed record in its OPEN. Quotas are checked before anything is fetched. Records lie beside the
files, so that a node that was started again knows what it holds. After an adapter's expiry, or once its owner has blocked it, its
files, its sessions and its copies in memory go.
"""

from __future__ import annotations

import asyncio
import contextlib
import glob
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import KW_ONLY, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import UNSET

from swarmnode.codec.messages import Open
from swarmnode.config import MEMBERS_TOO, NO_ADAPTERS, ServerConfig
from swarmnode.errors import Busy, ErrorCode, LocalError, NetworkDown, PeerRefused, ProtocolError
from swarmnode.membership.access_control import load_home_key
from swarmnode.net.identity import verify
from swarmnode.net.interfaces import PeerId
from swarmnode.net.tasks import Tasks, until_first
from swarmnode.peer.host import Host
from swarmnode.plan.view import Span
from swarmnode.swarm.peers.record_validation import LISTED_S
from swarmnode.swarm.records.adapter_record import AdapterRecord, Share, admitted_record, open_adapter
from swarmnode.swarm.records.manifest import AdapterInfo, file_names
from swarmnode.swarm.storage.chunk_folder import FOLDER, folder_name
from swarmnode.swarm.storage.content import FileContent, matching_hashes
from swarmnode.swarm.storage.own_adapters import BlockedAdapters, OwnAdapter, OwnAdapters
from swarmnode.swarm.storage.swarmfile import Swarm
from swarmnode.weights.adapter_offers import AdapterOffers, list_adapters
from swarmnode.weights.chunk_server import Seeder
from swarmnode.weights.fetcher import Fetcher
from swarmnode.weights.sources import Source
from swarmnode.weights.weights import Weights, chunks_of, header_chunks

if TYPE_CHECKING:
    from swarmnode.compute.model.adapters.adapter_file import AdapterFile


log = logging.getLogger(__name__)

SWEEP_S = 5.0  # between two looks for adapters that must go
LIST_S = LISTED_S / 3  # between two publications of own shared adapters
RECORD_GLOB = "adapter-*.record"


@dataclass(eq=False)
class BroughtAdapters:
    """Adapters that members have brought to this node, from `start` to `close`. Used on the event loop."""

    host: Host
    weights: Weights
    seeder: Seeder
    limits: ServerConfig
    _: KW_ONLY
    is_used: Callable[[str], bool] = lambda _adapter: False
    """Function that returns whether a session uses the adapter with this id"""
    on_gone: Callable[[str, ErrorCode], None] = lambda _adapter, _code: None
    """Function that ends the sessions of an adapter with an error code, and frees its memory"""

    def __post_init__(self) -> None:
        self._swarm = self.host.swarm.id
        self._admitted: dict[str, AdapterRecord] = {}  # by id, the least recently used first
        self._raw: dict[str, bytes] = {}  # their signed bytes
        self._begun: set[str] = set()
        self._blocked_ids = frozenset[str]()
        self._blocked = BlockedAdapters(self.host.config.home)
        self._own = OwnAdapters(self.host.config.home, self._swarm)
        self._own_by_id: dict[str, OwnAdapter] = {}
        self._shared_files: set[FileContent] = set()  # files of own shared adapters
        self.offers = AdapterOffers(self.host, self._swarm)
        self._tasks = Tasks("adapters of members", on_crash=self.host.supervisor.ends_peer)

    def __repr__(self) -> str:
        return f"<BroughtAdapters, {len(self._admitted)} known>"

    def __contains__(self, adapter: str) -> bool:
        """Return whether the adapter with this id was admitted, and is not over."""
        return adapter in self._admitted

    async def start(self) -> None:
        """Take up what an earlier run has left, and start to take offers."""
        for record, raw in await asyncio.to_thread(self._restore):
            self._admitted[record.id], self._raw[record.id] = record, raw
            self._begun.add(record.id)
            self._give(record)
        await self._read_lists()
        await self.offers.start()
        self._tasks.spawn(self._sweep(), "sweep")
        self._tasks.spawn(self._list_own(), "list own adapters")

    async def close(self) -> None:
        """Stop taking offers. Files stay for the next run."""
        await self._tasks.close()
        await self.offers.close()

    @property
    def serves_any(self) -> bool:
        """Whether this node serves adapters at all."""
        return self.host.config.adapters != NO_ADAPTERS

    # -- admission

    def admit(self, opened: Open, sender: PeerId) -> None:
        """Check that a session from `sender` may use the adapter that it names, and note the adapter.

        Raises ProtocolError as `admitted_record` does; ADAPTER_REFUSED if this node takes no adapters of members, or not this one;
        ADAPTER_QUOTA if it is over the space for its owner, or for all of them. Raises Busy if all of that space is in use.
        """
        if opened.ticket is None:
            raise ProtocolError("the swarm has no such adapter", code=ErrorCode.INVALID_REQUEST)
        if self.host.config.adapters != MEMBERS_TOO:
            raise ProtocolError("this node takes no adapters of members", code=ErrorCode.ADAPTER_REFUSED)
        record = admitted_record(opened, sender, self._swarm, verify, self.host.clock.unix())
        if record.id in self._blocked_ids:
            raise ProtocolError("the adapter is blocked here", code=ErrorCode.ADAPTER_REFUSED)
        known = self._admitted.get(record.id)
        if known is None:
            self._check_quotas(record)
        if known is None or record.expires_at > known.expires_at:
            self._raw[record.id] = opened.ticket.record
        else:
            record = known
        self._admitted.pop(record.id, None)
        self._admitted[record.id] = record

    def _check_quotas(self, new: AdapterRecord) -> None:
        """Make room for a new adapter among those that no session uses.

        Raises ProtocolError (ADAPTER_QUOTA) if it can never fit, Busy if all others are in use.
        """
        limits = self.limits
        own_bytes = [one.size_bytes for one in self._admitted.values() if one.owner == new.owner]
        over_own = (
            len(own_bytes) >= limits.owner_adapters or sum(own_bytes) + new.size_bytes > limits.owner_adapter_bytes
        )
        if over_own or new.size_bytes > limits.adapter_bytes:
            raise ProtocolError("the adapter is over the space for adapters here", code=ErrorCode.ADAPTER_QUOTA)
        while len(self._admitted) >= limits.adapters or self._used_bytes + new.size_bytes > limits.adapter_bytes:
            unused = [one for one in self._admitted if not self.is_used(one)]
            if not unused:
                raise Busy("all adapters here are in use", retry_s=limits.retry_s)
            gone = min(unused, key=lambda one: one in self._begun)  # first those without files
            self._strike(gone, ErrorCode.BUSY)
            self._tasks.spawn(asyncio.to_thread(self._delete, gone), "make room")

    @property
    def _used_bytes(self) -> int:
        return sum(one.size_bytes for one in self._admitted.values())

    # -- files

    def info(self, adapter: str) -> AdapterInfo:
        """Return the files of an adapter that was admitted."""
        return self._admitted[adapter].info

    def own(self, adapter: str) -> OwnAdapter | None:
        """Return the adapter if it is one of this home folder; else None."""
        return self._own_by_id.get(adapter)

    def sources(self, adapter: str) -> list[Source]:
        """Return the peers to fetch an adapter from: those that offer it, and for a shared one any peer that holds weights."""
        record = self._admitted.get(adapter)
        if record is None:
            return []
        offered = self.offers.sources(adapter)
        if record.allows is Share.PRIVATE:
            return offered  # other peers would learn the root of its files
        offering = {source.name for source in offered}
        units = [Span(0, self.weights.units)]
        return [*offered, *(one for one in self.weights.seeders(units) if one.name not in offering)]

    async def begin(self, adapter: str) -> None:
        """Keep the record of an adapter whose files are going to be fetched. Raises LocalError if the disk cannot be written."""
        try:
            await asyncio.to_thread(self._record_path(adapter).write_bytes, self._raw[adapter])
        except OSError as error:
            raise LocalError(f"cannot keep an adapter's record: {error.strerror or error}; free disk space") from error
        self._begun.add(adapter)

    async def settle(self, adapter: str) -> None:
        """Give fetched files of a shared adapter to others; delete those of an adapter that is over meanwhile."""
        record = self._admitted.get(adapter)
        if record is None:
            await asyncio.to_thread(self._delete, adapter)
        else:
            self._give(record)

    def _give(self, record: AdapterRecord) -> None:
        if record.allows is not Share.PRIVATE:
            self.seeder.add_files(record.info.files, self.weights.open_cache())

    async def forget(self, adapter: str, code: ErrorCode) -> None:
        """Let go of an adapter: its sessions, which end with `code`, its memory and its files."""
        self._strike(adapter, code)
        await asyncio.to_thread(self._delete, adapter)

    def _strike(self, adapter: str, code: ErrorCode) -> None:
        record = self._admitted.pop(adapter, None)
        self._raw.pop(adapter, None)
        self._begun.discard(adapter)
        if record is None:
            return
        log.info("%r is over at this node", record)
        self.offers.forget(adapter)
        self.seeder.withdraw(record.info.files)
        for other in self._admitted.values():
            self._give(other)  # it may have the same config
        self.on_gone(adapter, code)

    def _delete(self, adapter: str) -> None:
        cache = self.weights.open_cache()
        try:
            chats = (path.name for path in cache.folder.glob(f"adapter-{glob.escape(adapter)}-*.chat"))
            for name in (*file_names(adapter), *chats, self._record_path(adapter).name):
                cache.remove(name)
        except OSError as error:
            log.warning("files of an adapter cannot be deleted: %s", error)

    def _record_path(self, adapter: str) -> Path:
        return self.weights.open_cache().folder / f"adapter-{adapter}.record"

    def _restore(self) -> list[tuple[AdapterRecord, bytes]]:
        """Return the records that an earlier run has left. Files without a valid record are deleted."""
        folder = self.host.config.home / FOLDER / folder_name(self._swarm)
        found = []
        for path in sorted(folder.glob(RECORD_GLOB)):
            try:
                raw = path.read_bytes()
                found.append((open_adapter(raw, self._swarm, verify), raw))
            except (OSError, ProtocolError) as error:
                log.info("%s is no record of an adapter: %s", path, error)
                self._delete(path.stem.removeprefix("adapter-"))
        return found

    # -- in the background

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_S)
            await self._read_lists()

    async def _read_lists(self) -> None:
        """Read the lists in the home folder, and drop what must go."""
        self._own_by_id = await self._read_own()
        self._give_own()
        self._blocked_ids = await asyncio.to_thread(self._blocked.ids)
        now = self.host.clock.unix()
        over = {one: ErrorCode.ADAPTER_EXPIRED for one, record in self._admitted.items() if record.expires_at <= now}
        blocked = dict.fromkeys(self._admitted.keys() & self._blocked_ids, ErrorCode.ADAPTER_REFUSED)
        for adapter, code in {**over, **blocked}.items():
            await self.forget(adapter, code)

    async def _read_own(self) -> dict[str, OwnAdapter]:
        """Return the adapters of this home folder by their ids."""
        own = await asyncio.to_thread(self._own.all)
        if not own:
            return {}
        try:
            owner = (await asyncio.to_thread(load_home_key, self.host.config.home)).peer_id
        except LocalError as error:
            log.warning("adapters of this home are left out: %s", error)
            return {}
        now = self.host.clock.unix()
        return {one.record(self._swarm, owner, now).id: one for one in own}

    async def _list_own(self) -> None:
        """Keep the records of this home's shared adapters in the DHT."""
        while True:
            try:
                await list_adapters(self.host, self._shared)
            except (NetworkDown, LocalError) as error:
                log.info("shared adapters are not listed at the moment: %s", error)
            await asyncio.sleep(LIST_S)

    @property
    def _shared(self) -> list[OwnAdapter]:
        """Adapters of this home folder that other members may use."""
        return [one for one in self._own_by_id.values() if one.terms.share is not Share.PRIVATE]

    def _give_own(self) -> None:
        """Give the files of this home's shared adapters to others, and those of removed ones no longer."""
        shared = self._shared
        given = {file for one in shared for file in one.files}
        self.seeder.withdraw(self._shared_files - given)
        for one in shared:
            self.seeder.add_paths({file: one.paths[file.root] for file in one.files})
        self._shared_files = given


PATIENCE_S = 10.0  # longest wait while no peer has a missing chunk
CHAT_PATIENCE_S = 1.0  # the same for a chat template, which no pass needs


class AdapterFiles:
    """Adapters that sessions may ask for: those of the manifest by their names, and those that members bring by their ids.

    `weights` finds the sources of the manifest's adapters and holds the cache; the founder's machine has a folder with all of them.
    """

    def __init__(self, swarm: Swarm, weights: Weights, seeder: Seeder, brought: BroughtAdapters) -> None:
        assert swarm.manifest is not None
        self.brought = brought
        self._by_name = {adapter.name: adapter for adapter in swarm.manifest.adapters or ()}
        self._units = swarm.manifest.model.units
        self._own = swarm.adapters
        self._weights = weights
        self._seeder = seeder
        self._fetcher: Fetcher | None = None

    def __contains__(self, name: str) -> bool:
        """Return whether the swarm has an adapter called `name`, or a member has brought one with this id."""
        return name in self._by_name or name in self.brought

    def tell(self, *, is_used: Callable[[str], bool], on_gone: Callable[[str, ErrorCode], None]) -> None:
        """Set the stage's functions: `is_used` returns whether a session uses an adapter, `on_gone` is called for one that must
        go."""
        self.brought.is_used, self.brought.on_gone = is_used, on_gone

    def admit(self, opened: Open, sender: PeerId) -> None:
        """Check that a session from `sender` may use the adapter that it names. Raises ProtocolError or Busy if not; see
        `BroughtAdapters.admit`."""
        if opened.adapter not in self._by_name:
            self.brought.admit(opened, sender)
        elif not self.brought.serves_any:
            raise ProtocolError("this node serves no adapters", code=ErrorCode.ADAPTER_REFUSED)

    async def bring(self, name: str, span: Span) -> AdapterFile:
        """Return the adapter `name` after its matrices for the layers in `span` are on this machine and verified.

        Raises PeerRefused (NOT_FOUND) if no peer has them in time, CheckpointError if a file is damaged, LocalError if the
        disk is full.
        """
        if name not in self._by_name:
            return await self._bring_of_member(name, span)
        adapter = self._by_name[name]
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
