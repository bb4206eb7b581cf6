"""Contributions beside what was committed to: what a codec rounds is no lie, and what is one is seen."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Size, Tensor

from swarmnode.codec.tensors import Codec
from swarmnode.compress.codecs import decode, encode
from swarmnode.compute.training.averaging.gradient_compressor import Exchange, make_gradient_compressor
from swarmnode.compute.training.averaging.parts import LARGEST_PART, FlatVector, cut
from swarmnode.compute.training.recomputation import ContributionSketch, gradient_sketch
from swarmnode.plan.audits import Judgement
from swarmnode.swarm.records.run import Averaging
from swarmnode.tolerances import CONTRIBUTED
from swarmnode.training.spot_checks.check_examination import judge_contribution

ELEMENTS, SEED, PEER = 1 << 16, bytes(range(16)), "peer"
LENGTHS = {0: (ELEMENTS, ELEMENTS)}


def normal(draws_N: Tensor, more_N: Tensor) -> Tensor:
    return draws_N


def heavy_tails(draws_N: Tensor, more_N: Tensor) -> Tensor:
    return draws_N / more_N.abs().clamp_min(1e-3)


def mostly_nothing(draws_N: Tensor, more_N: Tensor) -> Tensor:
    return draws_N * (more_N > 2.5)


def unequal_rows(draws_N: Tensor, more_N: Tensor) -> Tensor:
    return (draws_N.view(-1, 64) * torch.exp(3 * more_N.view(-1, 64)[:, :1])).view(-1)


KINDS = (normal, heavy_tails, mostly_nothing, unequal_rows)


def gradient(kind: Callable[[Tensor, Tensor], Tensor], scale: float = 1e-3) -> Tensor:
    draws = torch.randn(2, ELEMENTS, generator=torch.Generator().manual_seed(1))
    return kind(*draws) * scale


def judged(codec: Codec, due_N: Tensor, said_N: Tensor) -> Judgement | None:
    """Where all of it was settled by one who looks."""
    watched = ContributionSketch(PEER, LENGTHS, SEED)
    for place in (part.place for part in cut(ELEMENTS, [1])):
        watched.accept((0,), PEER, place, decode(*encode(said_N[place], codec)))
    return judge_contribution(watched, {0: gradient_sketch(due_N, SEED)}, codec)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("codec", CONTRIBUTED)
def test_what_a_codec_rounds_is_no_lie(codec: Codec, kind: Callable[[Tensor, Tensor], Tensor]) -> None:
    found = judged(codec, gradient(kind), gradient(kind))
    assert found is not None and not found.false and found.worst < 0.5


@pytest.mark.parametrize("lie", [torch.neg, torch.zeros_like, lambda one: 100 * one, lambda one: one.roll(1)])
@pytest.mark.parametrize("codec", CONTRIBUTED)
def test_what_is_a_lie_is_seen(codec: Codec, lie: Callable[[Tensor], Tensor]) -> None:
    found = judged(codec, gradient(normal), lie(gradient(normal)))
    assert found is not None and found.false


def test_what_fp16_cannot_tell_from_nothing_says_nothing() -> None:
    assert judged(Codec.FP16, gradient(normal, 1e-9), gradient(normal, 1e-9)) is None
    found = judged(Codec.FP16, gradient(normal, 1e-9), gradient(normal))
    assert found is not None and found.false, "but what was sent instead does"


def test_nothing_at_all_is_nothing_to_judge() -> None:
    assert judged(Codec.NONE, torch.zeros(ELEMENTS), torch.zeros(ELEMENTS)) is None


def test_rounds_of_vectors_and_of_matrices_are_parts_of_one_vector() -> None:
    """Where a coarse codec has biases travel by themselves each value is heard once, at its place."""
    shapes = [Size(shape) for shape in ((300, 300), (300,), (7, 300), (300,), (1,), (LARGEST_PART // 256, 300))]
    local_N = torch.randn(sum(shape.numel() for shape in shapes), generator=torch.Generator().manual_seed(2))
    compressor = make_gradient_compressor(Averaging(codec=Codec.INT8), shapes)
    total = FlatVector([torch.empty_like(local_N)])
    heard_N, times_N = torch.zeros_like(local_N), torch.zeros_like(local_N)
    for one in compressor.run(Exchange(FlatVector([local_N]), total, 1.0)):
        for place in (part.place for part in cut(len(one), [1])):
            said = one.accept(place, 1.0, *one.offer(place)).values_N
            for stretch, values_M in one.in_vector(place, said):
                heard_N[stretch] += values_M
                times_N[stretch] += 1
            one.write_settled(place, *one.settle(place, [one.accept(place, 1.0, *one.offer(place))]))
    assert (times_N == 1).all()
    assert torch.allclose(heard_N, local_N, atol=0.03)
