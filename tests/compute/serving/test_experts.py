"""Experts that guesses wake, as counted beside those that a whole model chooses for the same tokens."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from swarmnode.compute.model.checkpoint import Checkpoint
from swarmnode.compute.serving import expert_counts
from swarmnode.compute.serving.loading import load_span
from swarmnode.compute.serving.runner import RunnerConfig, StageRunner, StepInput

PROMPT, SURE, GUESSED = 5, 1, 3
SIZES = {"hidden_size": 32, "intermediate_size": 32, "moe_intermediate_size": 16, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}


def chosen(model: Qwen3MoeForCausalLM, ids_BT: Tensor) -> list[Tensor]:
    """Return the experts_BTK of each layer, from the router's own outputs."""
    found: list[Tensor] = []
    for layer in model.model.layers:
        layer.mlp.gate.register_forward_hook(lambda _module, _inputs, output: found.append(output[2]))
    with torch.inference_mode():
        model(ids_BT)
    return [one.view(*ids_BT.shape, -1) for one in found]


def test_experts_of_guesses_are_those_that_no_text_chose(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(3)
    model = Qwen3MoeForCausalLM(
        Qwen3MoeConfig(vocab_size=64, num_experts=16, num_experts_per_tok=2, **SIZES, **HEADS)
    ).eval()
    model.save_pretrained(tmp_path / "model")
    checkpoint = Checkpoint(tmp_path / "model")
    runner = StageRunner(load_span(checkpoint, 0, checkpoint.units), RunnerConfig(cache_bytes=1 << 22))
    texts = torch.randint(64, (2, PROMPT + SURE + GUESSED))
    layers = chosen(model, texts)
    for session, ids_T in enumerate(texts):
        runner.open(session, rows=1, max_length=32)
        runner.run([StepInput(session, ids_T[None, :PROMPT])])
    assert (runner.experts.text, runner.experts.guesses) == (0, 0), "nothing was guessed"
    works = [
        StepInput(0, texts[:1, PROMPT:], guessed=GUESSED),  # the other session's step is filled up
        StepInput(1, texts[1:, PROMPT : PROMPT + SURE]),
    ]
    runner.run(works)
    text = [{*layer[:, PROMPT : PROMPT + SURE].flatten().tolist()} for layer in layers]
    guesses = [{*layer[0, PROMPT + SURE :].flatten().tolist()} for layer in layers]
    assert runner.experts.text == sum(map(len, text))
    assert runner.experts.guesses == sum(len(new - old) for new, old in zip(guesses, text, strict=True)) > 0
    counted = runner.experts.text
    runner.run([StepInput(0, texts[:1, -2:], guessed=1)])
    assert runner.experts.text == counted, "only one pass in some is looked at"
    monkeypatch.setattr(expert_counts, "EVERY", 2)
    runner.run([StepInput(0, texts[:1, -2:], guessed=1)])
    assert runner.experts.text > counted


def test_a_model_without_experts_counts_none() -> None:
    assert not expert_counts.ExpertCounts(torch.nn.Linear(1, 1)).is_due()
