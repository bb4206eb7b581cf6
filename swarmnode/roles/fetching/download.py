"""Which source brings which chunks: decided purely, the clock is an argument."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from swarmnode.swarm.storage.content import FileContent

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
