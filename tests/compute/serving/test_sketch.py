"""Sketches: near where what was sketched is near, and nobody can change a state and keep its sketch."""

from __future__ import annotations

import math

import pytest
import torch

from swarmnode.compute.serving.sketch import deviations, read_sketches, sketch, sketch_bytes
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
