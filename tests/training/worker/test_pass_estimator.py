"""What a microbatch will take, before any was computed, and what becomes of it when passes were timed."""

from __future__ import annotations

import pytest
import torch

from swarmnode.compute.graph.costs.estimate import UnitEstimate
from swarmnode.compute.graph.costs.rates import MATMUL, REFERENCE, ComputeWork, Rates
from swarmnode.compute.stopwatch import PREFILL_GAIN, Throttle
from swarmnode.compute.training.learner import Learner
from swarmnode.errors import CheckpointError, NotFinite
from swarmnode.ledger import MemoryLedger
from swarmnode.plan.view import Span
from swarmnode.swarm.records.run import Run
from swarmnode.training.worker.memory import DummyRun, Estimates, PassEstimator, UnitTime
from tests.compute.training.toy import ToySegment
from tests.peer.training_swarm import toy_batches, toy_run

RUN = toy_run(toy_batches(), 3)
WORK = ComputeWork({MATMUL: REFERENCE.per_s[MATMUL]})  # a second
CPU = torch.device("cpu")


def estimates(_run: Run) -> list[UnitEstimate]:
    """Units whose forward pass takes 1, 2, 3 seconds, and whose backward pass takes two."""
    works = [ComputeWork({MATMUL: (unit + 1) * WORK.amounts[MATMUL]}) for unit in range(3)]
    return [UnitEstimate(work, WORK + WORK, 0, 0, 0) for work in works]


def unknown(_run: Run) -> list[UnitEstimate]:
    raise CheckpointError("its own code needs real numbers")


def as_estimated(_learner: Learner, _start: int, _end: int) -> float:
    raise CheckpointError("nobody but the data knows")


def estimator(
    estimates: Estimates = estimates,
    dummy_run: DummyRun = as_estimated,
    *,
    asked: list[torch.device] | None = None,
    throttle: Throttle = Throttle(),
    limit_bytes: int | None = None,
) -> PassEstimator:
    def measure(device: torch.device, _dtype: torch.dtype | None) -> Rates:
        if asked is not None:
            asked.append(device)
        return REFERENCE

    return PassEstimator(CPU, estimates, measure, dummy_run, MemoryLedger(limit_bytes), throttle=throttle)


def learner(start: int = 0, end: int = 3, *, recompute: bool = False) -> Learner:
    return Learner(ToySegment(start, end), RUN, recompute=recompute)


def test_a_unit_takes_its_share_of_the_work_of_the_span() -> None:
    asked: list[torch.device] = []
    node = estimator(asked=asked)
    assert asked == [], "nothing is measured before a run begins"
    assert node.unit_s(learner(1)) == pytest.approx((2 + 2 + 3 + 2) / 2)
    assert node.unit_s(learner(1, recompute=True)) == pytest.approx((2 + 2 + 2 + 3 + 3 + 2) / 2)
    assert asked == [CPU], "once"


def test_a_device_that_is_lent_for_half_of_the_time_takes_twice_as_long() -> None:
    half = Throttle(share=0.5)
    assert estimator(throttle=half).unit_s(learner(0, 1)) == pytest.approx(6.0)
    assert estimator(dummy_run=lambda *_: 4.0, throttle=half).unit_s(learner(0, 1)) == pytest.approx(8.0)


def test_a_device_that_is_lent_as_a_slower_one_takes_as_long_as_that_does() -> None:
    """There and back a microbatch costs three passes of a prompt chunk."""
    chunks = RUN.positions / PREFILL_GAIN
    assert estimator(throttle=Throttle(chunks)).unit_s(learner(0, 1)) == pytest.approx(3.0)
    assert estimator(throttle=Throttle(chunks / 100)).unit_s(learner(0, 2)) == pytest.approx(300.0)
    assert estimator(throttle=Throttle(chunks * 100)).unit_s(learner(0, 1)) == pytest.approx(3.0)


def test_nothing_is_expected_of_work_that_cannot_be_estimated() -> None:
    asked: list[torch.device] = []
    assert estimator(unknown, asked=asked).unit_s(learner()) == 0.0
    assert asked == []


def test_nothing_is_measured_where_there_is_no_memory_for_it() -> None:
    asked: list[torch.device] = []
    assert estimator(asked=asked, limit_bytes=1 << 20).unit_s(learner()) == 0.0
    assert asked == []


def test_what_takes_little_time_is_tried_as_a_whole() -> None:
    tried: list[Span] = []

    def dummy_run(_learner: Learner, start: int, end: int) -> float:
        tried.append(Span(start, end))
        return 0.6

    small = [UnitEstimate(ComputeWork(), ComputeWork(), 0, 0, 0)] * 3
    assert estimator(lambda _run: small, dummy_run).unit_s(learner(1)) == pytest.approx(0.3)
    assert tried == [Span(1, 3)]


def test_nothing_is_tried_behind_the_last_step() -> None:
    """A node that loads the end of a run would have no microbatch for it."""
    tried: list[int] = []

    def dummy_run(one: Learner, _start: int, _end: int) -> float:
        tried.append(one.step)
        return 0.6

    small = [UnitEstimate(ComputeWork(), ComputeWork(), 0, 0, 0)] * 3
    node, steps = estimator(lambda _run: small, dummy_run), range(RUN.steps + 1)
    for step in steps:
        assert node.unit_s(Learner(ToySegment(0, 3), RUN, step=step)) == pytest.approx(0.2 if step < RUN.steps else 0.0)
    assert tried == [*steps][:-1]


def test_of_units_that_are_estimated_alike_one_is_tried() -> None:
    tried: list[Span] = []

    def dummy_run(_learner: Learner, start: int, end: int) -> float:
        tried.append(Span(start, end))
        return 10.0 if start == 0 else 40.0

    alike = [estimates(RUN)[number] for number in (0, 1, 1)]
    assert estimator(lambda _run: alike, dummy_run).unit_s(learner()) == pytest.approx((10 + 40 + 40) / 3)
    assert tried == [Span(0, 1), Span(2, 3)]


def test_the_estimate_stands_where_units_cannot_work_with_what_is_made_up() -> None:
    def dummy_run(_learner: Learner, start: int, end: int) -> float:
        raise NotFinite("NaN", unit=start)

    assert estimator(dummy_run=dummy_run).unit_s(learner(1)) == pytest.approx((2 + 2 + 3 + 2) / 2)


def test_what_was_timed_takes_the_place_of_the_estimate_and_corrects_the_next() -> None:
    time = UnitTime()
    assert time.unit_s == 0.0
    time.begin(2.0)
    assert time.unit_s == time.expected_s == 2.0
    time.record(2, 2.0)
    assert time.unit_s == 2.0, "a pass there says nothing of the one back"
    time.record(2, 4.0)
    assert time.timed_s == time.unit_s == pytest.approx(3.0) and time.correction == pytest.approx(1.5)
    time.begin(10.0)  # a run of larger microbatches
    assert time.timed_s == 0.0 and time.unit_s == time.expected_s == pytest.approx(15.0)
    time.begin(20.0)  # of which none was computed
    assert time.expected_s == pytest.approx(30.0)


def test_the_first_passes_count_alike_and_later_ones_soon_decide() -> None:
    time = UnitTime()
    for _ in range(4):
        time.record(1, 1.0)
        time.record(1, 2.0)
    assert time.unit_s == pytest.approx(3.0)
    for _ in range(40):
        time.record(1, 4.0)
    assert time.unit_s == pytest.approx(8.0, rel=0.02)
    assert time.expected_s == 0.0 and time.correction == 1.0


@pytest.mark.parametrize("estimated_s", [0.0, 1e-9])
def test_no_estimate_corrects_nothing(estimated_s: float) -> None:
    time = UnitTime()
    time.begin(0.0)
    time.record(1, 1.0)
    time.record(1, 1.0)
    time.begin(estimated_s)
    assert time.expected_s == estimated_s
