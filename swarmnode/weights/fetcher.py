"""Fetcher of chunks into a cache from several sources at once. It verifies each chunk and drops sources that lie or fall silent."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass

from swarmnode.errors import CheckpointError, ErrorCode, NetworkDown, PeerError, PeerRefused, ProtocolError
from swarmnode.net.clock import Backoff
from swarmnode.net.interfaces import Buffer
from swarmnode.net.tasks import cancel_and_wait
from swarmnode.swarm.storage.chunk_folder import ChunkFolder
from swarmnode.swarm.storage.content import FileContent, Progress, verify_chunk, verify_hashes
from swarmnode.weights.sources import Source

log = logging.getLogger(__name__)

SOURCES_AT_ONCE = 4
LOOK_AGAIN_S = 1.0  # for a source whose rest is over, or a run that is overdue
FIRST_REST_S, MAX_REST_S = 1.0, 60.0  # of a failed source
RUNS_AT_ONCE = 2  # asked of a quick source: the next run is requested while the last one still arrives
QUICK_S = 2.0  # for a run; a slower source would seem silent while it still sends the previous run
RUN_CHUNKS = 8  # requested at once: few requests, and little lost if a source fails
LACKS_FOR_S = 5.0  # before a source that lacked a run is asked for it again
OVERDUE_S = 10.0  # after which a run that one source holds is also given to an idle source, at the latest
MIN_OVERDUE_S = 1.0
OVERDUE_FACTOR = 4.0  # times the usual duration of a run
HASHES_S = 5.0  # for a hash list, from each of several sources
NEWEST = 0.2  # weight of the newest run in the moving average


@dataclass(frozen=True)
class ChunkRange:
    """Adjoining chunks [first, first + count) of a file; also called a run."""

    file: FileContent
    first: int
    count: int

    @property
    def numbers(self) -> range:
        """The numbers of the chunks in the file."""
        return range(self.first, self.first + self.count)


@dataclass(frozen=True)
class _Hold:
    """A run that a source was asked for, and since when, in seconds of the caller's clock."""

    source: str
    run: ChunkRange
    since_s: float


class Download:
    """The state of one download: the missing chunks, the runs that no source has taken, and the runs that sources hold."""

    def __init__(self, missing: Mapping[FileContent, Sequence[int]]) -> None:
        self._left = {(file, number) for file, numbers in missing.items() for number in numbers}
        self._waiting = [run for file, numbers in missing.items() for run in chunk_ranges(file, numbers)]
        self._held: list[_Hold] = []
        self._run_s: float | None = None  # duration of a run, a moving average
        # (source, file, first chunk) -> until when the source lacks it
        self._lacks: dict[tuple[str, FileContent, int], float] = {}
        self.total_bytes = sum(file.chunk_size(number) for file, number in self._left)
        self.done_bytes = 0

    @property
    def done(self) -> bool:
        """Whether every chunk has arrived."""
        return not self._left

    def has_work_for(self, source: str, now_s: float) -> bool:
        """Return whether `assign` would give chunks to fetch to `source` now."""
        return self._choose(source, now_s) is not None

    def assign(self, source: str, now_s: float) -> ChunkRange | None:
        """Give `source` one more run that it is not known to lack: a waiting run, else an overdue run of another source.
        Returns None if there is none."""
        run = self._choose(source, now_s)
        if run is not None:
            if run in self._waiting:
                self._waiting.remove(run)
            self._held.append(_Hold(source, run, now_s))
        return run

    def _choose(self, source: str, now_s: float) -> ChunkRange | None:
        for run in self._waiting:
            if not self._lacking(source, run, now_s):
                return run
        overdue = [hold for hold in self._held if hold.source != source and now_s - hold.since_s > self.overdue_s]
        for hold in sorted(overdue, key=lambda hold: hold.since_s):
            rest = self._rest(hold.run)
            if len(self._holders(hold.run)) == 1 and rest and not self._lacking(source, rest[0], now_s):
                return rest[0]
        return None

    @property
    def overdue_s(self) -> float:
        """Seconds that a source may hold a run before an idle source gets it too: OVERDUE_FACTOR times the usual duration,
        within bounds."""
        usual_s = OVERDUE_S if self._run_s is None else OVERDUE_FACTOR * self._run_s
        return min(OVERDUE_S, max(MIN_OVERDUE_S, usual_s))

    def _lacking(self, source: str, run: ChunkRange, now_s: float) -> bool:
        return self._lacks.get((source, run.file, run.first), now_s) > now_s

    def _holders(self, run: ChunkRange) -> list[str]:
        return [
            hold.source
            for hold in self._held
            if hold.run.file == run.file
            and hold.run.first < run.first + run.count
            and run.first < hold.run.first + hold.run.count
        ]

    def _rest(self, run: ChunkRange) -> list[ChunkRange]:
        """Return the runs of the chunks of `run` that have not arrived."""
        return chunk_ranges(run.file, [number for number in run.numbers if (run.file, number) in self._left])

    def came(self, file: FileContent, number: int) -> bool:
        """Count chunk `number` of `file` as stored. Returns False if it was not missing."""
        if (file, number) not in self._left:
            return False
        self._left.discard((file, number))
        self.done_bytes += file.chunk_size(number)
        return True

    def give_back(self, source: str, run: ChunkRange, now_s: float, *, lacking: bool = False) -> None:
        """End the hold of `source` on `run`. Chunks that have not arrived wait for other sources, unless another source
        holds them too.

        `lacking` says that the source does not have the next chunk.
        """
        hold = next(hold for hold in self._held if hold.source == source and hold.run == run)
        self._held.remove(hold)
        rest = self._rest(run)
        if not rest:
            took_s = now_s - hold.since_s
            self._run_s = took_s if self._run_s is None else self._run_s + NEWEST * (took_s - self._run_s)
        if lacking and rest:
            self._lacks[source, rest[0].file, rest[0].first] = now_s + LACKS_FOR_S
        if not self._holders(run):
            self._waiting += rest


def chunk_ranges(file: FileContent, numbers: Sequence[int]) -> list[ChunkRange]:
    """Group adjoining chunk numbers into runs of at most RUN_CHUNKS."""
    runs: list[ChunkRange] = []
    for number in numbers:
        last = runs[-1] if runs else None
        if last is not None and last.first + last.count == number and last.count < RUN_CHUNKS:
            runs[-1] = ChunkRange(file, last.first, last.count + 1)
        else:
            runs.append(ChunkRange(file, number, 1))
    return runs


class Fetcher:
    """Fetcher of chunks into a cache. `sources()` returns the current sources, best first; `drop` is called with each
    source that failed."""

    def __init__(
        self, cache: ChunkFolder, sources: Callable[[], Sequence[Source]], drop: Callable[[Source, str], None]
    ) -> None:
        self._cache = cache
        self._sources = sources
        self._drop = drop
        self._bad: set[str] = set()  # sent false data: never asked again
        self._backoff = Backoff(self._now, first_s=FIRST_REST_S, ceiling_s=MAX_REST_S)
        self._quick: set[str] = set()  # sent their last run within QUICK_S
        self.fetched_bytes = 0

    @property
    def liars(self) -> Set[str]:
        """Names of the sources that sent false data."""
        return self._bad

    async def fetch(
        self,
        wanted: Mapping[FileContent, Iterable[int]],
        *,
        news: Callable[[], Awaitable[None]],
        progress: Progress | None = None,
        patience_s: float | None = None,
    ) -> None:
        """Fetch the `wanted` chunks that the cache lacks.

        Args:
            wanted: the numbers of the chunks, by file.
            news: returns when the sources may have changed.
            progress: is called with the fetched and the total bytes.
            patience_s: how long to wait while no source has a missing chunk; None waits for ever.

        Raises:
            PeerRefused: (NOT_FOUND) after `patience_s`.
            LocalError: if the disk is full.
        """
        missing = await asyncio.to_thread(self._missing, wanted)
        download = Download(missing)
        if download.done:
            return
        await asyncio.to_thread(self._cache.make_room, download.total_bytes)
        working: dict[str, asyncio.Task[None]] = {}
        listening = asyncio.ensure_future(news())
        try:
            idle_since, brought_bytes, is_logged = self._now(), download.done_bytes, False
            while not download.done:
                for source in self._free(download, working):
                    working[source.name] = asyncio.ensure_future(self._drain(source, download, progress))
                if download.done_bytes > brought_bytes:  # a source that has nothing is no progress
                    idle_since, brought_bytes, is_logged = self._now(), download.done_bytes, False
                idle_s = 0.0 if working else self._now() - idle_since
                if patience_s is not None and idle_s > patience_s:
                    raise PeerRefused("no peer has the missing parts", code=ErrorCode.NOT_FOUND)
                if not is_logged and idle_s > LOOK_AGAIN_S:
                    log.warning("no peer has the missing parts at the moment; your node waits for one")
                    is_logged = True
                ended, _ = await asyncio.wait(
                    {listening, *working.values()}, timeout=LOOK_AGAIN_S, return_when=asyncio.FIRST_COMPLETED
                )
                for task in ended:
                    task.result()
                working = {name: task for name, task in working.items() if task not in ended}
                if listening in ended:
                    listening = asyncio.ensure_future(news())
        finally:
            await cancel_and_wait(listening, *working.values())

    def _missing(self, wanted: Mapping[FileContent, Iterable[int]]) -> dict[FileContent, list[int]]:
        return {file: self._cache.missing(file, numbers) for file, numbers in wanted.items()}

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()

    def _free(self, download: Download, working: Mapping[str, object]) -> list[Source]:
        """Return the sources to set to work now. A source of last resort is chosen only if no other source is able or works."""
        now_s = self._now()
        able = [
            source
            for source in self._sources()
            if source.name not in self._bad
            and source.name not in working
            and not self._backoff.pause_s(source.name)
            and download.has_work_for(source.name, now_s)
        ]
        peers = [source for source in able if not source.last_resort]
        chosen = peers or ([] if working else able)
        return chosen[: max(0, SOURCES_AT_ONCE - len(working))]

    async def _drain(self, source: Source, download: Download, progress: Progress | None) -> None:
        """Fetch runs from `source` until there is no run left for it, or it fails."""
        asked: set[asyncio.Task[bool]] = set()
        try:
            while True:
                while len(asked) < (RUNS_AT_ONCE if source.name in self._quick else 1):
                    run = download.assign(source.name, self._now())
                    if run is None:
                        break
                    asked.add(asyncio.ensure_future(self._ask(source, run, download, progress)))
                if not asked:
                    return
                came, asked = await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
                if False in [task.result() for task in came]:
                    return
        finally:
            await cancel_and_wait(*asked)

    async def _ask(self, source: Source, run: ChunkRange, download: Download, progress: Progress | None) -> bool:
        """Fetch one run. Returns whether the source may be asked for another run.

        A source that failed is asked again after a rest; a source that sent false data is never asked again.
        """
        began_s, lacking = self._now(), False
        try:
            await self._bring(source, run, download, progress)
            self._backoff.succeeded(source.name)
            (self._quick.add if self._now() - began_s < QUICK_S else self._quick.discard)(source.name)
        except PeerRefused as error:
            log.debug("%s", error)
            lacking = error.code == ErrorCode.NOT_FOUND
            if not lacking:
                self._backoff.failed(source.name, at_least_s=error.retry_s or 0.0)
                return False
        except (PeerError, CheckpointError, NetworkDown) as error:
            self._failed(source, error)
            return False
        finally:
            download.give_back(source.name, run, self._now(), lacking=lacking)
        return True

    def _failed(self, source: Source, error: Exception) -> None:
        log.warning("a source failed: %s", error)
        if isinstance(error, ProtocolError):
            self._bad.add(source.name)
        self._quick.discard(source.name)
        self._backoff.failed(source.name)
        self._drop(source, str(error))

    async def _bring(self, source: Source, run: ChunkRange, download: Download, progress: Progress | None) -> None:
        """Fetch a run of chunks from `source` into the cache. Raises ProtocolError at the first chunk or hash list that is
        false."""
        hashes = await self._hashes(source, run.file)
        async for number, data in source.chunks(run.file, run.first, run.count):
            if not await asyncio.to_thread(self._store, hashes, run.file, number, data):
                raise ProtocolError(f"{source.name} gave a chunk of {run.file.name} that does not match its hash")
            if download.came(run.file, number):
                self.fetched_bytes += len(data)
                if progress is not None:
                    progress(download.done_bytes, download.total_bytes)

    def _store(self, hashes: bytes, file: FileContent, number: int, data: Buffer) -> bool:
        if not verify_chunk(hashes, number, data):
            return False
        self._cache.write(file, number, data)
        return True

    async def hashes(self, file: FileContent) -> bytes | None:
        """Return the verified list of the file's chunk hashes: that of the cache, else of the first source that gives it.

        Sources of last resort are not asked. Returns None if none of SOURCES_AT_ONCE others gives it.
        """
        known = self._cache.hashes(file)
        able = [source for source in self._sources() if not (source.last_resort or source.name in self._bad)]
        for source in able[:SOURCES_AT_ONCE] if known is None else ():
            try:
                return await asyncio.wait_for(self._hashes(source, file), HASHES_S)
            except (PeerRefused, asyncio.TimeoutError) as error:
                log.debug("%s has no hashes of %s: %s", source.name, file.name, error)
            except (PeerError, CheckpointError, NetworkDown) as error:
                self._failed(source, error)
        return known

    async def _hashes(self, source: Source, file: FileContent) -> bytes:
        known = self._cache.hashes(file)
        if known is None:
            known = bytes(await source.hashes(file))
            if not await asyncio.to_thread(verify_hashes, file, known):
                raise ProtocolError(f"{source.name} gave hashes of {file.name} that do not match the file")
            self._cache.store_hashes(file, known)
        return known
