"""Jobs on their way over the devices of a node."""

from __future__ import annotations

import struct
from types import SimpleNamespace
from typing import Any

from swarmnode.codec.body import HopSpec
from swarmnode.codec.messages import Mode, Open, Truncate
from swarmnode.codec.tensors import Codec, DType, TensorInfo
from swarmnode.compute.serving.cache import CacheBudget, Claim
from swarmnode.errors import ErrorCode
from swarmnode.ledger import Account, MemoryLedger
from swarmnode.net.addressing.addresses import Claimant
from swarmnode.plan.serving.scheduler import PassCost
from swarmnode.serving.job import ForwardHidden, Job, JobResult, Pass, Return
from swarmnode.serving.pipeline import Pipeline
from swarmnode.serving.session.session_memory import SessionMemory

INFO = TensorInfo(Codec.NONE, DType.FLOAT32, (1, 1, 1))
PASS_S = 1.0


def opening(start: int, end: int) -> Open:
    """A session of ten positions over these units."""
    return Open(bytes(16), 1, (HopSpec("peer", start, end),), 0, Mode.DRIVEN, rows=1, max_length=10)


class Recorder:
    """Stands in for a worker: a job waits until `finish`."""

    def __init__(self, start: int, end: int, cache_bytes: int = 100) -> None:
        self.runner: Any = SimpleNamespace(
            span=SimpleNamespace(
                start=start, end=end, width=1, vocab_size=100, family=SimpleNamespace(has_whole_copies=False)
            ),
            pool=SimpleNamespace(
                budget=CacheBudget(cache_bytes), positions_in=lambda free_bytes: free_bytes // (2 * (end - start))
            ),
            reservation_bytes=lambda rows, length, start, end: rows * length * (end - start),
        )
        self.opened: dict[int, tuple[int, int]] = {}
        self.jobs: list[Job] = []
        self.running = None
        self.scheduler = SimpleNamespace(cost=PassCost())
        self.clock = lambda: 0.0

    def open(self, session: int, *, start: int, end: int, **_reservation: Any) -> None:
        self.opened[session] = (start, end)

    def forget(self, session: int) -> None:
        del self.opened[session]

    def submit(self, job: Job) -> None:
        self.jobs.append(job)

    def finish(self, began_s: float, *, value: float = 0.0, **result: Any) -> None:
        """The job that came first."""
        job = self.jobs.pop(0)
        tensors = {} if result else {"tensors": ((INFO, struct.pack("<f", value)),)}
        job.done(job, JobResult(**tensors, **result), Pass(began_s, began_s + PASS_S, 1))


class Line:
    """A pipeline of three recorders over units [2, 8), and what came out of it."""

    def __init__(self) -> None:
        self.workers = [Recorder(2, 4), Recorder(4, 5), Recorder(5, 8)]
        self.pipeline = Pipeline(self.workers, MemoryLedger())  # type: ignore[arg-type]
        self.done: list[tuple[Job, JobResult, Pass]] = []

    def open(self, session: int, start: int, end: int) -> None:
        opened = opening(start, end)
        cache_bytes = self.pipeline.cache_bytes(opened)
        assert self.pipeline.memory.reserve(session, Claimant("", "peer"), cache_bytes=cache_bytes, journal_bytes=1)
        self.pipeline.open(session, opened)

    def submit(self, session: int, **options: Any) -> None:
        options = {"then": Return(), "stages_after": 1, **options}
        part = (INFO, struct.pack("<f", 9.0))
        job = Job(session, 0, 1, (part,), done=lambda *came: self.done.append(came), submitted_s=0.0, **options)
        self.pipeline.submit(job)


async def test_a_job_goes_from_device_to_device_and_what_was_asked_of_it_is_done_by_the_last() -> None:
    line = Line()
    line.open(1, 2, 8)
    line.submit(1, reorder=(0,), truncate=Truncate(1, 0))
    for place, worker in enumerate(line.workers):
        (job,) = worker.jobs
        assert job.reorder == (0,) and job.truncate == Truncate(1, 0), "each device has a cache of its own"
        assert job.stages_after == 3 - place and job.handed_on is (place > 0)
        assert isinstance(job.then, ForwardHidden if place < 2 else Return)
        worker.finish(10.0 * place, value=float(place))
    ((job, result, run),) = line.done
    assert struct.unpack("<f", bytes(job.parts[0][1])) == (1.0,) and len(result.tensors) == 1
    assert run == Pass(0.0, 20.0 + PASS_S, 1), "the time of all devices"


async def test_devices_work_for_different_sessions_at_once() -> None:
    line = Line()
    for session in (1, 2):
        line.open(session, 2, 8)
        line.submit(session)
    line.workers[0].finish(0.0)
    assert [[job.session for job in worker.jobs] for worker in line.workers] == [[2], [1], []]


async def test_a_session_over_some_of_the_units_passes_their_devices_only() -> None:
    line = Line()
    line.open(1, 4, 6)
    assert [worker.opened for worker in line.workers] == [{}, {1: (4, 5)}, {1: (5, 6)}]
    line.submit(1)
    line.workers[1].finish(0.0)
    line.workers[2].finish(1.0)
    assert len(line.done) == 1
    line.pipeline.forget(1)
    assert not any(worker.opened for worker in line.workers)
    assert all(worker.runner.pool.budget.claimed(Claim.PROMISED) == 0 for worker in line.workers)


async def test_what_one_device_made_of_an_input_nobody_else_is_blamed_for() -> None:
    line = Line()
    line.open(1, 2, 8)
    line.submit(1)
    line.workers[0].finish(0.0, error=ErrorCode.NOT_FINITE, bad_input=True)
    assert line.done.pop()[1].bad_input, "what came in was so"
    line.submit(1)
    line.workers[0].finish(0.0)
    line.workers[1].finish(0.0)
    line.workers[2].finish(0.0, error=ErrorCode.NOT_FINITE, bad_input=True)
    assert line.done.pop()[1] == JobResult(error=ErrorCode.NOT_FINITE)


async def test_a_device_in_the_middle_says_that_its_input_was_bad_and_that_was_made_here() -> None:
    line = Line()
    line.open(1, 2, 8)
    line.submit(1)
    line.workers[0].finish(0.0)
    line.workers[1].finish(0.0, error=ErrorCode.NOT_FINITE, bad_input=True)
    assert not line.done.pop()[1].bad_input and not line.workers[2].jobs


async def test_nothing_is_handed_on_for_a_session_that_is_over() -> None:
    line = Line()
    line.open(1, 2, 8)
    line.submit(1)
    line.pipeline.forget(1)
    line.workers[0].finish(0.0)
    assert not line.workers[1].jobs and len(line.done) == 1


async def test_the_device_that_has_least_bounds_what_a_session_may_have() -> None:
    line = Line()
    assert line.pipeline.cache_bytes(opening(2, 8)) == (20, 10, 30)
    assert line.pipeline.free_cache_tokens([]) == 100 // 6
    assert not line.pipeline.may_hold((20, 10, 101)) and line.pipeline.may_hold((100, 100, 100))


async def test_where_one_device_has_no_room_none_is_promised_any() -> None:
    ledger, budgets = MemoryLedger(), [CacheBudget(100), CacheBudget(50)]
    memory = SessionMemory(budgets, ledger)
    peer = Claimant("", "peer")
    assert memory.reserve(1, peer, cache_bytes=(40, 40), journal_bytes=5)
    assert not memory.reserve(2, peer, cache_bytes=(40, 20), journal_bytes=5)
    assert not memory.reserve(1, peer, cache_bytes=(90, 60), journal_bytes=9)
    assert [budget.claimed(Claim.PROMISED) for budget in budgets] == [40, 40]
    assert ledger.accounts()[Account.JOURNALS] == 5


async def test_only_who_has_what_is_lacking_gives_way() -> None:
    memory = SessionMemory([CacheBudget(100), CacheBudget(100)], MemoryLedger())
    for key, cache_bytes in enumerate([(60, 0), (40, 0), (0, 50), (0, 50)]):
        assert memory.reserve(key, Claimant("a", "a"), cache_bytes=cache_bytes, journal_bytes=0)
    assert memory.who_gives_way(Claimant("b", "b"), (0, 20), 0, idle=[0, 1, 2, 3]) == [2]
