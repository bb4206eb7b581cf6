"""Speeds are those of the card that computes, not of the host that tells it what to do; and no other card is touched."""

from __future__ import annotations

import msgspec
import pytest
import torch

from swarmnode.compute.capacity.capacity import measure_serving, measure_training
from swarmnode.compute.device import Device, computes_in_bfloat16, probe_device
from swarmnode.compute.model.checkpoint import Checkpoint
from swarmnode.compute.serving.loading import load_span
from swarmnode.compute.serving.runner import RunnerConfig, StageRunner
from swarmnode.compute.stopwatch import Stopwatch
from swarmnode.compute.training.learner import Learner
from swarmnode.compute.training.lm import load_segment
from swarmnode.config import StageConfig
from swarmnode.errors import LocalError
from swarmnode.measuring.hardware import Hardware
from swarmnode.swarm.records.run import Run
from tests.card.conftest import LAYERS
from tests.card.simulated import TOTAL_BYTES, SimulatedCards

UNITS = LAYERS + 2
LAUNCH_S = 0.001


def test_serving_is_measured_on_the_card_that_serves(
    cards: SimulatedCards, card: torch.device, checkpoints: dict[str, Checkpoint]
) -> None:
    runner = StageRunner(load_span(checkpoints["llama"], 1, UNITS - 1, device=card), RunnerConfig(1 << 20))
    cards.reset()
    cards.pace(LAUNCH_S)
    speeds = measure_serving(runner, clock=cards.clock)
    launches = (UNITS - 2) / (speeds.decode_units_per_s * LAUNCH_S)
    assert 20 * LAYERS < launches < 200 * LAYERS
    assert cards.touched == {card.index} and cards.counts(0).launches == cards.counts(0).waits == 0


def test_training_is_measured_there_and_back_and_draws_from_no_other_card(
    cards: SimulatedCards, card: torch.device, checkpoints: dict[str, Checkpoint]
) -> None:
    segment = load_segment(checkpoints["llama"], 1, UNITS - 1, device=card)
    cards.reset()
    cards.pace(LAUNCH_S)
    assert 0 < measure_training(segment, clock=cards.clock).training_units_per_s < LAYERS * 32 / (60 * LAUNCH_S)
    assert cards.touched == {card.index} and cards.counts(0).launches == 0


def test_a_pass_for_which_nobody_waits_is_timed_when_somebody_has_waited(
    cards: SimulatedCards, card: torch.device
) -> None:
    x = torch.ones(4, device=card)
    stopwatch, told = Stopwatch(card, clock=cards.clock), []
    cards.pace(LAUNCH_S)
    with stopwatch.timing(told.append):
        for _ in range(5):
            x = x + 1
    assert not told
    x.cpu()
    stopwatch.read()
    assert told == [pytest.approx(5 * LAUNCH_S)] and cards.touched == set()


def test_the_way_back_takes_longer_than_the_way_there(
    cards: SimulatedCards, card: torch.device, checkpoints: dict[str, Checkpoint]
) -> None:
    run = Run(data=bytes(32), steps=6, batch=4, microbatch=2, sequence=12)
    learner = Learner(load_segment(checkpoints["llama"], 0, UNITS - 1, device=card), run)
    ids_BT = torch.ones((2, 12), dtype=torch.int64, device=card)
    stopwatch, there, back = Stopwatch(card, clock=cards.clock), [], []
    cards.pace(LAUNCH_S)
    with stopwatch.timing(there.append):
        (output,) = learner.forward(0, 0, 0, UNITS - 1, (ids_BT,))
    with stopwatch.timing(back.append):
        learner.backward(0, (torch.ones_like(output),))
    torch.cuda.synchronize(card)
    stopwatch.read()
    assert back[0] > 1.2 * there[0] > 0


@pytest.mark.parametrize(("majors", "dtype"), [([8, 6], torch.float16), ([7, 9], torch.bfloat16)])
def test_of_unlike_cards_the_one_that_is_used_is_asked(
    majors: list[int], dtype: torch.dtype, cards: SimulatedCards, card: torch.device
) -> None:
    cards.majors = majors
    device = Device("cuda", card.index, "a card", 1 << 30, 1 << 30, shared=False)
    assert device.default_dtype is dtype and computes_in_bfloat16(card) == (dtype is torch.bfloat16)
    assert cards.current == 0 and not cards.touched


def test_autocast_is_in_what_the_card_is_fast_at(
    cards: SimulatedCards, card: torch.device, checkpoints: dict[str, Checkpoint]
) -> None:
    """Float32 on Pascal, float16 on Turing, bfloat16 and TF32 on Ampere; of unlike cards by the one that is used."""
    run = Run(data=bytes(32), steps=6, batch=4, microbatch=2, sequence=12, autocast=True)
    segment = load_segment(checkpoints["llama"], 0, UNITS - 1, device=card)
    ids_BT = torch.ones((2, 12), dtype=torch.int64, device=card)
    seen: list[tuple[str, torch.dtype]] = []
    segment.span.stack.get_submodule("0").mlp.down_proj.register_forward_hook(  # type: ignore[union-attr]
        lambda _layer, _inputs, output: seen.append((torch.get_float32_matmul_precision(), output.dtype))
    )
    for major in (6, 7, 8):
        cards.majors = [14 - major, major]
        Learner(segment, run).forward(0, 0, 0, UNITS - 1, (ids_BT,))
    Learner(segment, msgspec.structs.replace(run, autocast=False)).forward(0, 0, 0, UNITS - 1, (ids_BT,))
    assert seen == [
        ("highest", torch.float32),
        ("highest", torch.float16),
        ("high", torch.bfloat16),
        ("highest", torch.float32),
    ]
    assert torch.get_float32_matmul_precision() == "highest"


def test_a_card_is_tried_before_it_is_lent(cards: SimulatedCards, card: torch.device) -> None:
    device = probe_device(f"cuda:{card.index}")
    assert cards.counts(card.index).launches > 0 and cards.counts(0).launches == 0
    assert device.free_bytes > 0
    cards.lose()
    with pytest.raises(LocalError, match="cannot compute on it: CUDA error"):
        probe_device(f"cuda:{card.index}")


def test_no_more_is_lent_than_is_free(
    cards: SimulatedCards, card: torch.device, checkpoints: dict[str, Checkpoint]
) -> None:
    config = StageConfig(device=f"cuda:{card.index}", memory_bytes=TOTAL_BYTES + 1)
    with pytest.raises(LocalError, match="GB free now; lend less"):
        Hardware.probe(checkpoints["llama"], config)
