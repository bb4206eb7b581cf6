"""Attention is by kernels that never hold all weights, with a mask only where something is masked."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from swarmnode.compute.model.checkpoint import Checkpoint
from swarmnode.compute.model.span import load_span
from swarmnode.compute.serving.runner import RunnerConfig, StageRunner, StepInput
from tests.card.conftest import LAYERS

UNITS = LAYERS + 2
KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION]


@pytest.fixture
def masks(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """With which masks attention was asked for; None is none."""
    seen: list[Any] = []
    attend = functional.scaled_dot_product_attention

    def watched(*args: Any, **options: Any) -> torch.Tensor:
        seen.append(options.get("attn_mask"))
        return attend(*args, **options)

    monkeypatch.setattr(functional, "scaled_dot_product_attention", watched)
    return seen


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_who_is_not_padded_has_no_mask(
    kind: str, masks: list[Any], card: torch.device, checkpoints: dict[str, Checkpoint]
) -> None:
    span = load_span(checkpoints[kind], 0, UNITS, device=card, dtype=torch.bfloat16)
    runner = StageRunner(span, RunnerConfig(1 << 22, capture=False))

    def run(ids: dict[str, int]) -> list[bool]:
        """Whether each layer had a mask; where other kernels than the fast ones would be needed, a real card refuses."""
        masks.clear()
        with sdpa_kernel(KERNELS):
            runner.run([StepInput(name, torch.ones(1, count, dtype=torch.int64)) for name, count in ids.items()])
        return [mask is not None for mask in masks]

    for name in "abc":
        runner.open(name, rows=1, max_length=40)
    assert run({"a": 9}) == run({"b": 9}) == [False] * LAYERS  # prompts
    assert run({"a": 1}) == run({"b": 1}) == run({"a": 1, "b": 1}) == [False] * LAYERS
    run({"c": 15})
    assert run({"a": 1, "c": 1}) == [True] * LAYERS
