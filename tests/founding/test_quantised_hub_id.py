"""A quantised model of the hub, by its id, becomes a swarm: with the weights as they are, or with plain ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from swarmnode.compute.model.checkpoint import Checkpoint
from swarmnode.swarm.records.manifest import FORMAT, QUANTISED_FORMAT
from swarmnode.swarm.storage.swarmfile import Swarm, load_swarm
from tests.cli.command import invoke
from tests.compute.model.test_hub import COMMIT, make_default, serving
from tests.compute.packing.test_dequantize import quantise
from tests.llama import save_llama


def founded(folder: Path, monkeypatch: pytest.MonkeyPatch, *options: str) -> tuple[Swarm, dict[str, torch.Tensor], str]:
    """Return the swarm, the tensors of its model dequantised, and what `create` printed."""
    save_llama(folder / "llama", layers=1)
    expected = quantise(folder / "llama", folder / "quantised", "fp8")
    (folder / "quantised" / "tokenizer.json").unlink()  # it was made up
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(folder / "cache"))
    with serving(folder / "quantised") as hub:
        make_default(hub, monkeypatch)
        done = invoke("create", str(folder / "friends"), "--model", *options)
    assert done.returncode == 0, done.stderr
    return load_swarm(folder / "friends.swarm"), expected, done.stdout


def test_create_keeps_its_weights_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    swarm, _, _ = founded(tmp_path, monkeypatch, "org/model")
    assert not (tmp_path / "friends-weights").exists()
    assert swarm.manifest is not None and swarm.manifest.format == QUANTISED_FORMAT
    assert (swarm.manifest.model.hub_id, swarm.manifest.model.revision) == ("org/model", COMMIT)
    assert swarm.checkpoint is not None and swarm.checkpoint.is_relative_to(tmp_path / "cache")
    stored = (tmp_path / "quantised" / "model.safetensors").stat().st_size
    file = swarm.manifest.file("model.safetensors")
    assert file is not None and file.size == stored


@pytest.mark.parametrize("revision", ["", "@v1"])
def test_create_can_make_it_plain(revision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    swarm, expected, told = founded(tmp_path, monkeypatch, f"org/model{revision}", "--plain")
    assert "friends-weights has the dequantised ones" in told
    plain = Checkpoint(tmp_path / "friends-weights")
    assert "quantization_config" not in json.loads((plain.path / "config.json").read_text())
    for name, tensor in load_file(plain.path / "model.safetensors").items():
        torch.testing.assert_close(tensor, expected[name].to(tensor.dtype), rtol=1e-6, atol=1e-7)
    assert swarm.original == f"org/model{revision}"
    assert swarm.manifest is not None and swarm.manifest.format == FORMAT
    assert COMMIT in str(next((tmp_path / "cache").rglob("model.safetensors")))
