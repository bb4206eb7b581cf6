"""Quantised spans: small, near the original, and honest about what they leave alone."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import nn

from swarmnode.compute.capacity.capacity import unit_sizes
from swarmnode.compute.model.checkpoint import Checkpoint
from swarmnode.compute.packing.quantize import quantize_layers
from swarmnode.compute.serving.loading import load_span
from swarmnode.compute.serving.runner import WANT_ALL, RunnerConfig, StageRunner, StepInput
from swarmnode.errors import LocalError

CPU = torch.device("cpu")


@pytest.mark.parametrize(("method", "max_error", "max_size"), [("int8", 0.03, 0.3), ("nf4", 0.3, 0.2)])
def test_a_quantised_span(model, checkpoint_path, method, max_error, max_size):
    checkpoint = Checkpoint(checkpoint_path)
    span = load_span(checkpoint, 0, 6, quantize=method)
    runner = StageRunner(span, RunnerConfig(1 << 22))
    runner.open(0, rows=1, max_length=16)
    ids = torch.arange(10)[None]
    (result,) = runner.run([StepInput(0, ids, WANT_ALL)])
    with torch.inference_mode():
        expected = model(ids).logits
    assert 0 < (result.output - expected).norm() / expected.norm() < max_error
    assert span.quantization.matrices == 28
    assert span.quantization.bytes_after < max_size * span.quantization.bytes_before
    estimated = sum(unit_sizes(checkpoint, dtype=torch.float32, quantize=method).weight_bytes)
    assert estimated == pytest.approx(span.weight_bytes, rel=0.1)


def test_neighbours_with_outliers_change_nobodys_numbers():
    """Which columns have an outlier was the batch's affair with LLM.int8."""
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(64, 48))
    quantize_layers(layers, "int8", CPU)
    x_BI = torch.randn(3, 64)
    calm = layers(x_BI)
    x_BI[1:, ::7] = 200.0
    torch.testing.assert_close(layers(x_BI)[0], calm[0], atol=1e-6, rtol=0)


@pytest.mark.parametrize("method", ["int8", "nf4"])
def test_a_session_gets_the_same_alone_and_beside_others(checkpoint_path, method):
    """Also when its rows were regrouped as another came and went."""
    span = load_span(Checkpoint(checkpoint_path), 0, 6, quantize=method)
    ids = torch.randint(0, 90, (1, 12), generator=torch.Generator().manual_seed(0))

    def logits(runner, beside):
        outputs = []
        runner.open("session", rows=1, max_length=16)
        for position in range(12):
            works = [StepInput("session", ids[:, position : position + 1])]
            if position == beside.start:
                runner.open("other", rows=2, max_length=30, padding=(0, 4))
                works.append(StepInput("other", ids[:, :7].expand(2, 7)))
            elif position in beside:
                works.append(StepInput("other", ids[:, :1].expand(2, 1), reorder=(1, 0)))
            elif position == beside.stop:
                runner.close("other")
            outputs.append(runner.run(works)[0].output)
        return torch.cat(outputs)

    alone, together = (
        logits(StageRunner(span, RunnerConfig(1 << 22)), beside) for beside in (range(-1, -1), range(3, 8))
    )
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=1e-4)


def test_fused_experts_are_named_as_kept():
    layers = nn.ModuleDict({"experts": nn.ParameterList([torch.zeros(4, 64, 64)]), "plain": nn.Linear(64, 64)})
    done = quantize_layers(layers, "int8", CPU)
    assert done.matrices == 1
    assert "66 kB of layers stay as they are" in str(done)


def test_what_cannot_be_is_told():
    with pytest.raises(LocalError, match="no quantisation 'int3'"):
        quantize_layers(nn.Sequential(nn.Linear(64, 64)), "int3", CPU)
    with pytest.raises(LocalError, match="not available on mps: use int8, or --device cpu"):
        quantize_layers(nn.Sequential(nn.Linear(64, 64)), "nf4", torch.device("mps"))
    with pytest.raises(LocalError, match="no plain matrices"):
        quantize_layers(nn.Sequential(nn.LayerNorm(64)), "nf4", CPU)


def test_without_bitsandbytes(monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(LocalError, match="does not work on this machine"):
        quantize_layers(nn.Sequential(nn.Linear(64, 64)), "nf4", CPU)
