"""What a training swarm's results are held to, on real processes and in virtual time alike; and a model for it to train."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

import pytest
import torch
from safetensors.torch import load_file
from transformers import GPT2Config, GPT2LMHeadModel

from swarmnode.client.training.preparation import prepare
from swarmnode.compute.model.checkpoint import Checkpoint
from swarmnode.compute.training.lm import load_segment
from swarmnode.compute.training.local import train_locally
from swarmnode.swarm.records.manifest import Manifest
from swarmnode.swarm.records.run import Run

NO_MARKS = {"bos_token_id": 0, "eos_token_id": 0}


def save_gpt2(folder: Path, *, layers: int, heads: int, width: int, positions: int) -> None:
    """A GPT-2 on bytes with dropout, random but fixed, whose ends share their parameters."""
    config = GPT2Config(vocab_size=256, n_embd=width, n_layer=layers, n_head=heads, n_positions=positions, **NO_MARKS)
    torch.manual_seed(3)
    GPT2LMHeadModel(config).save_pretrained(folder)


def losses_of_one_process(manifest: Manifest | None, model: Path, data: Path, settings: Run) -> dict[int, float]:
    """By step, on the batches that a swarm's trainer would take."""
    assert manifest is not None
    run, batches = prepare(manifest, model, data, settings)
    segment = load_segment(Checkpoint(model), 0, manifest.model.units, device=torch.device("cpu"))
    return {report.step: report.loss for report in train_locally(segment, run, batches)}


class KeepsStates(Protocol):
    """A swarm whose nodes keep the state of the last step, by block."""

    def last_states(self, name: str) -> Mapping[str, Path]: ...


def assert_same_curve(losses: Mapping[int, float], alone: Mapping[int, float], *, steps: int) -> None:
    """Every step was done, with the loss of one process."""
    assert sorted(losses) == list(range(steps))
    for step, loss in alone.items():
        assert losses[step] == pytest.approx(loss, rel=1e-3), f"step {step}"


def assert_same_parameters(school: KeepsStates, names: Sequence[str], *, spans: int) -> None:
    """Of the nodes that hold the same block, at the last step."""
    seen: dict[str, dict[str, torch.Tensor]] = {}
    compared = 0
    for name in names:
        for block, path in school.last_states(name).items():
            tensors = load_file(path)
            for key, other in seen.setdefault(block, tensors).items():
                assert float((tensors[key].double() - other.double()).abs().max()) <= 1e-5, (name, block, key)
                compared += other is not tensors[key]
    assert compared or len(names) == spans
