"""Tiny language models on disk, ids to train them on, and ways to drive learners."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from swarmnode.compute.model.checkpoint import Checkpoint
from swarmnode.compute.training.learner import Learner
from swarmnode.compute.training.lm import load_segment
from swarmnode.swarm.records.run import Run

VOCABULARY = 99
SAMPLES, LENGTH = 2, 12
MICROBATCHES = 3


def build(kind: str) -> Any:
    """A random model: "gpt2" (tied, no dropout), "gpt2-dropout" (0.1 everywhere), "llama" (untied)."""
    torch.manual_seed(0)
    if kind == "llama":
        sizes: dict[str, Any] = {
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
        }
        return LlamaForCausalLM(LlamaConfig(**sizes, num_key_value_heads=2, vocab_size=VOCABULARY, eos_token_id=None))
    dropout = 0.1 if kind == "gpt2-dropout" else 0.0
    drops = {"resid_pdrop": dropout, "embd_pdrop": dropout, "attn_pdrop": dropout}
    ends: dict[str, Any] = {"vocab_size": VOCABULARY, "bos_token_id": None, "eos_token_id": None}
    return GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=3, n_head=4, n_positions=32, **ends, **drops))


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Checkpoint]:
    """kind -> its checkpoint."""
    folder = tmp_path_factory.mktemp("models")

    def get(kind: str) -> Checkpoint:
        path: Path = folder / kind
        if not path.exists():
            build(kind).save_pretrained(path)
        return Checkpoint(path)

    return get


def make_run(**changes: Any) -> Run:
    """AdamW with a warm-up and a clip that bites."""
    settings: dict[str, Any] = {
        "data": bytes(32),
        "steps": 12,
        "batch": SAMPLES * MICROBATCHES,
        "microbatch": SAMPLES,
        "sequence": LENGTH,
    }
    return Run(**{**settings, "learning_rate": 1e-2, "warmup_steps": 3, "clip": 0.5, "seed": 7, **changes})


def ids_of(step: int, index: int) -> Tensor:
    """ids_BT of one microbatch."""
    generator = torch.Generator().manual_seed(1000 * step + index)
    return torch.randint(0, VOCABULARY, (SAMPLES, LENGTH), generator=generator)


def learners(checkpoint: Checkpoint, run: Run, cuts: Sequence[int], **options: Any) -> list[Learner]:
    """One learner for each span between neighbouring cuts."""
    spans = itertools.pairwise(cuts)
    return [Learner(load_segment(checkpoint, start, end), run, **options) for start, end in spans]


def pass_through(chain: Sequence[Learner], index: int, lease: int = 0) -> float:
    """One microbatch there and back; its loss."""
    labels = values = (ids_of(chain[0].step, index),)
    for learner in chain:
        values = learner.forward(lease, index, learner.segment.start, learner.segment.end, values, labels)
    grads: tuple[Tensor | None, ...] = ()
    for learner in reversed(chain):
        grads = learner.backward(lease, grads)
    return float(values[0])


def norm_of(chain: Sequence[Learner]) -> float:
    """The gradient's, over all units; what first and last unit share is summed first, as `commit_all` does."""
    shared = shared_sum(chain)
    total = 0.0 if shared is None else float(shared.double().square().sum())
    for learner in chain:
        total += learner.squared_norm([block for block in learner.blocks if block >= 0])
    return float(total**0.5)


def shared_sum(chain: Sequence[Learner]) -> Tensor | None:
    """Summed gradient of the tied matrix over those that hold it; None where nothing is tied."""
    flats = [learner.gradient([-1]).copy() for learner in chain if -1 in learner.blocks]
    return torch.stack(flats).sum(0) if flats else None


def commit_all(chain: Sequence[Learner]) -> None:
    """What reduction and commit do in a swarm without replicas."""
    norm, shared = norm_of(chain), shared_sum(chain)
    for learner in chain:
        learner.commit({(-1,): shared.clone()} if shared is not None and -1 in learner.blocks else {}, norm)


def train(chain: Sequence[Learner], steps: int) -> list[float]:
    """The loss of each step."""
    losses = []
    for _ in range(steps):
        losses.append(sum(pass_through(chain, index) for index in range(MICROBATCHES)) / MICROBATCHES)
        commit_all(chain)
    return losses
