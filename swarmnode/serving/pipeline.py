"""Pipelines: replicas of the span that a node serves, each a chain of workers on the node's devices.

    submit(job) -> worker -> hidden states -> worker -> ... -> job.done(result)

Each device has its own executor and memory, and computes for some sessions while others are at the next device (GPipe,
arXiv 1811.06965). States pass from device to device uncompressed, through the host's memory: they are small beside the
weights that each pass reads, and consumer cards seldom have another way to reach each other.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from msgspec.structs import replace

from swarmnode.codec.messages import Open
from swarmnode.codec.tensors import Codec
from swarmnode.compute.model.traced_model import LayerState
from swarmnode.compute.serving.cache import ANY_LENGTH, Claim, TensorKind
from swarmnode.compute.serving.states import SessionCopy
from swarmnode.config import ServerConfig
from swarmnode.errors import Busy, ErrorCode, ProtocolError
from swarmnode.ledger import MemoryLedger
from swarmnode.measuring.meters import SERVE
from swarmnode.metrics import table
from swarmnode.metrics.metric import Reading, Readings
from swarmnode.net.addressing.addresses import Claimant
from swarmnode.plan.compression import CodecSchedule
from swarmnode.plan.view import Span
from swarmnode.serving.job import ForwardHidden, Job, JobResult, Pass, Return, Sample
from swarmnode.serving.served_adapters import StageAdapters
from swarmnode.serving.session.opening import journal_bytes, units_of
from swarmnode.serving.session.session_memory import Promise, SessionMemory
from swarmnode.serving.worker import ComputeWatch
from swarmnode.swarm.records.announcement import MAX_BITS_BYTES

if TYPE_CHECKING:
    from swarmnode.serving.session.session import StageSession
    from swarmnode.serving.worker import Worker

EXACT = CodecSchedule(Codec.NONE)
OnDone = Callable[[Job, JobResult, Pass], None]


class Pipeline:
    """Replica of a span: its workers, and the sessions that it computes. Used on the event loop.

    `units_per_s` is its speed, relative to other replicas.
    """

    def __init__(self, workers: Sequence[Worker], journals: MemoryLedger, *, units_per_s: float = 1.0) -> None:
        self.workers = tuple(workers)
        self.span = Span(workers[0].runner.span.start, workers[-1].runner.span.end)
        self.watch = ComputeWatch()
        self.memory = SessionMemory([worker.runner.pool.budget for worker in workers], journals)
        self.clock = workers[0].clock
        self.pass_cost = workers[-1].scheduler.cost  # of the device whose outputs are sent on
        self.hidden_size: int = workers[0].runner.span.width
        self.vocab_size: int = workers[0].runner.span.vocab_size
        self.copies_caches: bool = workers[0].runner.span.family.has_whole_copies
        self._units_per_s = units_per_s
        self._passed: dict[int, tuple[Worker, ...]] = {}  # by session: the workers that its positions pass, in order

    def __repr__(self) -> str:
        return f"<Pipeline of {len(self._passed)} sessions over {self.workers!r}>"

    def __contains__(self, session: int | None) -> bool:
        return session in self._passed

    @property
    def load(self) -> float:
        """Load for comparing pipelines: the number of sessions with one more, divided by the pipeline's speed."""
        return (1 + len(self._passed)) / self._units_per_s

    # -- memory

    def cache_bytes(self, opened: Open) -> tuple[int, ...]:
        """Return the bytes of cache that a session takes on each device."""
        parts = ((worker.runner, _part(worker, opened)) for worker in self.workers)
        return tuple(
            runner.reservation_bytes(opened.rows, opened.max_length, *part) if part.units > 0 else 0
            for runner, part in parts
        )

    def may_hold(self, cache_bytes: Sequence[int]) -> bool:
        """Return whether a session with `cache_bytes` per device would fit if no other session were here."""
        limits = (worker.runner.pool.budget.limit_bytes for worker in self.workers)
        return all(size <= limit for size, limit in zip(cache_bytes, limits, strict=True))

    def free_cache_tokens(self, retained: Sequence[int]) -> int:
        """Return the positions that new sessions may reserve, on the device with the fewest. The caches of `retained`
        sessions count as free."""
        held = [self.memory.cache_bytes(session) for session in retained if session in self.memory]
        return min(
            worker.runner.pool.positions_in(
                worker.runner.pool.budget.free_bytes + sum(cache_bytes[device] for cache_bytes in held)
            )
            for device, worker in enumerate(self.workers)
        )

    # -- sessions

    def open(self, session: int, opened: Open, *, owner: str = "", weight: float = 1.0) -> None:
        """Make room for a session, before any of its jobs is run. Its memory must be promised already.

        For `owner` and `weight` see `Worker.open`.
        """
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
        """Begin the newly opened `session` with the first `length` positions of `source`; `reachable` must have returned
        `length`."""
        for worker in self._passed[session]:
            worker.begin(session, partial(worker.runner.fork, source, session, length))

    def snapshot(self, session: int) -> None:
        """Keep the session's recurrent states as they are now, if it has any, for `copy_out`."""
        for worker in self._passed[session] if self.copies_caches else ():
            worker.call("snapshot", partial(worker.runner.pool.copy_out, session, ANY_LENGTH, range(0)))

    async def copy_out(self, session: int, units: Span, most: int) -> SessionCopy | None:
        """Return a copy of what all devices keep of a session's `units` at its newest position up to `most` that all have; None if
        there is none."""
        kept = [(worker, _layers(worker, units)) for worker in self._passed.get(session, ())]
        while most > 0 and self.copies_caches:
            copies = [
                await worker.call("copy", partial(worker.runner.pool.copy_out, session, most, layers))
                for worker, layers in kept
                if layers
            ]
            if not copies or None in copies:
                return None
            found = [copy for copy in copies if copy is not None]
            most = min(copy.length for copy in found)
            if all(copy.length == most for copy in found):
                return SessionCopy(most, {key: part for copy in found for key, part in copy.parts.items()})
        return None

    def copy_bytes(self, units: Span, length: int) -> int:
        """Return the most bytes of a copy of one row's first `length` positions of `units`; 0 if the model keeps no recurrent
        states, whose sessions are not copied."""
        if not self.copies_caches:
            return 0
        return sum(worker.runner.pool.copy_bytes(_layers(worker, units), length) for worker in self.workers)

    def check_copy(self, units: Span, length: int, parts: Mapping[LayerState, TensorKind]) -> None:
        """Raise ProtocolError, with the name of a layer and its part, unless `parts` are what devices here would keep of the first
        `length` positions of `units`."""
        known: set[int] = set()
        for worker in self.workers:
            layers = _layers(worker, units)
            known.update(layers)
            worker.runner.pool.check_copy(
                layers, length, {key: part for key, part in parts.items() if key[0] in layers}
            )
        if strange := {layer for layer, _ in parts} - known:
            raise ProtocolError(f"layer {min(strange)} is not of the session")

    def copy_in(self, session: int, copy: SessionCopy) -> None:
        """Let the newly opened `session` begin with a copy that `check_copy` has accepted."""
        for worker in self._passed[session]:
            layers = _layers(worker, self.span)
            own = SessionCopy(copy.length, {key: part for key, part in copy.parts.items() if key[0] in layers})
            if layers:
                worker.begin(session, partial(worker.runner.pool.copy_in, session, own))

    def reachable(self, source: int, held: int, length: int) -> int:
        """Return how many of the first `length` positions of the session `source`, which holds at most `held` positions, can be
        copied, or stay if it is cut; 0 if none."""
        if source not in self:
            return 0
        pools = [worker.runner.pool for worker in self._passed[source]]
        while (common := min(pool.reachable(source, held, length) for pool in pools)) < length:
            length = common
        return length

    def extend(self, session: int, max_length: int) -> None:
        """Raise a session's number of positions to `max_length`. Their memory must be promised already."""
        for worker in self._passed[session]:
            worker.extend(session, max_length)

    def forget(self, session: int) -> None:
        """Drop the waiting jobs of a session that is over, and free its memory."""
        self.memory.release(session)
        self.watch.forget(session)
        for worker in self._passed.pop(session):
            worker.forget(session)

    @property
    def bits(self) -> bytes:
        """Class of equal bits of the whole span, from those of its devices' parts; empty if one has none."""
        parts = [worker.runner.bits for worker in self.workers]
        joined = parts[0] if len(parts) == 1 else hashlib.sha256(b"".join(parts)).digest()[:MAX_BITS_BYTES]
        return joined if all(parts) else b""

    def bits_of(self, session: int) -> bytes:
        """Return the class `bits` if all that the session has computed here is of it, else b""."""
        workers = self._passed.get(session, ())
        return self.bits if all(worker.runner.has_equal_bits(session) for worker in workers) else b""

    def submit(self, job: Job) -> None:
        """Queue a job of a session on the pipeline's devices; see `SessionPipeline.submit`."""
        self.watch.submitted(job.session, job.end, job.count, job.submitted_s)
        after = len(self._passed[job.session]) - 1
        self._submit(replace(job, stages_after=job.stages_after + after) if after else job, 0, None)

    def computed(self, job: Job, run: Pass) -> None:
        """Record that a job was computed in the pass `run`; see `SessionPipeline.computed`."""
        self.watch.computed(job.session, job.end, job.count, run.ended_s - run.began_s, self.clock())

    @property
    def stalled(self) -> bool:
        """Whether computing stands still, judged by the device that has been busy with one item for longest."""
        running = [worker.running for worker in self.workers]
        longest = max((one for one in running if one is not None), key=lambda one: one.seconds, default=None)
        return self.watch.stalled(self.clock(), longest)

    def readings(self) -> Readings:
        """Yield the metrics of the pipeline's devices."""
        for worker in self.workers:
            span, budget = worker.meter.label, worker.runner.pool.budget
            yield from worker.meter.readings()
            yield Reading(table.QUEUE, worker.queued, (span, SERVE))
            yield Reading(table.CACHE_SIZE, budget.limit_bytes, (span,))
            yield Reading(table.CACHE_RESERVED, budget.claimed(Claim.PROMISED), (span,))

    # -- from device to device

    def _submit(self, job: Job, place: int, began_s: float | None) -> None:
        """Submit a job to the worker at `place` among those that the session passes. The first worker began the job at
        `began_s`."""
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
        """Pass a worker's result to the next worker as input, or finish the job if it failed or the session is over."""
        job = replace(job, then=then, done=done)
        if not result.tensors or job.session not in self._passed:
            (done if began_s is None else partial(_finish, done, began_s))(job, result, run)
            return
        job = replace(job, parts=result.tensors, skip=0, stages_after=job.stages_after - 1, handed_on=True)
        self._submit(job, place + 1, run.began_s if began_s is None else began_s)


def _part(worker: Worker, opened: Open) -> Span:
    """Return the layers of a session that a worker has; the span has no positive length if it has none."""
    (start, end), span = units_of(opened), worker.runner.span
    return Span(max(start, span.start), min(end, span.end))


def _layers(worker: Worker, units: Span) -> range:
    """Return the numbers of the layers among `units` that a worker has; empty if it has none."""
    span = worker.runner.span
    return span.layers_of(max(units.start, span.start), min(units.end, span.end))


def _finish(done: OnDone, began_s: float, job: Job, result: JobResult, run: Pass) -> None:
    """Finish a job that passed other workers before. The last worker's input was made here, so no other peer is to
    blame for it."""
    done(job, replace(result, bad_input=False), run._replace(began_s=began_s))


GiveWay = Callable[[Claimant, int, Sequence[Promise]], object]
"""Ends work beside sessions whose peers hold more memory than a claimant that asks for some bytes, and has a share in the promises.

The memory is free a little later, when the claimant tries again.
"""


def no_way(_claimant: Claimant, _asked_bytes: int, _promises: Sequence[Promise]) -> None:
    """End nothing: there is no work beside sessions."""


@dataclass(eq=False)
class Replicas:
    """The pipelines of one stage.

    `sessions` are the server's sessions by id. Unused `adapters` and unused caches make room for one another.
    """

    pipelines: Sequence[Pipeline]
    sessions: Mapping[bytes, StageSession]
    config: ServerConfig
    adapters: StageAdapters

    def __post_init__(self) -> None:
        self.give_way_beside: GiveWay = no_way
        self.adapters.free_cache = self._free_retained
        runner = self.pipelines[0].workers[0].runner
        self.span: Span = self.pipelines[0].span
        self.vocab_size: int = runner.span.vocab_size
        self.position_limit: int | None = runner.span.position_limit  # for every session
        self.meter = self.pipelines[0].workers[0].meter

    def __repr__(self) -> str:
        return f"<Replicas {self.pipelines!r}>"

    def of(self, key: int) -> Pipeline:
        """Return the pipeline that computes the session with this key."""
        return next(pipeline for pipeline in self.pipelines if key in pipeline)

    @property
    def stalled(self) -> list[Pipeline]:
        """Pipelines (replicas of the node's layers) with a device that makes no progress."""
        return [pipeline for pipeline in self.pipelines if pipeline.stalled]

    @property
    def idle(self) -> list[StageSession]:
        """Sessions without input for `idle_s` and without waiting jobs, the longest idle first."""
        since_s = asyncio.get_running_loop().time() - self.config.idle_s
        waiting = {key for pipeline in self.pipelines for key in pipeline.watch.waiting}
        idle = [one for one in self.sessions.values() if one.moved_s <= since_s and one.key not in waiting]
        return sorted(idle, key=lambda session: session.moved_s)

    @property
    def free_cache_tokens(self) -> int:
        """Positions that a new session may have, on the replica with the most."""
        kept = [session.key for session in self.sessions.values() if session.retained]
        return max(pipeline.free_cache_tokens(kept) for pipeline in self.pipelines)

    def readings(self) -> Readings:
        """Yield the metrics of all devices of all replicas."""
        for pipeline in self.pipelines:
            yield from pipeline.readings()

    def describe(self, body: Open) -> tuple[str, ...]:
        """Describe the free memory, and the memory that a session asks for, in sentences."""
        budgets = [worker.runner.pool.budget for pipeline in self.pipelines for worker in pipeline.workers]
        free_bytes, limit_bytes = sum(one.free_bytes for one in budgets), sum(one.limit_bytes for one in budgets)
        asked_bytes = sum(self.pipelines[0].cache_bytes(body)) if body.index < len(body.route) else 0
        return (
            f"it needs {asked_bytes / 1e6:.1f} MB of memory here",
            f"{free_bytes / 1e6:.1f} of the {limit_bytes / 1e6:.1f} MB for texts are free now",
        )

    def reserve(self, key: int, claimant: Claimant, body: Open, *, beside: int | None = None) -> Pipeline:
        """Promise memory to a session, new or already here, if possible in the pipeline of the session `beside`.

        Returns the pipeline. Raises ProtocolError if the session can never fit here, Busy if it does not fit now.
        """
        able = [pipeline for pipeline in self.pipelines if key in pipeline] or self.pipelines
        able = [pipeline for pipeline in able if not pipeline.stalled]
        able.sort(key=lambda pipeline: (beside not in pipeline, pipeline.load))
        fitting = [pipeline for pipeline in able if pipeline.may_hold(pipeline.cache_bytes(body))]
        if able and not fitting:
            raise ProtocolError("it needs more memory than this machine lends", code=ErrorCode.TOO_LARGE)
        for pipeline in fitting:
            if _reserve(pipeline, key, claimant, body):
                return pipeline
        while fitting and (self.adapters.make_room() or self._make_room(fitting[0], key, claimant, body)):
            if _reserve(fitting[0], key, claimant, body):
                return fitting[0]
        if fitting:
            promises = [promise for pipeline in self.pipelines for promise in pipeline.memory.promises]
            cache_bytes, journal = _sizes(fitting[0], body)
            self.give_way_beside(claimant, sum(cache_bytes) + journal, promises)
        raise Busy("there is no memory left for it", retry_s=self.config.retry_s)

    def _free_retained(self) -> bool:
        """Free the kept session that was unused for longest. Returns False if no session is kept."""
        return _free_oldest([session for session in self.sessions.values() if session.retained])

    def _make_room(self, pipeline: Pipeline, key: int, claimant: Claimant, body: Open) -> bool:
        """End sessions to make room for a new one, and return whether any was ended.

        First goes an orphaned session, then one kept for another text, then sessions of peers that hold more memory
        than the claimant.
        """
        here = [session for session in self.sessions.values() if session.key in pipeline]
        orphans = [session for session in here if session.orphaned and session.key != key]
        if _free_oldest(orphans or [session for session in here if session.retained]):
            return True
        idle = [session.key for session in self.idle if session.key in pipeline]
        ended = pipeline.memory.who_gives_way(claimant, *_sizes(pipeline, body), idle)
        for session in [session for session in here if session.key in ended]:
            session.give_up(ErrorCode.BUSY, retry_s=self.config.retry_s)
        return bool(ended)


def _free_oldest(sessions: Sequence[StageSession]) -> bool:
    """Free the session that was unused for longest. Returns False if there is none."""
    if sessions:
        min(sessions, key=lambda session: session.moved_s).free()
    return bool(sessions)


def _reserve(pipeline: Pipeline, key: int, claimant: Claimant, body: Open) -> bool:
    """Reserve the memory that the session `key` needs in `pipeline`. Returns False if there is no room."""
    cache_bytes, journal = _sizes(pipeline, body)
    return pipeline.memory.reserve(key, claimant, cache_bytes=cache_bytes, journal_bytes=journal)


def _sizes(pipeline: Pipeline, body: Open) -> tuple[tuple[int, ...], int]:
    """Return the bytes of cache that a session takes on each device, and the bytes of its journal in host memory."""
    return pipeline.cache_bytes(body), journal_bytes(body, pipeline.hidden_size)
