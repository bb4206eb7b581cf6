"""Fetches chunks into the cache: from several sources at once, each chunk checked, liars and sleepers left out."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from swarmnode.codec.messages import Hello
from swarmnode.errors import CheckpointError, ErrorCode, NetworkDown, PeerError, PeerRefused, ProtocolError
from swarmnode.net.interfaces import Network, PeerId
from swarmnode.net.link import LinkConfig
from swarmnode.net.switchboard import Switchboard
from swarmnode.roles.seeder import MANIFEST_PROTOCOL
from swarmnode.roles.sources import Source, ask_for_manifest
from swarmnode.swarm.content import FileContent, Progress, verify_chunk, verify_hashes
from swarmnode.swarm.manifest import MAX_MANIFEST_BYTES, swarm_id
from swarmnode.swarm.weight_cache import WeightCache

log = logging.getLogger(__name__)

RUN_CHUNKS = 8  # chunks asked for at once: few questions, and little lost with a source
SOURCES_AT_ONCE = 4

Run = tuple[FileContent, int, int]
"""(file, first chunk, number of chunks)"""


async def fetch_manifest(network: Network, peers: Sequence[PeerId], hello: Hello, config: LinkConfig) -> bytes:
    """The swarm's manifest from whichever peer gives the right one first. Raises PeerError where none does."""
    board = Switchboard(network, MANIFEST_PROTOCOL, hello, replace(config, max_payload_bytes=MAX_MANIFEST_BYTES))
    failure: PeerError = PeerRefused("no peer is known that could have the manifest", code=ErrorCode.NOT_FOUND)
    questions = [asyncio.ensure_future(ask_for_manifest(board, peer)) for peer in peers]
    try:
        for question in asyncio.as_completed(questions):
            try:
                raw = await question
            except PeerError as error:
                failure = error
            except NetworkDown as error:
                failure = PeerRefused(str(error), code=ErrorCode.PEER_LOST)
            else:
                if len(raw) <= MAX_MANIFEST_BYTES and swarm_id(raw) == hello.swarm:
                    return raw
                failure = ProtocolError("a peer gave a manifest that is not the swarm's")
        raise failure
    finally:
        for task in questions:
            task.cancel()
        await asyncio.gather(*questions, return_exceptions=True)
        await board.close()


class Fetcher:
    """Brings chunks into a cache. `sources()` names who may have them now, best first; `drop` hears of liars."""

    def __init__(
        self, cache: WeightCache, sources: Callable[[], Sequence[Source]], drop: Callable[[Source, str], None]
    ) -> None:
        self._cache = cache
        self._sources = sources
        self._drop = drop
        self._bad: set[str] = set()
        self.fetched_bytes = 0

    def __repr__(self) -> str:
        return f"<Fetcher into {self._cache!r}, {self.fetched_bytes / 1e6:.1f} MB fetched, {len(self._bad)} sources dropped>"

    async def fetch(
        self,
        wanted: Mapping[FileContent, Iterable[int]],
        *,
        news: Callable[[], Awaitable[None]],
        progress: Progress | None = None,
    ) -> None:
        """Bring these chunks of these files. Waits for `news()` (of peers) while nobody has what is missing.

        Raises LocalError where the disk is full.
        """
        missing = {file: self._cache.missing(file, numbers) for file, numbers in wanted.items()}
        total_bytes = sum(file.chunk_size(number) for file, numbers in missing.items() for number in numbers)
        self._cache.make_room(total_bytes)
        goal_bytes = self.fetched_bytes + total_bytes
        asked = 0  # sources that were asked in vain since the last chunk came
        while any(missing.values()):
            sources = [source for source in self._sources() if source.name not in self._bad]
            if asked >= len(sources):
                log.info("no peer has the missing weights at the moment; waiting for one")
                await news()
                asked = 0
                continue
            runs = deque(run for file, numbers in missing.items() for run in _runs(file, numbers))
            await _all(
                self._drain(source, runs, progress, goal_bytes) for source in sources[asked : asked + SOURCES_AT_ONCE]
            )
            left = {file: self._cache.missing(file, numbers) for file, numbers in missing.items()}
            asked = asked + SOURCES_AT_ONCE if left == missing else 0
            missing = left

    async def _drain(self, source: Source, runs: deque[Run], progress: Progress | None, goal_bytes: int) -> None:
        """Fetch runs from one source until it has none of those left, or fails; what it did not bring goes back at once.

        A source that died or hangs may be asked again when it is back; one that gave something false never is.
        """
        lacks: set[tuple[bytes, int]] = set()
        while (run := next((run for run in runs if (run[0].root, run[1]) not in lacks), None)) is not None:
            runs.remove(run)
            file, first, count = run
            try:
                hashes = await self._hashes(source, file)
                async for number, data in source.chunks(file, first, count):
                    if not await asyncio.to_thread(verify_chunk, hashes, number, data):
                        raise ProtocolError(f"{source.name} gave a chunk of {file.name} that was tampered with")
                    await asyncio.to_thread(self._cache.write, file, number, data)
                    self.fetched_bytes += len(data)
                    if progress is not None:
                        progress(self.fetched_bytes, goal_bytes)
            except PeerRefused as error:
                log.debug("%s", error)  # it has other parts: the others of this round may have this one
                runs.append(run)
                lacks.add((file.root, first))
            except (PeerError, CheckpointError, NetworkDown) as error:
                log.warning("source dropped: %s", error)
                runs.append(run)
                if isinstance(error, ProtocolError):
                    self._bad.add(source.name)
                self._drop(source, str(error))
                return

    async def _hashes(self, source: Source, file: FileContent) -> bytes:
        known = self._cache.hashes(file)
        if known is None:
            known = bytes(await source.hashes(file))
            if not await asyncio.to_thread(verify_hashes, file, known):
                raise ProtocolError(f"{source.name} gave hashes of {file.name} that are not the manifest's")
            self._cache.keep_hashes(file, known)
        return known


async def _all(works: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Run to the end of all; where one fails or we are cancelled, the others are cancelled and awaited."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _runs(file: FileContent, numbers: Sequence[int]) -> list[Run]:
    """Adjoining chunk numbers, at most RUN_CHUNKS at a time."""
    runs: list[Run] = []
    for number in numbers:
        if runs and runs[-1][1] + runs[-1][2] == number and runs[-1][2] < RUN_CHUNKS:
            runs[-1] = (file, runs[-1][1], runs[-1][2] + 1)
        else:
            runs.append((file, number, 1))
    return runs
