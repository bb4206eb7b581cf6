"""A span that cannot compute on its card is known before it serves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from swarmnode.compute.model.checkpoint import Checkpoint
from swarmnode.compute.serving.loading import load_span
from swarmnode.compute.serving.runner import RunnerConfig, StageRunner
from swarmnode.errors import PrecisionError
from swarmnode.serving.span_part import TRIAL_SESSION, try_span
from tests.card.conftest import LAYERS

UNITS = LAYERS + 2


@pytest.fixture
def runner(card: torch.device, checkpoints: dict[str, Checkpoint]) -> StageRunner:
    span = load_span(checkpoints["llama"], 0, UNITS, device=card, dtype=torch.float16)
    return StageRunner(span, RunnerConfig(1 << 20))


def test_who_can_compute_serves(runner: StageRunner, card: torch.device, checkpoints: dict[str, Checkpoint]) -> None:
    try_span(runner)
    try_span(StageRunner(load_span(checkpoints["gpt2"], 1, UNITS, device=card), RunnerConfig(1 << 20)))
    assert TRIAL_SESSION not in runner


@torch.no_grad()
def test_numbers_too_large_for_float16(runner: StageRunner) -> None:
    runner.span.model.get_input_embeddings().weight.mul_(1e7)
    with pytest.raises(PrecisionError, match=r"infinity in float16 on cuda:\d"):
        try_span(runner)
    assert TRIAL_SESSION not in runner


def test_a_kernel_that_makes_nan_of_what_sees_nothing(runner: StageRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    attend = functional.scaled_dot_product_attention

    def attend_as_some(*args: Any, **options: Any) -> Tensor:
        sees_something = options["attn_mask"].any(-1, keepdim=True)
        return attend(*args, **options).masked_fill(~sees_something, float("nan"))

    monkeypatch.setattr(functional, "scaled_dot_product_attention", attend_as_some)
    with pytest.raises(PrecisionError, match="NaN"):
        try_span(runner)
