"""What a microbatch will take, before any was computed, and what becomes of it when passes were timed."""

from __future__ import annotations

import pytest
import torch

from swarmnode.compute.graph.costs.estimate import UnitEstimate
from swarmnode.compute.graph.costs.rates import REFERENCE, Rates
from swarmnode.compute.graph.costs.work import MATMUL, ComputeWork
from swarmnode.errors import CheckpointError
from swarmnode.ledger import MemoryLedger
from swarmnode.plan.view import Span
from swarmnode.roles.training.worker.pass_estimator import Estimates, PassEstimator
from swarmnode.roles.training.worker.unit_time import UnitTime
from swarmnode.swarm.records.run import Run
from tests.roles.training_swarm import toy_batches, toy_run

RUN = toy_run(toy_batches(), 3)
WORK = ComputeWork({MATMUL: REFERENCE.per_s[MATMUL]})  # a second
CPU = torch.device("cpu")


def estimates(_run: Run) -> list[UnitEstimate]:
    """Units whose forward pass takes 1, 2, 3 seconds, and whose backward pass takes two."""
    works = [ComputeWork({MATMUL: (unit + 1) * WORK.amounts[MATMUL]}) for unit in range(3)]
    return [UnitEstimate(work, WORK + WORK, 0, 0, 0) for work in works]


def unknown(_run: Run) -> list[UnitEstimate]:
    raise CheckpointError("its own code needs real numbers")


def estimator(
    estimates: Estimates,
    asked: list[torch.device] | None = None,
    *,
    share: float = 1.0,
    limit_bytes: int | None = None,
) -> PassEstimator:
    def measure(device: torch.device, _dtype: torch.dtype | None) -> Rates:
        if asked is not None:
            asked.append(device)
        return REFERENCE

    return PassEstimator(CPU, estimates, measure, MemoryLedger(limit_bytes), share=share)


def test_a_unit_takes_its_share_of_the_work_of_the_span() -> None:
    asked: list[torch.device] = []
    node = estimator(estimates, asked)
    assert asked == [], "nothing is measured before a run begins"
    assert node.unit_s(RUN, Span(1, 3), recompute=False) == pytest.approx((2 + 2 + 3 + 2) / 2)
    assert node.unit_s(RUN, Span(1, 3), recompute=True) == pytest.approx((2 + 2 + 2 + 3 + 3 + 2) / 2)
    assert asked == [CPU], "once"


def test_a_device_that_is_lent_for_half_of_the_time_takes_twice_as_long() -> None:
    assert estimator(estimates, share=0.5).unit_s(RUN, Span(0, 1), recompute=False) == pytest.approx(6.0)


def test_nothing_is_expected_of_work_that_cannot_be_estimated() -> None:
    asked: list[torch.device] = []
    assert estimator(unknown, asked).unit_s(RUN, Span(0, 3), recompute=False) == 0.0
    assert asked == []


def test_nothing_is_measured_where_there_is_no_memory_for_it() -> None:
    asked: list[torch.device] = []
    assert estimator(estimates, asked, limit_bytes=1 << 20).unit_s(RUN, Span(0, 3), recompute=False) == 0.0
    assert asked == []


def test_what_was_timed_takes_the_place_of_the_estimate_and_corrects_the_next() -> None:
    time = UnitTime()
    assert time.unit_s == 0.0
    time.begin(2.0)
    assert time.unit_s == time.expected_s == 2.0
    time.note(2, 2.0)
    assert time.unit_s == 2.0, "a pass there says nothing of the one back"
    time.note(2, 4.0)
    assert time.timed_s == time.unit_s == pytest.approx(3.0) and time.correction == pytest.approx(1.5)
    time.begin(10.0)  # a run of larger microbatches
    assert time.timed_s == 0.0 and time.unit_s == time.expected_s == pytest.approx(15.0)
    time.begin(20.0)  # of which none was computed
    assert time.expected_s == pytest.approx(30.0)


def test_the_first_passes_count_alike_and_later_ones_soon_decide() -> None:
    time = UnitTime()
    for _ in range(4):
        time.note(1, 1.0)
        time.note(1, 2.0)
    assert time.unit_s == pytest.approx(3.0)
    for _ in range(40):
        time.note(1, 4.0)
    assert time.unit_s == pytest.approx(8.0, rel=0.02)
    assert time.expected_s == 0.0 and time.correction == 1.0


@pytest.mark.parametrize("estimated_s", [0.0, 1e-9])
def test_no_estimate_corrects_nothing(estimated_s: float) -> None:
    time = UnitTime()
    time.begin(0.0)
    time.note(1, 1.0)
    time.note(1, 1.0)
    time.begin(estimated_s)
    assert time.expected_s == estimated_s
