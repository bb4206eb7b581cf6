"""Checkpoints are checked before anything is believed, and every problem is told by file and reason."""

from __future__ import annotations

import json
import logging
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from swarmnode.compute.model.checkpoint import Checkpoint, load_config
from swarmnode.compute.serving.loading import load_span
from swarmnode.errors import CheckpointError


@pytest.fixture
def copy(checkpoint_path: Path, tmp_path: Path) -> Path:
    """A copy to spoil."""
    return Path(shutil.copytree(checkpoint_path, tmp_path / "copy"))


def shards_of(path: Path) -> list[Path]:
    return sorted(path.glob("model-*.safetensors"))


def edit_header(file: Path, edit: Callable[[dict], None]) -> None:
    """Rewrite the JSON header of a safetensors file, keeping its length."""
    raw = file.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    edit(header)
    text = json.dumps(header, separators=(",", ":")).encode().ljust(length)
    file.write_bytes(raw[:8] + text[:length] + raw[8 + length :])


def test_reads_names_units_and_tensors(model, checkpoint_path):
    checkpoint = Checkpoint(checkpoint_path)
    assert len(shards_of(checkpoint_path)) > 1
    assert checkpoint.units == 6
    assert set(checkpoint.tensor_names) == set(model.state_dict())
    assert checkpoint.tensors_of(0, 1) == ["model.embed_tokens.weight"]
    assert set(checkpoint.tensors_of(5, 6)) == {"lm_head.weight", "model.norm.weight"}
    assert all(".layers.1." in name for name in checkpoint.tensors_of(2, 3))
    tensors = checkpoint.read(checkpoint.tensors_of(2, 3))
    assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in tensors.items())
    assert checkpoint.dtype == torch.float32


def test_reads_a_single_file(model, tmp_path):
    model.save_pretrained(tmp_path)
    assert (tmp_path / "model.safetensors").is_file()
    assert set(Checkpoint(tmp_path).tensor_names) == set(model.state_dict())


def test_only_the_span_is_read(checkpoint_path, copy, model):
    """A sparse copy: the bytes of other units' tensors are holes. The span is loaded all the same, and equals the model's."""
    whole = Checkpoint(checkpoint_path)
    wanted = set(whole.tensors_of(2, 4))
    for file in shards_of(copy):
        raw = bytearray(file.read_bytes())
        for name, entry in whole.entries.items():
            if entry.file.name == file.name and name not in wanted:
                raw[entry.begin : entry.end] = bytes(entry.nbytes)
        file.write_bytes(raw)
    span = load_span(Checkpoint(copy), 2, 4)
    for name, parameter in span.model.named_parameters():
        assert torch.equal(parameter, model.state_dict()[name])
    assert {name.split(".")[2] for name, _ in span.model.named_parameters()} == {"1", "2"}


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda path: shutil.rmtree(path), "no such folder"),
        (lambda path: (path / "config.json").unlink(), "config.json: missing"),
        (lambda path: (path / "config.json").write_text("{"), "config.json: not readable"),
        (lambda path: (path / "config.json").write_text('{"model_type": "nonsense"}'), "unknown"),
        (
            lambda path: (path / "config.json").write_text('{"model_type": "x", "auto_map": {"AutoModel": "x.X"}}'),
            "needs its own code",
        ),
        (lambda path: (path / "model.safetensors.index.json").unlink(), "neither"),
        (lambda path: (path / "model.safetensors.index.json").write_text("[]"), "index.json: not a JSON object"),
        (lambda path: (path / "model.safetensors.index.json").write_text('{"weight_map": {"x": "../y"}}'), "file name"),
        (lambda path: shards_of(path)[1].unlink(), "missing shard"),
        (lambda path: shards_of(path)[0].write_bytes(b"PK\x03\x04 not weights at all"), "not a safetensors file"),
        (lambda path: shards_of(path)[0].write_bytes(b"\x01"), "not a safetensors file"),
        (lambda path: shards_of(path)[0].write_bytes((5).to_bytes(8, "little") + b"{]]]}" + bytes(99)), "damaged"),
        (lambda path: shards_of(path)[0].write_bytes(shards_of(path)[0].read_bytes()[:-100]), "truncated"),
    ],
)
def test_what_is_wrong_is_told(copy, spoil, message):
    spoil(copy)
    with pytest.raises(CheckpointError, match=message) as caught:
        checkpoint = Checkpoint(copy)
        checkpoint.family  # noqa: B018
    assert str(copy) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("name", "reason"), [("model-q4.gguf", "GGUF"), ("pytorch_model.bin", "pickles")])
def test_other_formats_are_refused_with_the_reason(tmp_path: Path, name: str, reason: str) -> None:
    (tmp_path / name).write_bytes(b"GGUF")
    with pytest.raises(CheckpointError, match=f"{reason}.*safetensors"):
        Checkpoint(tmp_path)


def test_a_tampered_header_is_found(copy):
    name = next(name for name, entry in Checkpoint(copy).entries.items() if entry.file == shards_of(copy)[0])

    def shrink(header: dict) -> None:
        header[name]["shape"][0] -= 1

    edit_header(shards_of(copy)[0], shrink)
    with pytest.raises(CheckpointError, match="contradicts itself"):
        Checkpoint(copy)


def test_a_shard_without_its_tensor_is_found(copy):
    save_file({"other": torch.zeros(3)}, shards_of(copy)[0])
    with pytest.raises(CheckpointError, match="promises"):
        Checkpoint(copy)


def test_a_checkpoint_of_another_shape_is_found(copy):
    """Headers are in order, but the config speaks of a larger model."""
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "intermediate_size": 256}))
    with pytest.raises(CheckpointError):
        load_span(Checkpoint(copy), 1, 3)
    (copy / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 5}))
    with pytest.raises(CheckpointError, match="missing or misshapen"):
        load_span(Checkpoint(copy), 4, 7)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_attention_heads", 0),
        ("num_hidden_layers", 0),
        ("num_hidden_layers", 2.5),
        ("num_hidden_layers", True),
        ("num_hidden_layers", 10**9),
        ("hidden_size", None),
        ("hidden_size", -5),
        ("hidden_size", "x"),
        ("hidden_size", math.nan),
        ("hidden_size", 10**30),
        ("vocab_size", -1),
    ],
)
def test_sizes_that_no_model_has_are_told_before_anything_is_made_of_them(copy: Path, name: str, value: Any) -> None:
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, name: value}))
    with pytest.raises(CheckpointError, match=rf"config.json: {name} is .*, not a whole number from 1 to"):
        Checkpoint(copy).config  # noqa: B018
    (copy / "config.json").write_text(json.dumps({"model_type": "llava", "text_config": {**config, name: value}}))
    with pytest.raises(CheckpointError, match=rf"config.json: {name} is"):
        Checkpoint(copy).config  # noqa: B018


def test_a_config_cannot_have_code_fetched_and_run(copy: Path) -> None:
    """transformers takes a repository on a hub for the name of an implementation, and runs what lies there."""
    file = copy / "config.json"
    values = json.loads(file.read_text())
    wishes = {"attn_implementation": "evil/kernels", "_attn_implementation": "evil/kernels:run"}
    wishes |= {"_attn_implementation_internal": "evil/kernels", "experts_implementation": "evil/kernels"}
    file.write_text(json.dumps({**values, **wishes, "sub": [{"_experts_implementation": "evil/kernels"}]}))
    config = Checkpoint(copy).config
    assert "evil" not in json.dumps(config.to_dict()) and "evil" not in repr(vars(config))


def test_special_floats_are_read_as_transformers_writes_them(tmp_path: Path) -> None:
    config = CONFIG_MAPPING["mamba2"](time_step_limit=(0.0, float("inf")))
    config.save_pretrained(tmp_path)
    assert "__float__" in (tmp_path / "config.json").read_text()
    assert load_config(tmp_path / "config.json").time_step_limit[1] == float("inf")
    values = json.loads((tmp_path / "config.json").read_text()) | {"time_step_limit": "soon"}
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(CheckpointError, match="not a config of mamba2") as caught:
        load_config(tmp_path / "config.json")
    assert "\n" not in str(caught.value)


class Kept(logging.Handler):
    """Handler that keeps the messages."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def test_of_a_config_users_read_only_what_concerns_them(tmp_path: Path) -> None:
    """A vocabulary of a size of its own, because transformers keeps in mind what it has said once."""
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "vocab_size": 301,
    }
    kept = Kept()
    transformers_log = logging.getLogger("transformers")
    transformers_log.addHandler(kept)
    try:
        for model_type, more in (
            ("llama", {"eos_token_id": 128_001}),
            ("gpt2", {"n_embd": 16, "n_head": 2}),
            ("gemma", {"hidden_act": "gelu", "head_dim": 16}),
            ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "spare": 3}}),
        ):
            file = tmp_path / "config.json"
            file.write_text(json.dumps({"model_type": model_type, **sizes, **more}))
            load_config(file)
    finally:
        transformers_log.removeHandler(kept)
    assert len(kept.messages) == 1 and "spare" in kept.messages[0]
