"""Tiny checkpoints on disk."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM


@pytest.fixture(scope="session")
def model() -> LlamaForCausalLM:
    """A llama of 4 layers with shared keys and values, random but fixed."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=99,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="session")
def checkpoint_path(model: LlamaForCausalLM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its checkpoint, in several shards. Read only: copy it to change it."""
    path = tmp_path_factory.mktemp("checkpoint")
    model.save_pretrained(path, max_shard_size="200KB")
    return path
