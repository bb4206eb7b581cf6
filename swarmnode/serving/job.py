"""Jobs: positions of one session that are to go through a stage, what becomes of them, and how they are joined and cut."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from swarmnode.codec.messages import Input, Truncate, Want
from swarmnode.codec.tensors import TensorInfo
from swarmnode.compute.serving.sampling import Drawn, Sampler
from swarmnode.errors import ErrorCode
from swarmnode.measuring.meters import DECODE, PREFILL
from swarmnode.net.interfaces import Buffer
from swarmnode.net.links.hop import Entry
from swarmnode.plan.serving.codec_schedule import CodecSchedule


@dataclass(frozen=True)
class ForwardHidden:
    """What becomes of a job's output in the middle of a route: hidden states, encoded for the next hop."""

    codecs: CodecSchedule


@dataclass(frozen=True)
class Sample:
    """At the last hop in RING mode: tokens for the positions from `first` on."""

    sampler: Sampler
    first: int


@dataclass(frozen=True)
class Return:
    """At the last hop in DRIVEN mode: the wanted outputs go to the client as they are."""


class Job(msgspec.Struct, frozen=True):
    """Encoded positions of a session to be run through the stage: [start, start + count). In `parts`, `skip` others come before
    them, and others may follow. They go on to `stages_after` more stages. A struct for speed, as a frame is."""

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
    truncate: Truncate | None = None  # what comes before it
    handed_on: bool = False  # from another device of this node, where its positions were counted

    @property
    def phase(self) -> str:
        """Under which name its time is counted: one position is a decode step, more are a part of a prompt."""
        return DECODE if self.count == 1 else PREFILL

    @property
    def end(self) -> int:
        """The position after the last."""
        return self.start + self.count

    @property
    def wanted(self) -> int:
        """How many of its last positions the head must compute."""
        if isinstance(self.then, ForwardHidden):
            return 0
        if isinstance(self.then, Sample):
            return max(0, min(self.count, self.end + 1 - self.then.first))
        return {Want.NOTHING: 0, Want.LAST: 1, Want.ALL: self.count}[self.want]

    @property
    def draws_by_grammar(self) -> bool:
        """Whether tokens are drawn that a grammar allows, which may take longer than the pass."""
        return isinstance(self.then, Sample) and self.then.sampler.follows_grammar and self.wanted > 0


class Pass(NamedTuple):
    """When the pass that a job was part of began and ended, on the clock of `Job.submitted_s`, and how many jobs it was of."""

    began_s: float
    ended_s: float
    jobs: int


class JobResult(msgspec.Struct, frozen=True):
    """What came of a job. `tokens` for Sample; `tensors`, one after another, for Forward and Return."""

    tensors: tuple[tuple[TensorInfo, Buffer], ...] = ()
    tokens: tuple[Drawn, ...] = ()
    error: ErrorCode | None = None
    bad_input: bool = False  # the error was in what came in, not in what was made of it


def entries_of(job: Job, tensors: Sequence[tuple[TensorInfo, Buffer]]) -> Iterator[Entry]:
    """What the next hop gets of a job: its positions, in one piece for each codec."""
    start = job.start
    for info, payload in tensors:
        count, is_first = info.shape[1], start == job.start
        want = job.want if start + count == job.end else Want.NOTHING
        body = Input(info, want=want, reorder=job.reorder if is_first else ())
        yield Entry(start, count, body, (payload,), job.truncate if is_first else None)
        start += count


def merge(first: Job, second: Job) -> Job | None:
    """Both jobs as one where that gives the same: adjoining positions, no reorder or wanted output between.

    This is what makes a replay of a thousand decode steps cost a few prefill passes.
    """
    held = sum(info.shape[1] for info, _ in first.parts)
    adjoining = first.end == second.start and first.skip + first.count == held
    alone = second.want == Want.ALL or second.reorder or second.skip or second.truncate
    if not adjoining or first.want != Want.NOTHING or alone:
        return None
    return replace(first, count=first.count + second.count, parts=first.parts + second.parts, want=second.want)


def cut(job: Job, count: int) -> tuple[Job, Job | None]:
    """The first `count` positions of a job, and the others. One whose outputs are all wanted, as one answer, stays whole."""
    if job.count <= count or job.want == Want.ALL:
        return job, None
    rest = replace(
        job, start=job.start + count, count=job.count - count, skip=job.skip + count, reorder=(), truncate=None
    )
    return replace(job, count=count, want=Want.NOTHING), rest


def take(jobs: deque[Job], count: int) -> Job:
    """The next positions of a session as one job: `count` of them, unless the jobs in front cannot be joined or cut to that."""
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
