"""Fetcher of chunks into a cache, from several sources at once: it checks each chunk, and leaves out liars and sleepers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass

from swarmnode.errors import CheckpointError, ErrorCode, NetworkDown, PeerError, PeerRefused, ProtocolError
from swarmnode.net.deadlines import Backoff
from swarmnode.net.interfaces import Buffer
from swarmnode.net.tasks import cancel_and_wait
from swarmnode.swarm.storage.chunk_folder import ChunkFolder
from swarmnode.swarm.storage.content import FileContent, Progress, verify_chunk, verify_hashes
from swarmnode.weights.sources import Source

log = logging.getLogger(__name__)

SOURCES_AT_ONCE = 4
LOOK_AGAIN_S = 1.0  # whether a source that rested, or a run that is overdue, can be taken up
FIRST_REST_S, MAX_REST_S = 1.0, 60.0  # of a source that failed
RUNS_AT_ONCE = 2  # asked of a quick source: the next one is on its way while the last is still coming
QUICK_S = 2.0  # for a run; a slower source would seem silent while it still sends the one before
RUN_CHUNKS = 8  # asked for at once: few questions, and little lost with a source
LACKS_FOR_S = 5.0  # before a source that did not have a run is asked for it again
OVERDUE_S = 10.0  # after which a run that one source holds is given to an idle one too, at the latest
MIN_OVERDUE_S = 1.0
OVERDUE_FACTOR = 4.0  # of what runs took that came
NEWEST = 0.2  # weight of the newest run


@dataclass(frozen=True)
class ChunkRange:
    """Adjoining chunks [first, first + count) of a file."""

    file: FileContent
    first: int
    count: int

    @property
    def numbers(self) -> range:
        """Their numbers in the file."""
        return range(self.first, self.first + self.count)


@dataclass(frozen=True)
class _Hold:
    """A run that a source was asked for, since when (in seconds of the caller's clock)."""

    source: str
    run: ChunkRange
    since_s: float


class Download:
    """The chunks that are missing, the runs that nobody has taken, and those that sources hold."""

    def __init__(self, missing: Mapping[FileContent, Sequence[int]]) -> None:
        self._left = {(file, number) for file, numbers in missing.items() for number in numbers}
        self._waiting = [run for file, numbers in missing.items() for run in chunk_ranges(file, numbers)]
        self._held: list[_Hold] = []
        self._run_s: float | None = None  # that a run takes, a moving average
        self._lacks: dict[tuple[str, FileContent, int], float] = {}  # (source, file, first chunk) -> until when
        self.total_bytes = sum(file.chunk_size(number) for file, number in self._left)
        self.done_bytes = 0

    def __repr__(self) -> str:
        return f"<Download {self.done_bytes} of {self.total_bytes} bytes, {len(self._waiting)} runs wait, {len(self._held)} held>"

    @property
    def done(self) -> bool:
        """Whether every chunk has come."""
        return not self._left

    def has_work_for(self, source: str, now_s: float) -> bool:
        """Whether `take` would give this source a run."""
        return self._choose(source, now_s) is not None

    def take(self, source: str, now_s: float) -> ChunkRange | None:
        """Give a source one more run that it is not known to lack; None where there is none."""
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
        """How long a source may hold a run before an idle one is given it, too: some times what runs take here."""
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
        """What has not come of a run."""
        return chunk_ranges(run.file, [number for number in run.numbers if (run.file, number) in self._left])

    def came(self, file: FileContent, number: int) -> bool:
        """Count a chunk that was kept; False where it was there already."""
        if (file, number) not in self._left:
            return False
        self._left.discard((file, number))
        self.done_bytes += file.chunk_size(number)
        return True

    def give_back(self, source: str, run: ChunkRange, now_s: float, *, lacking: bool = False) -> None:
        """End a source's hold of a run: what has not come waits for others, unless another holds it too.

        With `lacking` the source said that it does not have the next chunk.
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
    """Adjoining chunk numbers as runs of at most RUN_CHUNKS."""
    runs: list[ChunkRange] = []
    for number in numbers:
        last = runs[-1] if runs else None
        if last is not None and last.first + last.count == number and last.count < RUN_CHUNKS:
            runs[-1] = ChunkRange(file, last.first, last.count + 1)
        else:
            runs.append(ChunkRange(file, number, 1))
    return runs


class Fetcher:
    """Brings chunks into a cache. `sources()` names who may have them now, best first; `drop` hears of those that failed."""

    def __init__(
        self, cache: ChunkFolder, sources: Callable[[], Sequence[Source]], drop: Callable[[Source, str], None]
    ) -> None:
        self._cache = cache
        self._sources = sources
        self._drop = drop
        self._bad: set[str] = set()  # gave something false: never asked again
        self._backoff = Backoff(self._now, first_s=FIRST_REST_S, ceiling_s=MAX_REST_S)
        self._quick: set[str] = set()  # brought their last run in little time
        self.fetched_bytes = 0

    def __repr__(self) -> str:
        dropped = f"{len(self._bad)} sources dropped"
        return f"<Fetcher into {self._cache!r}, {self.fetched_bytes / 1e6:.1f} MB fetched, {dropped}>"

    @property
    def liars(self) -> Set[str]:
        """Names of the sources that gave something false."""
        return self._bad

    async def fetch(
        self,
        wanted: Mapping[FileContent, Iterable[int]],
        *,
        news: Callable[[], Awaitable[None]],
        progress: Progress | None = None,
        patience_s: float | None = None,
    ) -> None:
        """Bring these chunks of these files. `news()` returns when there may be other sources than before.

        While nobody has what is missing it waits, at most `patience_s`. Raises PeerRefused (NOT_FOUND) after that,
        LocalError where the disk is full.
        """
        missing = await asyncio.to_thread(self._missing, wanted)
        download = Download(missing)
        if download.done:
            return
        await asyncio.to_thread(self._cache.make_room, download.total_bytes)
        working: dict[str, asyncio.Task[None]] = {}
        listening = asyncio.ensure_future(news())
        try:
            idle_since, brought_bytes, told = self._now(), download.done_bytes, False
            while not download.done:
                for source in self._free(download, working):
                    working[source.name] = asyncio.ensure_future(self._drain(source, download, progress))
                if download.done_bytes > brought_bytes:  # to be asked and have nothing is no progress
                    idle_since, brought_bytes, told = self._now(), download.done_bytes, False
                idle_s = 0.0 if working else self._now() - idle_since
                if patience_s is not None and idle_s > patience_s:
                    raise PeerRefused("no peer has the missing parts", code=ErrorCode.NOT_FOUND)
                if not told and idle_s > LOOK_AGAIN_S:
                    log.warning("no peer has the missing parts at the moment; waiting for one")
                    told = True
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
        """Sources to set to work now, the last resort only where nobody else works."""
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
        """Fetch runs from one source until it has none of those left, or fails."""
        asked: set[asyncio.Task[bool]] = set()
        try:
            while True:
                while len(asked) < (RUNS_AT_ONCE if source.name in self._quick else 1):
                    run = download.take(source.name, self._now())
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
        """Fetch one run; whether the source may be asked for another.

        A source that died or hangs is asked again after a rest; one that gave something false never is.
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
            log.warning("a source failed: %s", error)
            if isinstance(error, ProtocolError):
                self._bad.add(source.name)
            self._quick.discard(source.name)
            self._backoff.failed(source.name)
            self._drop(source, str(error))
            return False
        finally:
            download.give_back(source.name, run, self._now(), lacking=lacking)
        return True

    async def _bring(self, source: Source, run: ChunkRange, download: Download, progress: Progress | None) -> None:
        """A run of chunks from one source into the cache. Raises ProtocolError on the first that is not the file's own."""
        hashes = await self._hashes(source, run.file)
        async for number, data in source.chunks(run.file, run.first, run.count):
            if not await asyncio.to_thread(self._keep, hashes, run.file, number, data):
                raise ProtocolError(f"{source.name} gave a chunk of {run.file.name} that was tampered with")
            if download.came(run.file, number):
                self.fetched_bytes += len(data)
                if progress is not None:
                    progress(download.done_bytes, download.total_bytes)

    def _keep(self, hashes: bytes, file: FileContent, number: int, data: Buffer) -> bool:
        if not verify_chunk(hashes, number, data):
            return False
        self._cache.write(file, number, data)
        return True

    async def _hashes(self, source: Source, file: FileContent) -> bytes:
        known = self._cache.hashes(file)
        if known is None:
            known = bytes(await source.hashes(file))
            if not await asyncio.to_thread(verify_hashes, file, known):
                raise ProtocolError(f"{source.name} gave hashes of {file.name} that are not its own")
            self._cache.keep_hashes(file, known)
        return known
