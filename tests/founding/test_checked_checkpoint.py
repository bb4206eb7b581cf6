"""What every volunteer would find after the download is found before a swarm is founded."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from swarmnode.errors import CheckpointError
from swarmnode.founding.model_source import from_checkpoint
from tests.llama import save_llama

Tensors = dict[str, torch.Tensor]


def change(folder: Path, how: Callable[[Tensors], Any]) -> None:
    """Change the checkpoint's tensors."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    how(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


def padded(tensors: Tensors) -> None:
    name = "model.embed_tokens.weight"
    tensors[name] = torch.cat([tensors[name], torch.zeros(64, tensors[name].shape[1])])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_llama(tmp_path / "model", 2)
    return tmp_path / "model"


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        (lambda tensors: tensors.pop("lm_head.weight"), r"lacks 1 tensor of the model, as lm_head\.weight"),
        (lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"), r"lacks 1 tensor.*layers\.1\.mlp\.up_proj"),
        (padded, r"embed_tokens\.weight has the shape .*by config\.json the model's is .*\(vocab_size\)"),
        (
            lambda tensors: tensors.update({"model.norm.weight": tensors["model.norm.weight"].repeat(2)}),
            r"model\.norm\.weight has the shape",
        ),
        (
            lambda tensors: tensors.update({"model.norm.weight": tensors["model.norm.weight"].long()}),
            r"model\.norm\.weight is I64, not floating-point numbers",
        ),
        (
            lambda tensors: tensors.update({"model.layers.0.self_attn.q_proj.bias": torch.ones(8)}),
            r"has 1 tensor that the model.*no place for, as model\.layers\.0\.self_attn\.q_proj\.bias",
        ),
        (
            lambda tensors: tensors.update({"lm_head.bias": torch.ones(8)}),
            r"no place for, as lm_head\.bias",
        ),
    ],
)
def test_wrong_tensors(folder: Path, tmp_path: Path, how: Callable[[Tensors], Any], reason: str) -> None:
    change(folder, how)
    with pytest.raises(CheckpointError, match=reason):
        from_checkpoint(str(folder), tmp_path / "out")


def test_buffers_of_older_versions_are_no_fault(folder: Path, tmp_path: Path) -> None:
    def add(tensors: Tensors) -> None:
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
        tensors["model.layers.0.self_attn.bias"] = torch.ones(1, 1, 8, 8)

    change(folder, add)
    assert from_checkpoint(str(folder), tmp_path / "out").folder == folder


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"num_beams": 4}, "num_beams is 4, which swarmnode does not support"),
        ({"suppress_tokens": [1]}, "suppress_tokens"),
        ({"no_repeat_ngram_size": 3}, "no_repeat_ngram_size"),
        ({"temperature": -1}, "temperature is -1, not a number from 0"),
        ({"top_p": 0}, "top_p is 0"),
        ({"top_k": "many"}, "top_k is many"),
        ({"repetition_penalty": 0}, "repetition_penalty is 0"),
        ({"eos_token_id": "<eos>"}, "eos_token_id is neither a token id"),
        ({"eos_token_id": list(range(65))}, "a list of up to 64"),
    ],
)
def test_ways_to_draw_that_are_not_done(folder: Path, tmp_path: Path, values: dict[str, Any], reason: str) -> None:
    (folder / "generation_config.json").write_text(json.dumps(values))
    with pytest.raises(CheckpointError, match=reason):
        from_checkpoint(str(folder), tmp_path / "out")


def test_ways_to_draw_that_are_off_or_done(folder: Path, tmp_path: Path) -> None:
    values = {
        "num_beams": 1,
        "min_length": 0,
        "suppress_tokens": None,
        "do_sample": True,
        "temperature": 0.6,
        "top_k": 50,
    }
    (folder / "generation_config.json").write_text(json.dumps({**values, "eos_token_id": [1, 2], "max_length": 9}))
    assert from_checkpoint(str(folder), tmp_path / "out").folder == folder


def test_a_tokenizer_with_code_of_its_own_is_refused(folder: Path, tmp_path: Path) -> None:
    (folder / "vocab.json").write_text("{}")
    (folder / "tokenizer_config.json").write_text(json.dumps({"auto_map": {"AutoTokenizer": ["a.B", None]}}))
    with pytest.raises(CheckpointError, match="code of its own"):
        from_checkpoint(str(folder), tmp_path / "out")
