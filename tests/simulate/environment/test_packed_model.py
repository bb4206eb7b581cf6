"""A simulated swarm on packed weights: the bytes of memory and downloads are those of the file, as in live nodes."""

from __future__ import annotations

from pathlib import Path

import torch

from swarmnode.compute.capacity.capacity import unit_sizes
from swarmnode.compute.model.checkpoint import Checkpoint
from swarmnode.founding.model_source import from_checkpoint
from swarmnode.founding.quantisation import quantise_model
from swarmnode.plan.view import Span
from swarmnode.simulate.environment.model import Model, load_model
from tests.compute.model.llama_gguf import save_llama_gguf
from tests.llama import save_llama


def test_units_take_the_bytes_of_a_gguf_file(tmp_path: Path) -> None:
    save_llama_gguf(tmp_path / "tiny.gguf", form="Q4_0")
    checkpoint = Checkpoint(from_checkpoint(str(tmp_path / "tiny.gguf"), tmp_path / "weights", packs=True).folder)
    live = unit_sizes(checkpoint, dtype=torch.bfloat16, keeps_packed=True)
    for source in (tmp_path / "tiny.gguf", tmp_path / "weights"):
        model = load_model(source, 1)
        assert model.serving_sizes == live
        assert model.loaded_bytes(Span(1, 3), trains=False, learnt=False) == sum(live.weight_bytes[1:3])
    plain = Model.load(tmp_path / "weights" / "config.json")
    assert model.capacity_units(128 << 20, trains=False, cache_tokens=0) == 4
    assert sum(plain.serving_sizes.weight_bytes) > 3 * sum(live.weight_bytes)
    assert model.training_sizes == plain.training_sizes


def test_units_take_the_bytes_of_a_packed_folder(tmp_path: Path) -> None:
    save_llama(tmp_path / "plain", layers=2)
    quantise_model(str(tmp_path / "plain"), tmp_path / "packed", "q8_0")
    packed, plain = load_model(tmp_path / "packed", 1), load_model(tmp_path / "plain", 1)
    assert 1.8 < sum(plain.serving_sizes.weight_bytes) / sum(packed.serving_sizes.weight_bytes) < 2
