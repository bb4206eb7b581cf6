"""What the sessions of a stage want computed: it takes what is waiting, runs it as one batch, and hands the encoded results on.

    loop:    submit(job) ------.                             .----> job.done(result)
    thread:                   put -> take -> decode -> run -> encode

The thread is the device's executor (`compute/executor.py`). All tensors live on it: payloads are decoded, sampled and encoded
there, never on the loop. What goes together, and how much of a prompt, is decided in `plan/serving/scheduler.py`; jobs are joined
and cut (`job.py`) as that wants it.
"""

from __future__ import annotations

import asyncio
import logging
import operator
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from swarmnode.codec.tensors import Codec
from swarmnode.compress.codecs import decode, encode
from swarmnode.compute.device_fault import is_device_fault
from swarmnode.compute.executor import Executor, Urgency, WorkItem
from swarmnode.compute.serving.runner import WANT_ALL, WANT_LAST, WANT_NOTHING, StepInput, is_finite
from swarmnode.compute.serving.runner import StepOutput as Output
from swarmnode.compute.serving.sampling import sample
from swarmnode.compute.serving.window import LONGEST_SHARED
from swarmnode.compute.speed import PREFILL_POSITIONS, Speeds
from swarmnode.compute.stopwatch import Stopwatch
from swarmnode.errors import ErrorCode, LocalError, ProtocolError
from swarmnode.plan.serving.scheduler import PassScheduler
from swarmnode.plan.view import Span
from swarmnode.roles.measuring.meters import DECODE, FORWARD, PREFILL, SERVE, StageMeter
from swarmnode.roles.serving.compute_watch import Running
from swarmnode.roles.serving.job import ForwardHidden, Job, JobResult, Pass, Return, take

if TYPE_CHECKING:
    from swarmnode.compute.serving.runner import StageRunner

log = logging.getLogger(__name__)
T = TypeVar("T")


OnLonePass = Callable[[str, int, int, float], None]
"""(phase, positions, units, seconds) of a pass of one session alone; called on the compute thread"""
OnJobs = Callable[[Sequence[Job]], None]


class _Batch(WorkItem):
    """Jobs of several sessions that go through the model together."""

    def __init__(self, jobs: Sequence[Job], run: OnJobs, give_up: OnJobs) -> None:
        owner = f"session {jobs[0].session}" if len(jobs) == 1 else f"{len(jobs)} sessions"
        super().__init__(jobs[0].phase, urgency=Urgency.FORWARD, owner=owner, size=sum(job.count for job in jobs))
        self._jobs = jobs
        self._run = run
        self._give_up = give_up

    def run(self) -> None:
        with torch.inference_mode():
            self._run(self._jobs)

    def abandon(self, error: Exception) -> None:
        self._give_up(self._jobs)


class Worker:
    """What sessions want computed on one span: a source of work for the device's executor."""

    def __init__(self, runner: StageRunner, executor: Executor, *, chunk_tokens: int = 128) -> None:
        self.runner = runner
        self.clock = executor.clock
        self.scheduler = PassScheduler(longest_step=LONGEST_SHARED, longest_chunk=chunk_tokens)
        self._executor = executor
        self._stopwatch = Stopwatch(runner.span.device, clock=executor.clock)
        self._waiting: dict[int, deque[Job]] = {}
        self.steps = 0
        self.positions = 0
        self.on_lone_pass: OnLonePass = lambda _phase, _positions, _units, _seconds: None
        self.meter = StageMeter(Span(runner.span.start, runner.span.end), SERVE)

    def __repr__(self) -> str:
        return f"<Worker {self.runner!r} after {self.steps} passes, {len(self._waiting)} sessions waiting>"

    @property
    def queued(self) -> int:
        """Jobs that wait."""
        return sum(len(jobs) for jobs in list(self._waiting.values()))

    @property
    def running(self) -> Running | None:
        """What the device computes at the moment, which may be somebody else's (training, say)."""
        item = self._executor.running
        return None if item is None else Running(self._executor.stalled_s, isinstance(item, _Batch))

    def expect(self, speeds: Speeds) -> None:
        """What passes should cost, until some were run."""
        for positions, units_per_s in ((1, speeds.decode_units_per_s), (PREFILL_POSITIONS, speeds.prefill_units_per_s)):
            if units_per_s:
                self.scheduler.ran(positions, positions * self.meter.span.units / units_per_s)

    async def start(self) -> None:
        """Take part in the executor's turns. Raises ExecutorDied."""
        await self._executor.add(self)

    def submit(self, job: Job) -> None:
        """Queue a job; `job.done` is called on the loop, also where it comes to nothing."""
        self._executor.submit(self, job)

    def call(self, function: Callable[[], T]) -> asyncio.Future[T]:
        """Run a function on the compute thread, before the jobs that wait. Raises ExecutorDied."""
        return self._executor.call(Urgency.CONTROL, torch.inference_mode()(function), kind="serving")

    def open(self, session: int, *, owner: str = "", **reservation: Any) -> None:
        """Make room for a session (`StageRunner.open`) before any job of it is run; the caller has seen that it fits. Its time is
        counted for the `owner`, where somebody is named."""

        def make_room() -> None:
            if owner:
                self.scheduler.open(session, owner)
            self.runner.open(session, **reservation)

        self.call(make_room)

    def forget(self, session: int) -> None:
        """Drop what waits for a session and free its cache."""

        def drop() -> None:
            self._waiting.pop(session, None)
            self.scheduler.drop(session)
            self.runner.close(session)

        self.call(drop)

    async def close(self) -> None:
        """Leave the executor after the pass that is running."""
        await self._executor.remove(self)

    # -- below: the compute thread

    def put(self, item: Job) -> None:
        self._waiting.setdefault(item.session, deque()).append(item)
        self.scheduler.add(item.session, item.count, stages_after=item.stages_after)

    def take(self) -> WorkItem | None:
        """The next pass."""
        jobs = [self._take(session, count) for session, count in self.scheduler.next().items()]
        if not jobs:
            return None
        self.scheduler.took({job.session: job.count for job in jobs})
        return _Batch(jobs, self._run, self._give_up)

    def _take(self, session: int, count: int) -> Job:
        jobs = self._waiting[session]
        job = take(jobs, count)
        if not jobs:
            del self._waiting[session]
        return job

    def abandon(self, items: Iterable[Job], error: Exception) -> None:
        self._give_up([*(job for jobs in self._waiting.values() for job in jobs), *items])
        self._waiting.clear()

    def _give_up(self, jobs: Sequence[Job]) -> None:
        """Tell on the loop that these jobs come to nothing, for a reason of this node's own."""
        now_s = self.clock()
        _deliver(jobs, [JobResult(error=ErrorCode.INTERNAL)] * len(jobs), Pass(now_s, now_s, len(jobs)))

    def _run(self, batch: Sequence[Job]) -> None:
        results = self._compute(batch)
        run = Pass(self._executor.began_s, self.clock(), len(batch))
        self.scheduler.ran(len(batch) * max(job.count for job in batch), run.ended_s - run.began_s)
        self._executor.post(_deliver, batch, results, run)

    def _compute(self, batch: Sequence[Job]) -> list[JobResult]:
        works: list[StepInput] = []
        ready: list[Job] = []
        failed: dict[int, JobResult] = {}
        for job in batch:
            try:
                works.append(self._decode(job))
                ready.append(job)
            except ProtocolError as error:
                failed[id(job)] = JobResult(error=error.code, bad_input=True)
            except Exception as error:
                failed[id(job)] = _failure(job, error)
        outcomes = self._pass(works) if works else []
        done = {id(job): self._finish(job, outcome) for job, outcome in zip(ready, outcomes, strict=True)}
        self.steps += 1
        self.positions += sum(job.count for job in ready)
        for job in ready:
            self.meter.note_hop(job.phase, self.clock() - job.submitted_s)
        return [failed.get(id(job)) or done[id(job)] for job in batch]

    def _pass(self, works: Sequence[StepInput]) -> list[Output | Exception]:
        phase = DECODE if min(work.count for work in works) == 1 else PREFILL
        tokens = [work.x.shape[0] * work.count for work in works]
        units = [self.runner.units(work.session_id) for work in works]
        unit_tokens = sum(map(operator.mul, tokens, units))
        outcomes: list[Output | Exception] = []

        def told(pass_s: float) -> None:
            self.meter.note_pass(phase, pass_s, microbatches=len(works), tokens=sum(tokens), unit_tokens=unit_tokens)
            if len(works) == 1 and not isinstance(outcomes[0], Exception):
                self.on_lone_pass(phase, works[0].count, units[0], pass_s)

        with self._stopwatch.timing(told):
            outcomes += self.runner.run_each(works)
        return outcomes

    def _finish(self, job: Job, outcome: Output | Exception) -> JobResult:
        """What came of a job in a pass; its own error is nobody else's."""
        try:
            if isinstance(outcome, Exception):
                raise outcome
            return self._encode(job, outcome.output)
        except Exception as error:
            return _failure(job, error)

    def _decode(self, job: Job) -> StepInput:
        if job.session not in self.runner:
            raise LocalError("its cache could not be opened")
        # The session has checked the shapes: whatever the codec, no payload makes more than they say.
        tensors = [decode(info, payload, device=self.runner.span.device) for info, payload in job.parts]
        x = tensors[0] if len(tensors) == 1 else torch.cat(tensors, dim=1)
        x = x[:, job.skip : job.skip + job.count]
        if x.is_floating_point():
            if not is_finite(x):
                raise ProtocolError("the input is not finite", code=ErrorCode.NOT_FINITE)
            x = x.to(self.runner.span.dtype)
        elif int(x.min()) < 0 or int(x.max()) >= self.runner.span.vocab_size:
            raise ProtocolError("a token id is not in the vocabulary", code=ErrorCode.INVALID_REQUEST)
        wanted = job.wanted
        want = WANT_NOTHING if wanted == 0 else WANT_LAST if wanted == 1 else WANT_ALL
        truncate_to = None if job.truncate is None else job.truncate.to
        return StepInput(job.session, x, want=want, reorder=job.reorder, start=job.start, truncate_to=truncate_to)

    def _encode(self, job: Job, y: torch.Tensor) -> JobResult:
        """`y` is hidden_BTH, or at the last hop logits_BKV (hidden_BTH where the client holds the head)."""
        then = job.then
        if isinstance(then, ForwardHidden):
            info, payload = encode(y, then.codec)
            self.meter.note_tensors(then.codec, FORWARD, raw_bytes=y.nbytes, encoded_bytes=len(payload))
            return JobResult(tensor=(info, payload))
        wanted = job.wanted
        y = y[:, y.shape[1] - wanted :]
        if not is_finite(y):
            return JobResult(error=ErrorCode.NOT_FINITE)
        if isinstance(then, Return):
            return JobResult(tensor=encode(y, Codec.NONE)) if wanted else JobResult()
        first = job.end - wanted + 1  # logits at p draw the token at p + 1
        tokens = ((first + column, sample(y[:, column], then.sampling, first + column)) for column in range(wanted))
        return JobResult(tokens=tuple((position, tuple(ids_B.tolist())) for position, ids_B in tokens))


def _failure(job: Job, error: Exception) -> JobResult:
    """What a session hears of an error of this node's own. Raises one that all must hear of."""
    if is_device_fault(error):
        raise error
    log.error("session %d failed at position %d", job.session, job.start, exc_info=error)
    return JobResult(error=ErrorCode.INTERNAL)


def _deliver(batch: Sequence[Job], results: Sequence[JobResult], run: Pass) -> None:
    for job, result in zip(batch, results, strict=True):
        job.done(job, result, run)
