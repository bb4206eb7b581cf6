"""Centred clipping and detector: nobody honest is clipped or suspected; whoever lies moves the sum little, and stands out."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Size, Tensor

from swarmnode.codec.tensors import Codec
from swarmnode.compute.training.averaging.gradient_compressor import make_gradient_compressor
from swarmnode.compute.training.averaging.parts import Contribution, reduce_part
from swarmnode.compute.training.averaging.robust_aggregation import (
    CentredClipping,
    History,
    OutlierDetector,
    median,
)
from swarmnode.errors import UsageError
from swarmnode.plan.findings import outlier
from swarmnode.swarm.records.run import Averaging, Run, check_run
from tests.compute.training.averaging.together import agree

LENGTH = 4096
PEERS = ("a", "b", "c", "liar")
NOISE = 2.0  # times the gradient's length, of one replica


def gradients(step: int, count: int = 4) -> list[Tensor]:
    """Each replica's estimate of one gradient, which turns slowly."""
    generator = torch.Generator().manual_seed(step)
    base_N = torch.randn(LENGTH, generator=torch.Generator().manual_seed(1000))
    other_N = torch.randn(LENGTH, generator=torch.Generator().manual_seed(1001 + step // 10))
    true_N = base_N + 0.5 * other_N
    return [true_N + NOISE * torch.randn(LENGTH, generator=generator) for _ in range(count)]


def contributions(shares: list[Tensor], weights: list[float]) -> list[Contribution]:
    return [Contribution(weight, share_N * weight) for share_N, weight in zip(shares, weights, strict=True)]


def clipping() -> CentredClipping:
    return CentredClipping(bytes([1]))


@pytest.mark.parametrize("weights", [[0.25] * 4, [0.5, 0.2, 0.2, 0.1], [0.4, 0.3, 0.3]])
def test_honest_contributions_are_summed_as_ever(weights: list[float]) -> None:
    received = contributions(gradients(0, len(weights)), weights)
    assert torch.equal(clipping().reduce(slice(0, LENGTH), received), reduce_part(received))


@pytest.mark.parametrize("factor", [100.0, -100.0, 1e30])
def test_a_long_one_is_drawn_back(factor: float) -> None:
    shares = gradients(0)
    honest_N = sum(shares[1:], shares[0]) / 4
    noise = float((honest_N - (shares[0] + shares[1] + shares[2]) / 3).norm())
    shares[3] = shares[3] * factor
    found_N = clipping().reduce(slice(0, LENGTH), contributions(shares, [0.25] * 4))
    assert float((found_N - honest_N).norm()) < 4 * noise


def test_a_part_in_which_most_have_nothing_keeps_what_few_have() -> None:
    summed = clipping()
    summed.reduce(slice(0, LENGTH), contributions(gradients(0), [0.25] * 4))
    rare = [torch.zeros(LENGTH) for _ in range(4)]
    rare[1][:64] = 1.0
    received = contributions(rare, [0.25] * 4)
    assert torch.equal(summed.reduce(slice(LENGTH, 2 * LENGTH), received), reduce_part(received))


def test_the_median_leans_to_no_side() -> None:
    shares = [torch.full((40_000,), value) for value in (1.0, 2.0, 4.0, 100.0)]
    assert torch.equal(median(shares), torch.full((40_000,), 3.0))
    assert torch.equal(median(shares[1:]), torch.full((40_000,), 4.0))


Lie = Callable[[Tensor, int], Tensor]
DIRECTION = torch.randn(LENGTH, generator=torch.Generator().manual_seed(7))
LIES: dict[str, Lie] = {
    "turned round": lambda gradient_N, _step: -gradient_N,
    "100 times": lambda gradient_N, _step: 100 * gradient_N,
    "drifting": lambda gradient_N, step: gradient_N + 0.05 * step * DIRECTION,
    "nothing": lambda gradient_N, _step: torch.zeros_like(gradient_N),
    "noise": lambda gradient_N, step: gradient_N.roll(step + 1),
}


def named_after(lie: Lie, steps: int) -> tuple[str | None, int]:
    """Whom one of the honest members suspects first, and after how many steps."""
    detector = OutlierDetector(bytes([3]))
    for step in range(steps):
        shares = gradients(step)
        shares[3] = lie(shares[3], step)
        detector.begin()
        detector.clipping("group", PEERS, PEERS).reduce(slice(0, LENGTH), contributions(shares, [0.25] * 4))
        histories = detector.histories()
        if (found := outlier(histories)) is not None:
            return found, step + 1
        detector.accept(histories)
    return None, steps


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES)
def test_who_lies_stands_out(lie: Lie) -> None:
    found, steps = named_after(lie, 50)
    assert found == "liar" and steps <= 50


def test_100_times_is_seen_before_anything_of_it_is_committed() -> None:
    assert named_after(LIES["100 times"], 1) == ("liar", 1)


def test_nobody_honest_stands_out() -> None:
    assert named_after(lambda gradient_N, _step: gradient_N, 300) == (None, 300)


def test_an_attempt_that_fails_leaves_no_trace() -> None:
    detector = OutlierDetector(bytes([3]))
    for _ in range(20):
        detector.begin()
        detector.clipping(0, PEERS, PEERS).reduce(slice(0, LENGTH), contributions(gradients(1), [0.25] * 4))
        assert all(history.steps == 1 for history in detector.histories().values())


def test_where_a_member_is_gone_all_begins_anew() -> None:
    detector = OutlierDetector(bytes([3]))
    detector.accept(dict.fromkeys(PEERS, History(steps=9)))
    detector.begin()
    detector.clipping(0, PEERS[:3], PEERS[:3]).reduce(slice(0, LENGTH), contributions(gradients(1, 3), [0.4, 0.3, 0.3]))
    assert {peer: history.steps for peer, history in detector.histories().items()} == dict.fromkeys(PEERS[:3], 1)


def test_who_contributes_nothing_for_a_step_is_not_forgotten() -> None:
    detector = OutlierDetector(bytes([3]))
    detector.accept(dict.fromkeys(PEERS, History(steps=9)))
    detector.begin()
    detector.clipping(0, PEERS[:3], PEERS).reduce(slice(0, LENGTH), contributions(gradients(1, 3), [0.4, 0.3, 0.3]))
    assert [history.steps for history in detector.histories().values()] == [10, 10, 10, 9]


@pytest.mark.parametrize("codec", [Codec.NONE, Codec.FP16, Codec.INT8, Codec.INT4])
def test_all_end_with_the_same_numbers(codec: Codec) -> None:
    shapes, weights = [Size((64, 48)), Size((1024,))], [0.25] * 4
    compressors = [make_gradient_compressor(Averaging(codec=codec, robust=True), shapes) for _ in PEERS]
    local = [0.25 * gradient_N for gradient_N in gradients(0)]
    local[3] *= 100
    totals, _ = agree(compressors, local, weights, [clipping() for _ in PEERS])
    assert all(torch.equal(total_N, totals[0]) for total_N in totals)
    honest_N = sum(local[1:3], local[0]) * 4 / 3
    assert float((totals[0] - honest_N).norm()) < 2 * float(honest_N.norm())


@pytest.mark.parametrize("averaging", [Averaging(codec=Codec.TOPK, robust=True), Averaging(rank=2, robust=True)])
def test_sums_that_cannot_be_robust_are_refused(averaging: Averaging) -> None:
    with pytest.raises(UsageError, match="robust"):
        check_run(Run(data=bytes(32), steps=1, batch=4, microbatch=1, averaging=averaging))
