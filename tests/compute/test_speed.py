"""Measuring speeds: on the units that are held, in bounded time, and without a trace."""

from __future__ import annotations

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from swarmnode.compute.capacity.capacity import (
    FEW_UNITS,
    PREFILL_POSITIONS,
    TRAINING_POSITIONS,
    measure_serving,
    measure_training,
)
from swarmnode.compute.model.checkpoint import Checkpoint
from swarmnode.compute.serving.loading import load_span
from swarmnode.compute.serving.runner import RunnerConfig, StageRunner
from swarmnode.compute.stopwatch import BUDGET_S, MOST_PASSES, Throttle
from swarmnode.compute.training.lm import load_segment


class Watch:
    """A clock that only sleeping moves: how long passes take is the throttle's word alone."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def clock(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


@pytest.fixture(scope="module")
def checkpoint(checkpoint_path):
    return Checkpoint(checkpoint_path)


@pytest.mark.parametrize("units", [(0, 3), (2, 5), (3, 6)])
def test_serving_speeds_are_those_of_the_device(checkpoint, units):
    watch = Watch()
    runner = StageRunner(
        load_span(checkpoint, *units),
        RunnerConfig(cache_bytes=1 << 24),
        Throttle(50.0, clock=watch.clock, sleep=watch.sleep),
    )
    speeds = measure_serving(runner, clock=watch.clock)
    assert speeds.decode_units_per_s == pytest.approx(50)
    assert speeds.prefill_units_per_s == pytest.approx(50 * 16)
    assert 50 <= speeds.pair_units_per_s <= 100.1, "a step of two takes between one and two steps of one"
    assert speeds.training_units_per_s == 0
    assert not runner._sessions, "the probe leaves nothing behind"


def test_a_slow_device_is_not_kept_from_serving(checkpoint):
    watch = Watch()
    throttle = Throttle(5.0, clock=watch.clock, sleep=watch.sleep)  # 0.6 s for a step of 3 units, 2.4 s for a chunk
    runner = StageRunner(load_span(checkpoint, 0, 3), RunnerConfig(cache_bytes=1 << 24), throttle)
    measure_serving(runner, clock=watch.clock)
    assert watch.now_s == pytest.approx(sum(throttle.least_s(3, count) for count in (1, 2, PREFILL_POSITIONS)))


@pytest.mark.parametrize(("units", "few"), [((0, 6), FEW_UNITS), ((1, 6), FEW_UNITS), ((0, 3), 3), ((5, 6), 1)])
def test_a_few_units_tell_about_all_where_it_is_not_for_long(checkpoint, units, few):
    watch = Watch()
    throttle = Throttle(5.0, clock=watch.clock, sleep=watch.sleep)
    runner = StageRunner(load_span(checkpoint, *units), RunnerConfig(cache_bytes=1 << 24), throttle)
    speeds = measure_serving(runner, few=True, clock=watch.clock)
    assert speeds.decode_units_per_s == pytest.approx(5)
    assert watch.now_s == pytest.approx(sum(throttle.least_s(few, count) for count in (1, 2, PREFILL_POSITIONS)))


def test_the_best_of_a_bounded_number_of_passes_counts(checkpoint):
    times = iter(range(1000))
    runner = StageRunner(load_span(checkpoint, 0, 3), RunnerConfig(cache_bytes=1 << 24))
    measure_serving(runner, clock=lambda: next(times) * BUDGET_S / 100)
    assert next(times) <= 3 * (1 + 3 * MOST_PASSES) + 1


def test_a_model_of_few_positions(tmp_path):
    sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 12, "vocab_size": 50}
    GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=None, eos_token_id=None)).save_pretrained(tmp_path)
    checkpoint = Checkpoint(tmp_path)
    runner = StageRunner(load_span(checkpoint, 0, 4), RunnerConfig(cache_bytes=1 << 24))
    assert measure_serving(runner).prefill_units_per_s > 0
    assert measure_training(load_segment(checkpoint, 0, 4)).training_units_per_s > 0


@pytest.mark.parametrize("units", [(0, 3), (2, 6)])
def test_training_speed_leaves_parameters_gradients_and_chance_alone(checkpoint, units):
    segment = load_segment(checkpoint, *units)
    parameters = [parameter for block in segment.parameters().values() for parameter in block.values()]
    before = [parameter.detach().clone() for parameter in parameters]
    torch.manual_seed(7)
    chance = torch.get_rng_state()
    ticks = iter(range(1000))
    speeds = measure_training(segment, clock=lambda: next(ticks) * 0.01)
    assert speeds.training_units_per_s == pytest.approx((units[1] - units[0]) * TRAINING_POSITIONS / 0.01)
    assert all(parameter.grad is None for parameter in parameters)
    assert all(map(torch.equal, before, parameters))
    assert torch.equal(chance, torch.get_rng_state())
