"""Which source brings which chunks: decided purely, the clock is an argument."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from swarmnode.swarm.storage.content import FileContent

RUN_CHUNKS = 8  # asked for at once: few questions, and little lost with a source
LACKS_FOR_S = 5.0  # before a source that did not have a run is asked for it again
OVERDUE_S = 10.0  # after which a run that one source holds is given to an idle one too


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


class Download:
    """The chunks that are missing, the runs that nobody has taken, and those that sources hold."""

    def __init__(self, missing: Mapping[FileContent, Sequence[int]]) -> None:
        self._left = {(file, number) for file, numbers in missing.items() for number in numbers}
        self._waiting = [run for file, numbers in missing.items() for run in chunk_ranges(file, numbers)]
        self._held: dict[str, tuple[ChunkRange, float]] = {}
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
        """Give a source a run that it is not known to lack; None where there is none."""
        run = self._choose(source, now_s)
        if run is not None:
            if run in self._waiting:
                self._waiting.remove(run)
            self._held[source] = (run, now_s)
        return run

    def _choose(self, source: str, now_s: float) -> ChunkRange | None:
        for run in self._waiting:
            if not self._lacking(source, run, now_s):
                return run
        overdue = [held for held in self._held.values() if now_s - held[1] > OVERDUE_S]
        for run, _ in sorted(overdue, key=lambda held: held[1]):
            rest = self._rest(run)
            if len(self._holders(run)) == 1 and rest and not self._lacking(source, rest[0], now_s):
                return rest[0]
        return None

    def _lacking(self, source: str, run: ChunkRange, now_s: float) -> bool:
        return self._lacks.get((source, run.file, run.first), now_s) > now_s

    def _holders(self, run: ChunkRange) -> list[str]:
        return [
            source
            for source, (other, _) in self._held.items()
            if other.file == run.file and other.first < run.first + run.count and run.first < other.first + other.count
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

    def give_back(self, source: str, now_s: float, *, lacking: bool = False) -> None:
        """End a source's hold of its run: what has not come waits for others, unless another holds it too.

        With `lacking` the source said that it does not have the next chunk.
        """
        run, _ = self._held.pop(source)
        rest = self._rest(run)
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
