"""Sums of an adapter's gradients hold only numbers."""

from __future__ import annotations

import pytest
import torch

from swarmnode.compute.executor import drain
from swarmnode.compute.training.adapters.layers import AdapterWeights
from swarmnode.errors import CheckpointError, NotFinite


def test_a_microbatch_is_counted_with_all_its_gradients_or_not_at_all() -> None:
    weights = AdapterWeights({"a": (2, 3), "b": (4,)}, torch.device("cpu"), unit=5)
    drain(weights.accumulate({"a": torch.ones(2, 3), "b": torch.ones(4)}))
    for bad in (float("nan"), float("inf")):
        with pytest.raises(NotFinite, match="holds NaN or infinity") as caught:
            drain(weights.accumulate({"a": torch.ones(2, 3), "b": torch.full((4,), bad)}))
        assert caught.value.unit == 5
    drain(weights.accumulate({"b": torch.ones(4)}))  # the pass did not use the other
    assert drain(weights.gradient_square()) == pytest.approx(6 + 4 * 4)


def test_a_norm_that_overflows_is_an_error() -> None:
    weights = AdapterWeights({"a": (4,)}, torch.device("cpu"), unit=0)
    for _ in range(2):
        drain(weights.accumulate({"a": torch.full((4,), 3e38 / 4)}))
    with pytest.raises(NotFinite, match="too large"):
        drain(weights.gradient_square())


def test_sums_are_replaced_as_a_whole_or_not_at_all() -> None:
    weights = AdapterWeights({"a": (2,), "b": (3,)}, torch.device("cpu"), unit=0)
    drain(weights.load_gradients({"a": torch.ones(2), "b": torch.ones(3), "elsewhere": torch.ones(1)}))
    for bad in ({}, {"b": torch.zeros(4)}, {"b": torch.full((3,), torch.inf)}):
        with pytest.raises(CheckpointError):
            drain(weights.load_gradients({"a": torch.zeros(2), **bad}))
    assert drain(weights.gradient_square()) == pytest.approx(5) and weights.step == 0
