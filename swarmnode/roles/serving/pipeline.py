"""A replica of the span that a node serves: workers on the devices over which it is laid, one behind another.

    submit(job) -> worker -> hidden states -> worker -> ... -> job.done(result)

Each device has its own executor and its own memory, and computes for some sessions while others are at the next one (GPipe,
arXiv 1811.06965). What goes from device to device is what a hop would send, uncompressed, through the host's memory: it is small
beside the weights that each pass reads, and cards at home seldom reach each other in another way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from msgspec.structs import replace

from swarmnode.codec.messages import Open
from swarmnode.codec.tensors import Codec
from swarmnode.compute.serving.cache_budget import Claim
from swarmnode.ledger import MemoryLedger
from swarmnode.metrics import table
from swarmnode.metrics.metric import Reading, Readings
from swarmnode.plan.serving.codec_schedule import CodecSchedule
from swarmnode.plan.view import Span
from swarmnode.roles.measuring.meters import SERVE
from swarmnode.roles.serving.compute_watch import ComputeWatch
from swarmnode.roles.serving.job import ForwardHidden, Job, JobResult, Pass, Return, Sample
from swarmnode.roles.serving.opened import units_of
from swarmnode.roles.serving.session_memory import SessionMemory

if TYPE_CHECKING:
    from swarmnode.roles.serving.worker import Worker

EXACT = CodecSchedule(Codec.NONE)
OnDone = Callable[[Job, JobResult, Pass], None]


class Pipeline:
    """The sessions that are computed by one replica. Used on the loop. `units_per_s` is its speed as against other replicas'."""

    def __init__(self, workers: Sequence[Worker], journals: MemoryLedger, *, units_per_s: float = 1.0) -> None:
        self.workers = tuple(workers)
        self.span = Span(workers[0].runner.span.start, workers[-1].runner.span.end)
        self.watch = ComputeWatch()
        self.memory = SessionMemory([worker.runner.pool.budget for worker in workers], journals)
        self.clock = workers[0].clock
        self.pass_cost = workers[-1].scheduler.cost  # of the device whose outputs are sent on
        self.hidden_size: int = workers[0].runner.span.hidden_size
        self._units_per_s = units_per_s
        self._passed: dict[int, tuple[Worker, ...]] = {}  # by session: those whose units its positions pass, in order

    def __repr__(self) -> str:
        return f"<Pipeline of {len(self._passed)} sessions over {self.workers!r}>"

    def __contains__(self, session: int | None) -> bool:
        return session in self._passed

    @property
    def load(self) -> float:
        """Sessions for its speed, with one more."""
        return (1 + len(self._passed)) / self._units_per_s

    # -- memory

    def cache_bytes(self, opened: Open) -> tuple[int, ...]:
        """Return what a session takes of each device's cache, in bytes."""
        parts = ((worker.runner, _part(worker, opened)) for worker in self.workers)
        return tuple(
            runner.reservation_bytes(opened.rows, opened.max_length, *part) if part.units > 0 else 0
            for runner, part in parts
        )

    def may_hold(self, cache_bytes: Sequence[int]) -> bool:
        """Whether there would be room if there were nobody else."""
        limits = (worker.runner.pool.budget.limit_bytes for worker in self.workers)
        return all(size <= limit for size, limit in zip(cache_bytes, limits, strict=True))

    def free_cache_tokens(self, kept: Sequence[int]) -> int:
        """Positions that new sessions may reserve, on the device where they are fewest; those of `kept` sessions among them."""
        held = [self.memory.cache_bytes(session) for session in kept if session in self.memory]
        return min(
            (worker.runner.pool.budget.free_bytes + sum(cache_bytes[device] for cache_bytes in held))
            // max(1, worker.runner.span.cache_bytes_per_token)
            for device, worker in enumerate(self.workers)
        )

    # -- sessions

    def open(self, session: int, opened: Open, *, owner: str = "", weight: float = 1.0) -> None:
        """Make room for a session before any job of it is run; its memory is promised already. For `owner` and `weight` see
        `Worker.open`."""
        parts = {worker: part for worker in self.workers if (part := _part(worker, opened)).units > 0}
        for worker, part in parts.items():
            worker.open(
                session,
                owner=owner,
                weight=weight,
                start=part.start,
                end=part.end,
                rows=opened.rows,
                max_length=opened.max_length,
                padding=opened.padding,
                adapter=opened.adapter,
            )
        self._passed[session] = tuple(parts)

    def fork(self, source: int, session: int, length: int) -> None:
        """Let a session that was just opened begin as another one does, whose first positions `keeps` says are here."""
        for worker in self._passed[session]:
            worker.fork(source, session, length)

    def keeps(self, source: int, held: int, length: int) -> bool:
        """Whether of a session here, which holds at most so many positions, the first `length` can be copied."""
        return source in self and all(worker.runner.pool.keeps(held, length) for worker in self._passed[source])

    def extend(self, session: int, max_length: int) -> None:
        """Let a session have so many positions; they are promised already."""
        for worker in self._passed[session]:
            worker.extend(session, max_length)

    def forget(self, session: int) -> None:
        """A session is over: drop what waits for it, and free its memory."""
        self.memory.release(session)
        self.watch.forget(session)
        for worker in self._passed.pop(session):
            worker.forget(session)

    def submit(self, job: Job) -> None:
        """Queue a job; see `SessionPipeline`."""
        self.watch.submitted(job.session, job.end, job.count, job.submitted_s)
        after = len(self._passed[job.session]) - 1
        self._submit(replace(job, stages_after=job.stages_after + after) if after else job, 0, None)

    def computed(self, job: Job, run: Pass) -> None:
        """Note that a job came back; see `SessionPipeline`."""
        self.watch.computed(job.session, job.end, job.count, run.ended_s - run.began_s, self.clock())

    @property
    def stalled(self) -> bool:
        """Whether computing stands still, as far as the device tells that has been busy with one thing for longest."""
        running = [worker.running for worker in self.workers]
        longest = max((one for one in running if one is not None), key=lambda one: one.seconds, default=None)
        return self.watch.stalled(self.clock(), longest)

    def readings(self) -> Readings:
        """What its devices do and hold."""
        for worker in self.workers:
            span, budget = worker.meter.label, worker.runner.pool.budget
            yield from worker.meter.readings()
            yield Reading(table.QUEUE, worker.queued, (span, SERVE))
            yield Reading(table.CACHE_SIZE, budget.limit_bytes, (span,))
            yield Reading(table.CACHE_RESERVED, budget.claimed(Claim.PROMISED), (span,))

    # -- from device to device

    def _submit(self, job: Job, place: int, began_s: float | None) -> None:
        """To the worker at this place of those that the session passes; the first of them began with the job at `began_s`."""
        workers = self._passed[job.session]
        if place < len(workers) - 1:
            done = partial(self._hand_on, place, job.then, job.done, began_s)
            job = replace(job, then=ForwardHidden(EXACT), done=done)
        elif began_s is not None:
            job = replace(job, done=partial(_finish, job.done, began_s))
        workers[place].submit(job)

    def _hand_on(
        self,
        place: int,
        then: ForwardHidden | Sample | Return,
        done: OnDone,
        began_s: float | None,
        job: Job,
        result: JobResult,
        run: Pass,
    ) -> None:
        """What a worker made of a job is the next one's input, unless it failed or the session is over."""
        job = replace(job, then=then, done=done)
        if not result.tensors or job.session not in self._passed:
            (done if began_s is None else partial(_finish, done, began_s))(job, result, run)
            return
        job = replace(job, parts=result.tensors, skip=0, stages_after=job.stages_after - 1, handed_on=True)
        self._submit(job, place + 1, run.began_s if began_s is None else began_s)


def _part(worker: Worker, opened: Open) -> Span:
    """Return those of a session's units that a worker has; not above 0 of them if it has none."""
    (start, end), span = units_of(opened), worker.runner.span
    return Span(max(start, span.start), min(end, span.end))


def _finish(done: OnDone, began_s: float, job: Job, result: JobResult, run: Pass) -> None:
    """A job that other workers had before is done, or failed. What came into this one was made here: nobody else is to blame."""
    done(job, replace(result, bad_input=False), run._replace(began_s=began_s))
