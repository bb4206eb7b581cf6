"""Flat vectors: several tensors read and written as one, without copies."""

from __future__ import annotations

import pytest
import torch

from swarmnode.codec.tensors import Codec
from swarmnode.compute.training.averaging.gradient_compressor import Round
from swarmnode.compute.training.averaging.parts import FlatVector
from swarmnode.errors import NotFinite

SIZES = [5, 0, 3, 7]


def tensors() -> list[torch.Tensor]:
    return list(torch.split(torch.arange(15.0), SIZES))


@pytest.mark.parametrize("start", range(16))
def test_any_place_is_read_and_written_as_of_one_tensor(start: int) -> None:
    whole_N = torch.arange(15.0)
    for stop in range(start, 16):
        vector = FlatVector(tensors())
        assert torch.equal(vector.read(slice(start, stop)), whole_N[start:stop])
        vector.write(slice(start, stop), -whole_N[start:stop])
        expected_N = whole_N.clone()
        expected_N[start:stop] *= -1
        assert torch.equal(vector.copy(), expected_N)


def test_what_is_of_one_tensor_is_not_copied() -> None:
    parts = tensors()
    vector = FlatVector(parts)
    vector.read(slice(9, 12)).zero_()
    assert parts[3].tolist() == [8, 0, 0, 0, 12, 13, 14]
    vector.split([2, 3, 3, 7])[1].zero_()
    assert parts[0].tolist() == [0, 1, 0, 0, 0]


def test_what_does_not_fit_is_refused() -> None:
    vector = FlatVector(tensors())
    with pytest.raises(ValueError, match="4 values"):
        vector.write(slice(0, 5), torch.zeros(4))
    with pytest.raises(ValueError, match="5 values"):
        vector.write(slice(12, 17), torch.zeros(5))
    with pytest.raises(ValueError, match="cross"):
        vector.split([6, 9])
    with pytest.raises(ValueError, match="pieces of 14"):
        vector.split([5, 9])


def test_a_sum_beyond_float16_is_cut_and_not_put_down_to_its_owner() -> None:
    place, own_N = slice(0, 4), torch.tensor([60_000.0, -60_000, 1, 2])
    owner = Round(FlatVector([own_N]), FlatVector([torch.zeros(4)]), 0.5, Codec.FP16)
    heard = [owner.accept(place, 0.5, *owner.offer(place)) for _ in range(2)]
    owner.write_settled(place, *owner.settle(place, heard))
    assert owner.total.copy().tolist() == [65_504, -65_504, 2, 4]
    with pytest.raises(NotFinite):
        Round(FlatVector([own_N * torch.inf]), owner.total, 0.5, Codec.FP16).offer(place)
