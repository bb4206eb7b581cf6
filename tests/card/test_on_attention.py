"""Attention is by kernels that never hold all weights, with a mask only where something is masked beyond what is to come."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import MistralConfig, MistralForCausalLM

from swarmnode.compute.model.checkpoint import Checkpoint
from swarmnode.compute.serving.loading import load_span
from swarmnode.compute.serving.runner import RunnerConfig, StageRunner, StepInput
from swarmnode.compute.training.learner import Learner
from swarmnode.compute.training.lm import load_segment
from swarmnode.swarm.records.run import Run
from tests.card.conftest import LAYERS
from tests.card.simulated import LOADED

UNITS = LAYERS + 2
WINDOW = 8
FUSED = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION]


@dataclass(frozen=True)
class Attended:
    """How attention was asked for: with a mask or none, of which shape, and by which kernel torch does it then."""

    mask: tuple[int, ...] | None
    is_causal: bool
    kernel: SDPBackend


@pytest.fixture
def attended(monkeypatch: pytest.MonkeyPatch) -> list[Attended]:
    """By each layer."""
    seen: list[Attended] = []
    attend = functional.scaled_dot_product_attention

    def watched(*tensors: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False, **options: Any) -> Tensor:
        asked = {"attn_mask": attn_mask, "is_causal": is_causal, **options}
        kernel = SDPBackend(torch._fused_sdp_choice(*tensors, **asked))
        seen.append(Attended(None if attn_mask is None else tuple(attn_mask.shape), is_causal, kernel))
        return attend(*tensors, **asked)

    monkeypatch.setattr(functional, "scaled_dot_product_attention", watched)
    return seen


@pytest.fixture(scope="module")
def models(checkpoints: dict[str, Checkpoint], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Checkpoint]:
    """And a small Mistral, whose layers look back over a window."""
    folder: Path = tmp_path_factory.mktemp("mistral")
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": LAYERS, "vocab_size": 99}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "sliding_window": WINDOW}
    MistralForCausalLM(MistralConfig(**sizes, **heads, bos_token_id=None, eos_token_id=None)).save_pretrained(folder)
    return {**checkpoints, "mistral": Checkpoint(folder)}


def in_one_way(attended: list[Attended]) -> Attended:
    """All layers did."""
    assert len(attended) == LAYERS and len(set(attended)) == 1
    return attended[0]


@pytest.mark.parametrize("kind", ["llama", "gpt2", "mistral"])
def test_who_needs_no_mask_has_none(
    kind: str, attended: list[Attended], card: torch.device, models: dict[str, Checkpoint]
) -> None:
    """Below the window's length Mistral is like the others."""
    span = load_span(models[kind], 0, UNITS, device=card, dtype=torch.bfloat16)
    runner = StageRunner(span, RunnerConfig(1 << 22, capture=False))
    for name in "abcd":
        runner.open(name, rows=1, max_length=40)

    def run(**counts: int) -> Attended:
        """Where the kernel that holds all weights would be needed, a real card refuses."""
        attended.clear()
        with sdpa_kernel(FUSED):
            runner.run([StepInput(name, torch.ones(1, count, dtype=torch.int64)) for name, count in counts.items()])
        way = in_one_way(attended)
        assert way.kernel in FUSED
        return way

    def way_of(**counts: int) -> tuple[tuple[int, ...] | None, bool]:
        way = run(**counts)
        return way.mask, way.is_causal

    slides = kind == "mistral"
    assert way_of(a=4) == (None, True), "a prompt"
    assert way_of(a=2) == ((1, 1, 2, 6), False), (
        "a chunk behind it: what torch calls causal would begin at the first column"
    )
    assert way_of(a=1) == (None, False), "a step"
    assert way_of(b=3, c=7) == (None, True), "prompts of two lengths: what lies behind the shorter is behind all of it"
    assert way_of(a=1, c=1) == (None, False) if not slides else ((2, 1, 1, 8), False), "two of the same length"
    assert way_of(b=1, c=1) == ((2, 1, 1, WINDOW if slides else 9), False), "two of unlike lengths"
    assert way_of(d=20) == ((1, 1, 20, 20), False) if slides else (None, True), "a prompt longer than the window"
    assert way_of(d=1) == ((1, 1, 1, 21), False) if slides else (None, False), "a step there"


@pytest.mark.parametrize("kind", ["llama", "gpt2", "mistral"])
def test_training_has_no_mask_but_for_windows(
    kind: str, attended: list[Attended], card: torch.device, models: dict[str, Checkpoint]
) -> None:
    run = Run(data=bytes(32), steps=6, batch=4, microbatch=2, sequence=12, autocast=True)
    learner = Learner(load_segment(models[kind], 1, UNITS - 1, device=card), run)
    learner.forward(0, 0, 1, UNITS - 1, (torch.randn(2, 12, 32, device=card),))
    attended.clear()  # a first pass may try a tiny model of the family
    learner.forward(1, 1, 1, UNITS - 1, (torch.randn(2, 12, 32, device=card),))
    way = in_one_way(attended)
    masked = kind == "mistral"
    assert (way.mask, way.is_causal) == ((2, 1, 12, 12) if masked else None, not masked)
    assert LOADED or way.kernel in FUSED, (
        "of training in 16 bits the simulated card shows a CPU's choice, which is another"
    )
