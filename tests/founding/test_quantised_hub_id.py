"""A quantised model of the hub, by its id, becomes a swarm with plain weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from swarmnode.compute.model.checkpoint import Checkpoint
from swarmnode.swarm.storage.swarmfile import load_swarm
from tests.cli.command import invoke
from tests.compute.model.test_dequantize import quantise
from tests.compute.model.test_hub import COMMIT, make_default, serving
from tests.llama import save_llama


@pytest.mark.parametrize("revision", ["", "@v1"])
def test_create_makes_it_plain(revision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_llama(tmp_path / "llama", layers=1)
    expected = quantise(tmp_path / "llama", tmp_path / "quantised", "fp8")
    (tmp_path / "quantised" / "tokenizer.json").unlink()  # it was made up
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    with serving(tmp_path / "quantised") as hub:
        make_default(hub, monkeypatch)
        done = invoke("create", str(tmp_path / "friends"), "--model", f"org/model{revision}")
    assert done.returncode == 0, done.stderr
    assert "friends-weights has the dequantised ones" in done.stdout
    plain = Checkpoint(tmp_path / "friends-weights")
    assert "quantization_config" not in json.loads((plain.path / "config.json").read_text())
    for name, tensor in load_file(plain.path / "model.safetensors").items():
        torch.testing.assert_close(tensor, expected[name].to(tensor.dtype), rtol=1e-6, atol=1e-7)
    assert load_swarm(tmp_path / "friends.swarm").original == f"org/model{revision}"
    assert COMMIT in str(next((tmp_path / "cache").rglob("model.safetensors")))
