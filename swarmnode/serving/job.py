"""Jobs: positions of one session that are to pass through a stage, their results, and how jobs are joined and cut."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from swarmnode.codec.messages import Input, Truncate, Want
from swarmnode.codec.tensors import TensorInfo
from swarmnode.compute.serving.sampler import Drawn, Guess, Sampler
from swarmnode.errors import ErrorCode
from swarmnode.links.hop import Entry
from swarmnode.measuring.meters import DECODE, PREFILL
from swarmnode.net.interfaces import Buffer
from swarmnode.plan.compression import CodecSchedule


@dataclass(frozen=True)
class ForwardHidden:
    """Use of a job's output in the middle of a route: hidden states, encoded for the next hop."""

    codecs: CodecSchedule


@dataclass(frozen=True)
class Sample:
    """Use of a job's output at the last hop in RING mode: tokens drawn for the positions from `first` on. `ahead` says that the
    layer beside the model's head may guess the tokens behind them."""

    sampler: Sampler
    first: int
    ahead: bool = False


@dataclass(frozen=True)
class Return:
    """Use of a job's output at the last hop in DRIVEN mode: the wanted outputs go to the client as they are."""


class Job(msgspec.Struct, frozen=True):
    """Encoded positions [start, start + count) of a session that are to pass through the stage.

    In `parts`, `skip` positions come before them, and others may follow. Afterwards they pass `stages_after` more
    stages. A msgspec struct for speed, as frames are.

    The last `guessed` positions up to the end hold guesses of the `turn`. Only the last hop has their `guesses`.
    """

    session: int
    start: int
    count: int
    parts: tuple[tuple[TensorInfo, Buffer], ...]
    then: ForwardHidden | Sample | Return
    done: Callable[[Job, JobResult, Pass], None]
    submitted_s: float  # on the executor's clock
    want: Want = Want.NOTHING
    reorder: tuple[int, ...] = ()
    skip: int = 0
    stages_after: int = 0
    truncate: Truncate | None = None  # comes before these positions
    handed_on: bool = False  # from another device of this node, which counted its positions
    guessed: int = 0
    turn: int = 0
    back_to: int | None = None  # guesses from this position on are taken back before these positions
    guesses: tuple[Guess, ...] = ()

    @property
    def phase(self) -> str:
        """Label of its time in the metrics: one position is a decode step, also with guesses after it; several are part
        of a prompt."""
        return DECODE if self.count == 1 or self.guessed else PREFILL

    @property
    def first_guessed(self) -> int:
        """First of its positions that holds a guess; `end` if none does."""
        return max(self.start, self.end - self.guessed)

    @property
    def cut_to(self) -> int | None:
        """Number of positions that the cache is cut back to before these; None if it is not."""
        back_to = [] if self.back_to is None else [self.back_to]
        return min([*back_to, *([] if self.truncate is None else [self.truncate.to])], default=None)

    @property
    def end(self) -> int:
        """Position after the job's last position."""
        return self.start + self.count

    @property
    def wanted(self) -> int:
        """Number of its last positions that the head must compute."""
        if isinstance(self.then, ForwardHidden):
            return 0
        if isinstance(self.then, Sample):
            return max(0, min(self.count, self.end + 1 - self.then.first))
        return {Want.NOTHING: 0, Want.LAST: 1, Want.ALL: self.count}[self.want]

    @property
    def guesses_ahead(self) -> bool:
        """Whether the prediction layer may guess behind the tokens that are drawn."""
        return isinstance(self.then, Sample) and self.then.ahead and self.wanted > 0

    @property
    def draws_by_grammar(self) -> bool:
        """Whether tokens are drawn that a grammar allows, which may take longer than the pass."""
        return isinstance(self.then, Sample) and self.then.sampler.follows_grammar and self.wanted > 0


class Pass(NamedTuple):
    """The pass that a job was part of: begin and end on the clock of `Job.submitted_s`, and its number of jobs."""

    began_s: float
    ended_s: float
    jobs: int


class JobResult(msgspec.Struct, frozen=True):
    """Result of a job: `tokens` for Sample; `tensors`, one after another, for ForwardHidden and Return; or an `error`."""

    tensors: tuple[tuple[TensorInfo, Buffer], ...] = ()
    tokens: tuple[Drawn, ...] = ()
    error: ErrorCode | None = None
    bad_input: bool = False  # the error was in the job's input, not in computing it


def entries_of(job: Job, tensors: Sequence[tuple[TensorInfo, Buffer]]) -> Iterator[Entry]:
    """Yield a job's positions as entries for the next hop, one entry for each codec."""
    start = job.start
    for info, payload in tensors:
        count, is_first = info.shape[1], start == job.start
        want = job.want if start + count == job.end else Want.NOTHING
        guessed = max(0, job.guessed - (job.end - start - count))
        body = Input(info, want=want, reorder=job.reorder if is_first else (), guessed=guessed, turn=job.turn)
        yield Entry(start, count, body, (payload,), job.truncate if is_first else None)
        start += count


def merge(first: Job, second: Job) -> Job | None:
    """Join two jobs if the result is the same: adjoining positions, no reorder or wanted output between. None if it is
    not.

    Therefore a replay of a thousand decode steps costs a few prefill passes.
    """
    held = sum(info.shape[1] for info, _ in first.parts)
    adjoining = first.end == second.start and first.skip + first.count == held
    alone = second.want == Want.ALL or second.reorder or second.skip or second.cut_to is not None
    if not adjoining or first.want != Want.NOTHING or alone:
        return None
    return replace(
        first,
        count=first.count + second.count,
        parts=first.parts + second.parts,
        want=second.want,
        guessed=second.guessed,
        turn=second.turn,
        guesses=first.guesses + second.guesses,
    )


def cut(job: Job, count: int) -> tuple[Job, Job | None]:
    """Split a job into its first `count` positions and the rest.

    The rest is None if the job has no more positions, or if all its outputs are wanted, as one answer: it then stays
    whole.
    """
    if job.count <= count or job.want == Want.ALL:
        return job, None
    rest = replace(
        job,
        start=job.start + count,
        count=job.count - count,
        skip=job.skip + count,
        reorder=(),
        truncate=None,
        back_to=None,
        guesses=tuple(guess for guess in job.guesses if guess.position >= job.start + count),
    )
    guesses = job.guesses[: len(job.guesses) - len(rest.guesses)]
    guessed = max(0, job.guessed - rest.count)
    return replace(job, count=count, want=Want.NOTHING, guessed=guessed, guesses=guesses), rest


def drop_from(jobs: deque[Job], position: int) -> int:
    """Remove the positions from `position` on from the waiting jobs of a session. Returns their number."""
    dropped = 0
    while jobs and jobs[-1].end > position:
        job = jobs.pop()
        kept = max(0, position - job.start)
        dropped += job.count - kept
        if kept:
            jobs.append(cut(job, kept)[0])
    return dropped


def next_job(jobs: deque[Job], count: int) -> Job:
    """Take the next `count` positions of a session as one job; fewer or more if the first jobs cannot be joined or cut
    to that."""
    job, rest = cut(jobs.popleft(), count)
    while rest is None and jobs and job.count < count:
        following, rest = cut(jobs[0], count - job.count)
        merged = merge(job, following)
        if merged is None:
            return job
        job = merged
        jobs.popleft()
    if rest is not None:
        jobs.appendleft(rest)
    return job
