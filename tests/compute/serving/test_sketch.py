"""Sketches: near where what was sketched is near, and nobody can change a state and keep its sketch."""

from __future__ import annotations

import math

import pytest
import torch

from swarmnode.compress.codecs import describe_values
from swarmnode.compute.serving.sketch import deviations, read_sketches, rows_sketched, sketch, sketch_bytes, sketches
from swarmnode.errors import ProtocolError

SEED = bytes(range(16))


def states(width: int = 256, seed: int = 1) -> torch.Tensor:
    return torch.randn(64, width, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("size", [1e-6, 1e-3, 0.3])
def test_the_deviation_of_sketches_is_that_of_the_states(size: float) -> None:
    hidden_TH, noise_TH = states(), states(seed=2)
    found = deviations(sketch(hidden_TH, SEED), sketch(hidden_TH + size * noise_TH, SEED))
    assert math.isclose(sum(found) / len(found), size, rel_tol=0.1)
    assert size / 3 < min(found) <= max(found) < 2 * size


def test_what_leaves_one_sketch_as_it_is_shows_in_that_of_another_seed() -> None:
    hidden_TH, sign_HK = states(), sketch(torch.eye(256), SEED).double()
    hidden_in_sketch = torch.linalg.pinv(sign_HK.T)
    change_TH = states(seed=3).double()
    change_TH -= (change_TH @ sign_HK) @ hidden_in_sketch.T  # nothing of it is left in the sketch of SEED
    forged_TH = (hidden_TH + change_TH).float()
    assert max(deviations(sketch(hidden_TH, SEED), sketch(forged_TH, SEED))) < 1e-5
    assert min(deviations(sketch(hidden_TH, bytes(16)), sketch(forged_TH, bytes(16)))) > 0.3


def test_zeros_and_what_is_not_finite() -> None:
    zero_TK, one_TK = torch.zeros(1, 32), torch.ones(1, 32)
    assert deviations(zero_TK, zero_TK) == [0.0]
    assert deviations(zero_TK, one_TK) == [math.inf]
    with pytest.raises(ProtocolError):
        read_sketches(sketch_bytes(one_TK * math.nan), 1)
    with pytest.raises(ProtocolError):
        read_sketches(sketch_bytes(one_TK), 2)
    assert torch.equal(read_sketches(sketch_bytes(one_TK), 1), one_TK)


def test_of_whole_numbers_only_digits_of_tokens_are_sketched() -> None:
    digits_BTD = torch.randint(256, (2, 5, 3), dtype=torch.uint8)
    ids_BT, image_BHWC = torch.randint(256, (2, 5)), torch.zeros(2, 5, 4, 3, dtype=torch.uint8)
    values = [torch.randn(2, 5, 8), digits_BTD, ids_BT, image_BHWC, image_BHWC[..., 0].repeat(1, 1, 2), digits_BTD[:0]]
    found = sketches(values, bytes(8))
    assert [len(one) for one in found] == rows_sketched(describe_values(values)) == [10, 10]
    changed_BTD = digits_BTD.clone()
    changed_BTD[1, 4, 2] ^= 1
    same_T = (sketch(changed_BTD.view(-1, 3), bytes(8)) == found[1]).all(-1)
    assert same_T.tolist() == [True] * 9 + [False]
