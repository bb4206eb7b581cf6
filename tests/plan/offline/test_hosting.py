"""Whole models on unequal devices."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from swarmnode.errors import LocalError, UsageError
from swarmnode.plan.cost import FRAGILE, HOLDERS
from swarmnode.plan.offline.hosting import DeviceRates, Hosting, Planner, Workload
from swarmnode.plan.offline.planner_files import Scenario
from tests.plan.networks import instances

GB = 10**9
LAYERS = Workload(
    unit_bytes=(GB,) * 12,
    gradient_bytes=(GB // 8,) * 12,
    work=(1.0,) * 12,
    boundary_bytes=(10**7,) * 12,
    microbatches=32,
)
FAST_LAN = instances([7], 100, 100)


def equal(devices: int, room_gb: float, work_per_s: float = 10.0) -> DeviceRates:
    return DeviceRates((work_per_s,) * devices, (int(room_gb * GB),) * devices)


def plan(
    network: Scenario,
    hardware: DeviceRates,
    workload: Workload = LAYERS,
    stages: int | None = None,
    replicas: int | None = None,
    holders: int = HOLDERS,
) -> Hosting:
    planner = Planner(network, hardware, workload)
    hosting = planner.plan(stages=stages, replicas=replicas, holders=holders, effort=0.01)
    check(hosting, hardware, workload)
    return hosting


def check(hosting: Hosting, hardware: DeviceRates, workload: Workload) -> None:
    """Every unit once, no device twice, no memory overflows."""
    spans = [stage.span for stage in hosting.stages]
    assert spans[0].start == 0 and spans[-1].end == workload.units
    assert all(one.end == other.start for one, other in pairwise(spans))
    devices = [device for stage in hosting.stages for device in stage.devices]
    assert len(set(devices)) == len(devices)
    for stage in hosting.stages:
        held = sum(workload.unit_bytes[stage.span.start : stage.span.end])
        assert all(held <= hardware.room_bytes[device] for device in stage.devices)
    for stage, row in zip(hosting.stages, hosting.grid.tolist(), strict=True):
        assert set(row) <= set(stage.devices)


def test_devices_that_do_not_divide_reinforce_stages() -> None:
    hosting = plan(FAST_LAN, equal(7, room_gb=7), stages=2, replicas=3)
    assert sorted(len(stage.devices) for stage in hosting.stages) == [3, 4]
    most = max(hosting.stages, key=lambda stage: len(stage.devices))
    assert most.span.units > 12 - most.span.units, "the stage of four devices holds more"


def test_a_fast_device_holds_more_layers() -> None:
    hardware = DeviceRates((30.0, 10.0), (12 * GB, 12 * GB))
    hosting = plan(instances([2], 100, 100), hardware, stages=2)
    units = {stage.devices[0]: stage.span.units for stage in hosting.stages}
    assert units == {0: 9, 1: 3}


def test_memory_groups_like_with_like() -> None:
    """Four large and four small cards in two machines of two each: only stages of equals hold the model."""
    hardware = DeviceRates((10.0,) * 8, tuple(gb * GB for gb in (9, 9, 3, 3, 9, 9, 3, 3)))
    hosting = plan(instances([4, 4], 100, 1), hardware, stages=2, replicas=4)
    assert {frozenset(stage.devices) for stage in hosting.stages} == {frozenset({0, 1, 4, 5}), frozenset({2, 3, 6, 7})}


def test_slow_links_are_not_worth_their_devices() -> None:
    """Averaging across the slow link would take longer than doing all microbatches on one side of it."""
    network = instances([4, 4], 100, 0.01)
    hosting = plan(network, equal(8, room_gb=12))
    assert hosting.used in ({0, 1, 2, 3}, {4, 5, 6, 7})
    apart = plan(network, equal(8, room_gb=12), replace(LAYERS, microbatches=10**6))
    assert len(apart.used) == 8, "with so much to compute, they are"


def test_a_step_worked_out_by_hand() -> None:
    """Two stages of one device: 6 units at 10 per s; 10^7 bytes at 10^8 per s; 32 microbatches."""
    hosting = plan(instances([2], 0.8, 0.8), equal(2, room_gb=6), stages=2)
    assert hosting.step_s == pytest.approx(2 * 0.6 + 2 * 0.1 + 31 * 0.6)


def test_who_is_in_the_middle_sends_two_messages_for_each_microbatch() -> None:
    """Three stages of 0.4 s, a second for what crosses: the middle one's line carries it onward, and gradients back."""
    wide = replace(LAYERS, boundary_bytes=(10**8,) * 12)
    hosting = plan(instances([3], 0.8, 0.8), equal(3, room_gb=4), wide, stages=3)
    assert hosting.step_s == pytest.approx(3 * 0.4 + 2 * 2 * 1.0 + 31 * 2.0)


def test_a_long_way_holds_up_the_first_microbatch_alone() -> None:
    network = instances([2], 0.8, 0.8)
    far = replace(network, delay_s=np.where(np.eye(2, dtype=bool), 0.0, 5.0))
    near_s, far_s = (plan(one, equal(2, room_gb=6), stages=2).step_s for one in (network, far))
    assert far_s == pytest.approx(near_s + 2 * 5.0)


SLOW_TO_AVERAGE = instances([4], 1, 1)
"""Where a single pipeline is fastest: gradients take longer than the pipelines gain."""


def test_every_unit_has_a_second_holder_where_the_fastest_plan_has_none() -> None:
    fastest, usual = (plan(SLOW_TO_AVERAGE, equal(4, room_gb=12), holders=holders) for holders in (1, 2))
    assert (fastest.missing_holders(2), usual.missing_holders(2)) == (1.0, 0.0)
    assert fastest.step_s < usual.step_s < (1 + FRAGILE) * fastest.step_s
    shape = {"stages": len(usual.grid), "replicas": len(usual.grid[0])}
    same = plan(SLOW_TO_AVERAGE, equal(4, room_gb=12), holders=1, **shape)
    assert usual.step_s == same.step_s, "a step is estimated as it is, whoever is to hold what"


def test_a_second_holder_has_its_price() -> None:
    """Over links a tenth as fast averaging takes as long as five steps of the single pipeline."""
    hosting = plan(instances([4], 0.1, 0.1), equal(4, room_gb=12), replace(LAYERS, boundary_bytes=(1000,) * 12))
    assert hosting.missing_holders(2) == 1.0


def test_more_holders_are_there_where_they_are_asked_for() -> None:
    few, many = (plan(instances([8], 2, 2), equal(8, room_gb=12), holders=holders) for holders in (2, 4))
    assert min(len(stage.devices) for stage in few.stages) < 4
    assert many.missing_holders(4) == 0.0


@pytest.mark.parametrize("holders", [1, 2])
def test_two_pipelines_are_thought_of_where_halving_passes_over_them(holders: int) -> None:
    """Seven devices make three pipelines of two stages, and half of that is one; three of them have slow links."""
    hosting = plan(instances([4, 1, 1, 1], 100, 0.01), equal(7, room_gb=6), holders=holders)
    assert hosting.used == {0, 1, 2, 3} and hosting.missing_holders(2) == 0.0


def test_a_network_too_small_for_two_holders_is_planned_and_says_so() -> None:
    hosting = plan(FAST_LAN, equal(7, room_gb=3))
    thin = sum(stage.span.units for stage in hosting.stages if len(stage.devices) < 2)
    assert 0 < hosting.units_below(2) == thin < 12
    assert hosting.missing_holders(2) == pytest.approx(thin / 12)
    assert hosting.units_below(1) == hosting.missing_holders(1) == 0
    assert len(hosting.used) == 7, "whom no further pipeline needs is a second holder"


def test_a_device_that_is_left_over_is_a_second_holder_though_steps_become_longer() -> None:
    """Two stages fill two devices; a third one has to average with one of these."""
    network, hardware = instances([3], 1, 1), equal(3, room_gb=7)
    fastest, usual = (plan(network, hardware, stages=2, replicas=1, holders=holders) for holders in (1, 2))
    assert (len(fastest.used), len(usual.used)) == (2, 3)
    assert fastest.step_s < usual.step_s


def test_a_shape_that_is_given_is_kept_whoever_should_hold_what() -> None:
    hosting = plan(SLOW_TO_AVERAGE, equal(4, room_gb=12), stages=4, replicas=1)
    assert hosting.grid.shape == (4, 1) and hosting.units_below(2) == 12


@pytest.mark.parametrize(
    "hardware, message",
    [
        (equal(7, room_gb=1.5), r"needs 12\.0 GB .* 7 of its 12 layers fit, 5\.0 GB are missing"),
        (equal(7, room_gb=0.4), r"layer 0 alone needs 1\.0 GB .* 0\.6 GB are missing in each"),
    ],
)
def test_a_model_that_does_not_fit_says_by_how_much(hardware: DeviceRates, message: str) -> None:
    with pytest.raises(LocalError, match=message):
        plan(FAST_LAN, hardware)


def test_impossible_shapes() -> None:
    with pytest.raises(UsageError, match="--stages 8: use at most 7: 12 layers on 7 devices"):
        plan(FAST_LAN, equal(7, 12), stages=8)
    with pytest.raises(UsageError, match="--replicas 4: use at most 3: 7 devices in 2 stages"):
        plan(FAST_LAN, equal(7, 12), stages=2, replicas=4)
