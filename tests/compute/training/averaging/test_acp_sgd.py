"""Alternating factors: one of two in each step, the older of which all members have to have."""

from __future__ import annotations

import pytest
import torch
from torch import Size, Tensor

from swarmnode.codec.tensors import Codec
from swarmnode.compute.training.averaging.gradient_compressor import (
    Exchange,
    GradientCompressor,
    make_gradient_compressor,
)
from swarmnode.compute.training.averaging.parts import FlatVector, cut
from swarmnode.errors import ProtocolError
from swarmnode.swarm.records.run import Averaging, Run, check_run
from tests.compute.training.averaging.together import agree

RANK = 2
SHAPES = [Size((40, 24)), Size((24,)), Size((24, 3, 11)), Size((3, 2))]
LENGTH = sum(shape.numel() for shape in SHAPES)
WEIGHTS = [0.5, 0.25, 0.25]
ACP = Averaging(rank=RANK, alternating=True)
GOOD_RUN = Run(data=bytes(32), steps=3, batch=4, microbatch=2, averaging=ACP)


def compressors(averaging: Averaging = ACP, members: int = 3) -> list[GradientCompressor]:
    return [make_gradient_compressor(averaging, SHAPES) for _ in range(members)]


def vectors(seed: int, weights: list[float] = WEIGHTS) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [(weight or 1e6) * torch.randn(LENGTH, generator=generator) for weight in weights]


def low_rank_vectors(seed: int) -> list[Tensor]:
    """Of members whose matrices have the same columns and rows: the rank of their sum is that of each."""
    generator = torch.Generator().manual_seed(seed)
    members: list[list[Tensor]] = [[] for _ in WEIGHTS]
    for shape in SHAPES:
        rows, columns = shape[0], shape.numel() // shape[0]
        left_OR = torch.randn(rows, RANK, generator=generator)
        right_RI = torch.randn(RANK, columns, generator=generator)
        for member in members:
            between_RR = torch.randn(RANK, RANK, generator=generator)
            member.append((left_OR @ between_RR @ right_RI).view(-1))
    return [weight * torch.cat(member) for weight, member in zip(WEIGHTS, members, strict=True)]


def error(total_N: Tensor, wanted_N: Tensor) -> float:
    return float((total_N - wanted_N).norm() / wanted_N.norm())


def accept(members: list[GradientCompressor]) -> None:
    for member in members:
        member.accept()


def test_two_steps_say_all_of_what_has_a_low_rank() -> None:
    members, wanted_N = compressors(), torch.stack(low_rank_vectors(1)).sum(0)
    said_N, errors = torch.zeros(LENGTH), []
    for step in range(4):
        totals, _ = agree(members, low_rank_vectors(1), WEIGHTS, warm_start=step > 0)
        accept(members)
        said_N += totals[0]
        errors.append(error(said_N, (step + 1) * wanted_N))
    assert errors[0] > 0.3, "first factors look anywhere"
    assert errors[1] < 1e-4 and errors[3] < 1e-4


def test_half_of_the_bytes_in_one_round() -> None:
    power, acp = compressors(Averaging(rank=RANK)), compressors()
    sent = {"power": 0, "acp": 0}
    for step in range(2):
        sent["power"] += agree(power, vectors(step), WEIGHTS)[1]
        sent["acp"] += agree(acp, vectors(step), WEIGHTS, warm_start=step > 0)[1]
        accept(power)
        accept(acp)
    few = (
        2 * 4 * (24 + 6) * 4
    )  # vectors and tiny matrices, which both send in each step: two steps, float32, four crossings
    assert sent["acp"] - few == pytest.approx((sent["power"] - few) / 2)
    (one,) = acp[:1]
    (round_,) = one.run(Exchange(FlatVector([vectors(1)[0]]), FlatVector([torch.empty(LENGTH)]), 0.5))
    assert len(round_) == 24 + 6 + RANK * (40 + 24)


@pytest.mark.parametrize("codec", [Codec.NONE, Codec.FP16, Codec.INT8, Codec.INT4])
def test_all_end_with_the_same_numbers_a_listener_too(codec: Codec) -> None:
    members, weights = compressors(Averaging(rank=RANK, alternating=True, codec=codec), 4), [*WEIGHTS, 0.0]
    for step in range(4):
        totals, _ = agree(members, vectors(step, weights), weights, warm_start=step > 0)
        accept(members)
        assert all(torch.equal(total, totals[0]) for total in totals)


def test_what_a_step_misses_is_made_up_for() -> None:
    members, steps = compressors(), 60
    wanted_N, said_N = torch.zeros(LENGTH), torch.zeros(LENGTH)
    for step in range(steps):
        totals, _ = agree(members, vectors(7), WEIGHTS, warm_start=step > 0)
        accept(members)
        said_N += totals[0]
        wanted_N += torch.stack(vectors(7)).sum(0)
    assert error(said_N, wanted_N) < 0.25


def test_members_begin_anew_together_whatever_each_had() -> None:
    old, new = compressors(), compressors()
    for step in range(3):
        agree(old, vectors(step), WEIGHTS, warm_start=step > 0)
        accept(old)
    mixed = [*old[:2], new[2]]
    for _ in range(2):
        totals, _ = agree(mixed, vectors(9), WEIGHTS)
        assert all(torch.equal(total, totals[0]) for total in totals)


def test_an_attempt_that_fails_leaves_no_trace() -> None:
    tried, fresh = compressors(), compressors()
    for members in (tried, fresh):
        agree(members, vectors(1), WEIGHTS)
        accept(members)
    agree(tried, vectors(2), WEIGHTS)  # begun anew, and never committed
    again, _ = agree(tried, vectors(3), WEIGHTS, warm_start=True)
    first, _ = agree(fresh, vectors(3), WEIGHTS, warm_start=True)
    assert torch.equal(again[0], first[0])


def test_a_sum_that_takes_the_place_of_a_vector_leaves_as_much_over() -> None:
    """As where parameters are averaged: what was wanted is noted before it is overwritten."""
    left = []
    for total_N in (torch.empty(LENGTH), None):
        (member,) = compressors(members=1)
        local = FlatVector([vectors(1)[0]])
        total = local if total_N is None else FlatVector([total_N])
        for round_ in member.run(Exchange(local, total, 1.0)):
            for part in cut(len(round_), [1]):
                place = part.place
                round_.write_settled(place, *round_.settle(place, [round_.accept(place, 1.0, *round_.offer(place))]))
        member.accept()
        left.append(member.carried.residual_N)
    assert left[0] is not None and left[1] is not None and torch.equal(left[0], left[1])


def test_who_has_nothing_to_go_on_from_says_so() -> None:
    (member,) = compressors(members=1)
    with pytest.raises(ProtocolError, match="does not have"):
        next(member.run(Exchange(FlatVector([vectors(1)[0]]), FlatVector([torch.empty(LENGTH)]), 1.0, warm_start=True)))


def test_gradients_of_nothing_are_nothing() -> None:
    members, nothing = compressors(), [torch.zeros(LENGTH) for _ in WEIGHTS]
    for step in range(3):
        totals, _ = agree(members, nothing, WEIGHTS, warm_start=step > 0)
        accept(members)
        assert not totals[0].any()
    wanted_N = torch.stack(low_rank_vectors(4)).sum(0)
    said_N = torch.zeros(LENGTH)
    for _ in range(6):
        totals, _ = agree(members, low_rank_vectors(4), WEIGHTS, warm_start=True)
        accept(members)
        said_N += totals[0]
    assert error(said_N, 6 * wanted_N) < 0.2, "directions are found again"


def test_what_is_carried_goes_from_one_to_another() -> None:
    old, new = compressors(), compressors()
    for _ in range(2):
        agree(old, vectors(9), WEIGHTS)
        accept(old)
    for here, there in zip(old, new, strict=True):
        there.carried = here.carried
    there_N = agree(new, vectors(10), WEIGHTS, warm_start=True)[0][0]
    assert torch.equal(agree(old, vectors(10), WEIGHTS, warm_start=True)[0][0], there_N)


def test_what_alternates_are_factors() -> None:
    check_run(GOOD_RUN)
    with pytest.raises(Exception, match="a rank of which factors alternate"):
        check_run(Run(data=bytes(32), steps=3, batch=4, microbatch=2, averaging=Averaging(alternating=True)))
