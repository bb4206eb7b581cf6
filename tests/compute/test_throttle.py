"""The throttle: how long passes take on a slower device."""

from __future__ import annotations

import pytest
import torch

from swarmnode.compute.capacity.capacity import measure_serving
from swarmnode.compute.model.checkpoint import Checkpoint
from swarmnode.compute.serving.loading import load_span
from swarmnode.compute.serving.runner import RunnerConfig, StageRunner, StepInput
from swarmnode.compute.stopwatch import Stopwatch, Throttle


class Watch:
    """A clock that only sleeping and working move."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.slept_s: list[float] = []

    def clock(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.slept_s.append(seconds)
        self.now_s += seconds


@pytest.fixture
def watch():
    return Watch()


def test_what_the_device_needed_is_part_of_the_time(watch):
    throttle = Throttle(100.0, clock=watch.clock, sleep=watch.sleep)
    with throttle.pass_over(units=5, positions=1):
        watch.now_s += 0.02
    assert watch.slept_s == [pytest.approx(0.03)]
    with throttle.pass_over(units=5, positions=1):
        watch.now_s += 0.06  # slower than the throttle asks
    assert len(watch.slept_s) == 1


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_the_duty_cycle_is_held_although_sleeps_are_too_long(watch, share):
    throttle = Throttle(share=share, clock=watch.clock, sleep=lambda seconds: watch.sleep(seconds + 0.003))
    busy_s = 0.0
    for number in range(1000):
        with throttle.pass_over(units=5, positions=1):
            watch.now_s += (pass_s := 0.002 + 0.001 * (number % 7))
            busy_s += pass_s
    assert busy_s / watch.now_s == pytest.approx(share, rel=0.05)


def test_who_was_suspended_owes_no_more_than_a_moment(watch):
    throttle = Throttle(share=0.5, clock=watch.clock, sleep=lambda seconds: watch.sleep(seconds + 3600))
    with throttle.pass_over(units=1, positions=1):
        watch.now_s += 1
    throttle._sleep = watch.sleep
    for _ in range(10):
        with throttle.pass_over(units=1, positions=1):
            watch.now_s += 1
    assert sum(watch.slept_s[1:]) == pytest.approx(9)
    for share in (0.0, 1.5):
        with pytest.raises(ValueError, match="share"):
            Throttle(share=share)


def test_prompts_are_sixteen_times_cheaper_but_never_cheaper_than_one_position():
    throttle = Throttle(100.0)
    assert throttle.least_s(4, 1) == throttle.least_s(4, 16) == pytest.approx(0.04)
    assert throttle.least_s(4, 128) == pytest.approx(4 * 128 / (100 * 16))


def test_no_throttle_never_sleeps(watch):
    with Throttle(clock=watch.clock, sleep=watch.sleep).pass_over(units=8, positions=4096):
        pass
    assert watch.slept_s == []
    with pytest.raises(ValueError, match="units_per_s is 0"):
        Throttle(0)


def test_sessions_decoded_together_cost_one_pass_of_the_units_they_use(checkpoint_path, watch):
    checkpoint = Checkpoint(checkpoint_path)
    span = load_span(checkpoint, 0, checkpoint.units)
    throttle = Throttle(1.0, clock=watch.clock, sleep=watch.sleep)
    runner = StageRunner(span, RunnerConfig(cache_bytes=1 << 24), throttle)
    runner.open("a", rows=1, max_length=64)
    runner.open("b", rows=1, max_length=64)
    runner.open("half", rows=1, max_length=64, start=0, end=2)
    runner.run([StepInput("a", torch.ones((1, 32), dtype=torch.int64))])
    assert watch.slept_s.pop() == pytest.approx(2 * span.end)
    one = torch.ones((1, 1), dtype=torch.int64)
    runner.run([StepInput("a", one), StepInput("b", one), StepInput("half", one)])
    assert sorted(watch.slept_s) == [pytest.approx(2), pytest.approx(span.end)]


def test_half_of_the_time_is_half_of_the_speed_that_is_announced(checkpoint_path, watch, monkeypatch):
    checkpoint = Checkpoint(checkpoint_path)
    span = load_span(checkpoint, 0, checkpoint.units)
    forward = span.forward

    def takes_a_while(x, **options):
        watch.now_s += 0.01
        return forward(x, **options)

    monkeypatch.setattr(span, "forward", takes_a_while)
    ordinary = RunnerConfig(cache_bytes=1 << 24, capture=False)  # a recorded step would not take a while
    whole, half = (
        measure_serving(
            StageRunner(span, ordinary, Throttle(share=share, clock=watch.clock, sleep=watch.sleep)),
            clock=watch.clock,
        )
        for share in (1.0, 0.5)
    )
    assert half.decode_units_per_s == pytest.approx(whole.decode_units_per_s / 2)
    assert half.prefill_units_per_s == pytest.approx(whole.prefill_units_per_s / 2)


def test_training_rests_as_its_share_says_and_counts_with_its_rest(watch):
    throttle, told = Throttle(share=0.25, clock=watch.clock, sleep=watch.sleep), []
    stopwatch = Stopwatch(torch.device("cpu"), clock=watch.clock, throttle=throttle)
    for _ in range(10):
        with stopwatch.timing(told.append):
            watch.now_s += 0.1
    assert told == pytest.approx([0.4] * 10) and watch.now_s == pytest.approx(4.0)
    throttle.share = 1.0
    with stopwatch.timing(told.append):
        watch.now_s += 0.1
    assert told[-1] == pytest.approx(0.1)


def test_training_takes_as_long_as_on_a_slower_device(watch):
    throttle, told = Throttle(10.0, clock=watch.clock, sleep=watch.sleep), []
    stopwatch = Stopwatch(torch.device("cpu"), clock=watch.clock, throttle=throttle)
    for work in (16.0, 1600.0, 0.0):
        with stopwatch.timing(told.append, work):
            watch.now_s += 0.5
    assert told == pytest.approx([0.5, 10.0, 0.5]) and watch.now_s == pytest.approx(11.0)
