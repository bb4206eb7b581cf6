"""Exchanges: sums that all members agree on, whatever codecs lose; and what is lost is not lost for good."""

from __future__ import annotations

import pytest
import torch
from torch import Size, Tensor

from swarmnode.codec.tensors import SPARSE_CODECS, Codec
from swarmnode.compute.training.averaging.gradient_compressor import (
    Exchange,
    GradientCompressor,
    make_gradient_compressor,
)
from swarmnode.compute.training.averaging.parts import (
    ALIGNMENT,
    LARGEST_PART,
    FlatVector,
    contribution,
    cut,
    reduce_part,
)
from swarmnode.compute.training.block import OuterOptimizer
from swarmnode.swarm.records.run import Averaging
from tests.compute.training.averaging.together import agree

SHAPES = [Size((40, 24)), Size((24,)), Size((24, 33)), Size((7,))]
LENGTH = sum(shape.numel() for shape in SHAPES)
WEIGHTS = [0.5, 0.25, 0.25]
CODECS = [Codec.NONE, Codec.BF16, Codec.FP16, Codec.INT8, Codec.INT4, Codec.INT2, Codec.TOPK, Codec.TOPK2]
STEPS = 120
ERROR = {Codec.NONE: 1e-6, Codec.BF16: 0.01, Codec.FP16: 1e-3, Codec.INT8: 0.02, Codec.INT4: 0.2, Codec.INT2: 0.7}


def vectors(seed: int, weights: list[float] = WEIGHTS) -> list[Tensor]:
    """Each member's, scaled by its weight; a listener's values are nonsense."""
    generator = torch.Generator().manual_seed(seed)
    drawn = [torch.randn(LENGTH, generator=generator) for _ in weights]
    return [weight * vector_N if weight else vector_N * 1e6 for weight, vector_N in zip(weights, drawn, strict=True)]


def gradient_compressors(averaging: Averaging, members: int = 3) -> list[GradientCompressor]:
    return [make_gradient_compressor(averaging, SHAPES) for _ in range(members)]


def error(total_N: Tensor, wanted_N: Tensor) -> float:
    return float((total_N - wanted_N).norm() / wanted_N.norm())


@pytest.mark.parametrize("length", [0, 1, 63, 64, 65, 1000, 3 * LARGEST_PART + 77])
@pytest.mark.parametrize("members", [1, 2, 3, 7])
def test_parts_cover_the_vector_once(length: int, members: int) -> None:
    parts = cut(length, [1] * members)
    places = [part.place for part in parts]
    assert [place.start for place in places[1:]] == [place.stop for place in places[:-1]]
    assert sum(part.length for part in parts) == length
    assert all(0 < part.length <= LARGEST_PART and part.place.start % ALIGNMENT == 0 for part in parts)
    assert {part.owner for part in parts} <= set(range(members))
    shares = [sum(part.length for part in parts if part.owner == owner) for owner in range(members)]
    assert max(shares) <= length / members + ALIGNMENT


@pytest.mark.parametrize("shares", [(16, 2, 16), (64, 1, 1, 1), (1, 64)])
def test_parts_are_as_long_as_shares_say(shares: tuple[int, ...]) -> None:
    length = 5 * LARGEST_PART + 77
    parts = cut(length, shares)
    assert [part.place.start for part in parts[1:]] == [part.place.stop for part in parts[:-1]]
    assert sum(part.length for part in parts) == length
    for owner, share in enumerate(shares):
        owned = sum(part.length for part in parts if part.owner == owner)
        assert owned == pytest.approx(length * share / sum(shares), abs=ALIGNMENT + 1)


@pytest.mark.parametrize("codec", CODECS)
def test_all_end_with_the_same_numbers(codec: Codec) -> None:
    weights = [*WEIGHTS, 0.0]  # the last one listens
    local = vectors(1, weights)
    results, crossed_bytes = agree(gradient_compressors(Averaging(codec=codec, keep=0.3), 4), local, weights)
    for result_N in results[1:]:
        assert torch.equal(result_N, results[0])
    if codec not in SPARSE_CODECS:
        assert error(results[0], local[0] + local[1] + local[2]) <= ERROR[codec]
    plain_bytes = agree(gradient_compressors(Averaging(), 4), local, weights)[1]
    assert crossed_bytes <= plain_bytes


def test_codecs_send_less() -> None:
    def crossed(averaging: Averaging) -> int:
        return agree(gradient_compressors(averaging), vectors(2), WEIGHTS)[1]

    plain = crossed(Averaging())
    assert plain == pytest.approx(2 * 2 * LENGTH * 4, rel=0.1), (
        "two thirds go out and two thirds come in, at each of three"
    )
    assert crossed(Averaging(codec=Codec.FP16)) == pytest.approx(plain / 2, rel=0.05)
    assert crossed(Averaging(codec=Codec.INT8)) < plain / 3
    assert crossed(Averaging(rank=2)) < plain / 3


def test_the_mean_of_those_who_sent_stands_for_all() -> None:
    """What only some sent of a coordinate is divided by their weight."""
    first = contribution(0.5, torch.tensor([4.0, 0.0, 0.0]), Codec.TOPK)
    second = contribution(0.25, torch.tensor([1.0, 2.0, 0.0]), Codec.TOPK)
    assert reduce_part([first, second]).tolist() == pytest.approx([5.0 / 0.75, 2.0 / 0.25, 0.0])
    assert reduce_part([contribution(0.5, torch.tensor([4.0]), Codec.INT8)] * 2).tolist() == [8.0]


@pytest.mark.parametrize(
    "averaging",
    [
        Averaging(codec=Codec.TOPK, keep=0.1),
        Averaging(codec=Codec.INT4),
        Averaging(rank=1),
        Averaging(rank=2, codec=Codec.FP16),
    ],
    ids=["top-k", "int4", "PowerSGD", "PowerSGD in fp16"],
)
def test_what_was_not_said_is_said_later(averaging: Averaging) -> None:
    """Of equal gradients in every step, the sum of all that was agreed follows the true one at a bounded distance.

    By top-k, where the mean of those who sent stands for all, it is what each has still to say that is bounded.
    """
    members = gradient_compressors(averaging)
    local = vectors(3)
    true_N = torch.stack(local).sum(dim=0)
    agreed_N, waiting = torch.zeros(LENGTH), []
    for step in range(1, STEPS + 1):
        results, _ = agree(members, local, WEIGHTS)
        for member in members:
            member.accept()
        agreed_N += results[0]
        residuals = [member.carried.residual_N for member in members if member.carried.residual_N is not None]
        if averaging.codec == Codec.TOPK:
            waiting.append(max(float(residual_N.norm()) for residual_N in residuals))
            continue
        waiting.append(error(agreed_N, step * true_N) * step)
        assert torch.allclose(agreed_N + torch.stack(residuals).sum(dim=0), step * true_N, atol=1e-3 * step)
    assert max(waiting[STEPS // 2 :]) <= 1.2 * max(waiting[: STEPS // 2]), "it does not grow"


def test_sparseloco_forgets_slowly_what_it_could_not_say() -> None:
    """Of equal gradients, what was agreed points where they do; what waits is bounded by the decay, not by the steps."""
    members = gradient_compressors(Averaging(codec=Codec.TOPK2, keep=0.1))
    local = vectors(3)
    true_N = torch.stack(local).sum(dim=0)
    agreed_N = torch.zeros(LENGTH)
    for _ in range(STEPS // 2):
        results, _ = agree(members, local, WEIGHTS)
        assert all(torch.equal(result_N, results[0]) for result_N in results)
        for member in members:
            member.accept()
        agreed_N += results[0]
    assert float(torch.cosine_similarity(agreed_N, true_N, dim=0)) > 0.95
    assert members[0].carried.residual_N is not None
    assert float(members[0].carried.residual_N.norm()) < float(local[0].norm()) / (1 - 0.95)


def test_full_rank_is_exact() -> None:
    """Of matrices that are of no higher rank than the factors."""
    generator = torch.Generator().manual_seed(4)
    matrix_OI = torch.randn(40, 2, generator=generator) @ torch.randn(2, 24, generator=generator)
    members = [make_gradient_compressor(Averaging(rank=2), [matrix_OI.shape]) for _ in range(2)]
    results, _ = agree(members, [0.5 * matrix_OI.reshape(-1), 0.25 * matrix_OI.reshape(-1)], [0.5, 0.5])
    assert error(results[1], 0.75 * matrix_OI.reshape(-1)) < 1e-5


def test_small_tensors_are_not_factored() -> None:
    local = vectors(4)
    results, _ = agree(gradient_compressors(Averaging(rank=24)), local, WEIGHTS)
    assert error(results[0], torch.stack(local).sum(dim=0)) < 1e-6


def test_vectors_are_never_coarse() -> None:
    """Biases, norms and running statistics travel as they are beside a coarse codec."""
    local = vectors(5)
    results, _ = agree(gradient_compressors(Averaging(codec=Codec.INT4)), local, WEIGHTS)
    places = torch.split(torch.arange(LENGTH), [shape.numel() for shape in SHAPES])
    total_N = torch.stack(local).sum(dim=0)
    for shape, place in zip(SHAPES, places, strict=True):
        assert torch.allclose(results[0][place], total_N[place], atol=1e-5) == (len(shape) == 1)


@pytest.mark.parametrize(
    "averaging", [Averaging(codec=Codec.TOPK, keep=0.1), Averaging(rank=2)], ids=["top-k", "PowerSGD"]
)
def test_an_attempt_that_fails_leaves_no_trace(averaging: Averaging) -> None:
    tried, fresh = gradient_compressors(averaging), gradient_compressors(averaging)
    agree(tried, vectors(6), WEIGHTS)  # agreed, but never committed
    started = [
        gradient_compressor.run(Exchange(FlatVector([vector_N]), FlatVector([torch.empty_like(vector_N)]), 0.5))
        for gradient_compressor, vector_N in zip(tried, vectors(7), strict=True)
    ]
    for run in started:
        next(run)  # given up in the middle
    again, _ = agree(tried, vectors(8), WEIGHTS)
    first, _ = agree(fresh, vectors(8), WEIGHTS)
    assert torch.equal(again[0], first[0])


def test_what_is_carried_goes_from_one_to_another() -> None:
    averaging = Averaging(rank=2)
    old, new = gradient_compressors(averaging), gradient_compressors(averaging)
    agree(old, vectors(9), WEIGHTS)
    for here, there in zip(old, new, strict=True):
        here.accept()
        there.carried = here.carried
    assert torch.equal(agree(old, vectors(10), WEIGHTS)[0][0], agree(new, vectors(10), WEIGHTS)[0][0])


def test_the_outer_step_is_nesterov() -> None:
    """As torch.optim.SGD with Nesterov momentum makes it; statistics behind the parameters are averaged."""
    start_N, pseudo_gradients = torch.randn(6), [torch.randn(8), torch.randn(8), torch.randn(8)]
    parameter = torch.nn.Parameter(start_N.clone())
    reference = torch.optim.SGD([parameter], lr=0.7, momentum=0.9, nesterov=True)
    statistics_M = torch.tensor([3.0, -1.0])
    outer = OuterOptimizer(torch.cat([start_N, statistics_M]), 6, Averaging(every=5, outer_lr=0.7, outer_momentum=0.9))
    for pseudo_gradient_N in pseudo_gradients:
        parameter.grad = pseudo_gradient_N[:6].clone()
        reference.step()
        statistics_M = statistics_M - pseudo_gradient_N[6:]
        values_N = outer.update(pseudo_gradient_N)
        assert torch.allclose(values_N[:6], parameter.detach(), atol=1e-6)
        assert torch.allclose(values_N[6:], statistics_M)
        assert torch.allclose(outer.way(values_N.clone()), torch.zeros(8)), "nobody has gone anywhere yet"
