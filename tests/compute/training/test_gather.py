"""A checkpoint out of the states of all blocks: the one that `save_pretrained` would have written."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from swarmnode.codec.body import SHARED
from swarmnode.compute.graph.exporting.module_export import export_module
from swarmnode.compute.graph.graph_segment import load_segment
from swarmnode.compute.graph.serialise import write_graph
from swarmnode.compute.model.checkpoint import Checkpoint, read_entries
from swarmnode.compute.training.learner import Learner
from swarmnode.compute.training.snapshot import gather, write_language_model, write_module, write_shards, write_step
from swarmnode.errors import CheckpointError
from swarmnode.swarm.storage.state_store import StateStore
from tests.compute.training.conftest import build, learners, make_run, train

Get = Callable[[str], Checkpoint]


def states_of(stages: list[Learner], folder: Path, step: int) -> list[Path]:
    """Files of all blocks, as the stages write them."""
    store = StateStore(folder, make_run())
    for stage in stages:
        write_step(store, step, {block: stage.state(block) for block in stage.blocks})
    files = [store.path(step, block) for block in store.files(step)]
    store.close()
    return files


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_from_pretrained_reads_what_was_trained(checkpoint: Get, tmp_path: Path, kind: str) -> None:
    """In two stages; GPT-2's embedding is tied to its head, and each stage has a copy."""
    founded = checkpoint(kind)
    stages = learners(founded, make_run(), (0, 2, 5))
    train(stages, 2)
    out = tmp_path / "out"
    out.mkdir()
    write_language_model(gather(states_of(stages, tmp_path / "states", 2)), founded.path, out)
    model = AutoModelForCausalLM.from_pretrained(out)
    trained = {
        name: tensor for stage in stages for block in stage.blocks for name, tensor in stage.state(block).items()
    }
    expected = {name.removeprefix("parameter/"): t for name, t in trained.items() if name.startswith("parameter/")}
    loaded = dict(model.named_parameters())
    assert loaded.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(loaded[name], tensor), name
    original = build(kind)
    assert not all(torch.equal(tensor, loaded[name]) for name, tensor in original.named_parameters())
    assert read_entries(out).keys() == founded.entries.keys(), "tied weights are there once"
    assert (out / "generation_config.json").is_file()
    model.save_pretrained(tmp_path / "again")
    assert read_entries(tmp_path / "again").keys() == read_entries(out).keys()


def test_a_checkpoint_of_other_tensors_is_refused(checkpoint: Get, tmp_path: Path) -> None:
    founded = checkpoint("llama")
    stages = learners(founded, make_run(), (0, 2, 5))
    files = states_of(stages, tmp_path / "states", 0)
    with pytest.raises(CheckpointError, match="the states lack tensor model"):
        write_language_model(gather(files[:-2]), founded.path, tmp_path)
    tensors = gather(files)
    with pytest.raises(CheckpointError, match="hold an unknown tensor x"):
        write_language_model({**tensors, "x": torch.ones(1)}, founded.path, tmp_path)
    with pytest.raises(CheckpointError, match=r"lm_head.weight of shape \(1,\)"):
        write_language_model({**tensors, "lm_head.weight": torch.ones(1)}, founded.path, tmp_path)
    (tmp_path / "damaged").write_bytes(b"?")
    with pytest.raises(CheckpointError, match="not readable"):
        gather([tmp_path / "damaged"])


def test_large_checkpoints_are_sharded(checkpoint: Get, tmp_path: Path) -> None:
    founded = checkpoint("gpt2")
    shutil.copyfile(founded.path / "config.json", tmp_path / "config.json")
    tensors = founded.read(founded.tensor_names)
    write_shards(tensors, tmp_path, shard_bytes=30_000)
    assert len(list(tmp_path.glob("model-0*.safetensors"))) > 2
    assert read_entries(tmp_path).keys() == tensors.keys()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    for name, tensor in tensors.items():
        assert torch.equal(loaded[name], tensor)


class Net(torch.nn.Module):
    """With running statistics, a frozen weight and a buffer that never moves."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.last = torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1)
        self.scale = torch.nn.Parameter(torch.full((4,), 2.0), requires_grad=False)
        self.register_buffer("shift", torch.arange(4.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.last(self.norm(self.first(x)) * self.scale + self.shift)
        return y.square().mean()


def test_load_state_dict_takes_what_was_trained_of_a_module(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    founded, out = tmp_path / "founded", tmp_path / "out"
    for folder in (founded, out):
        folder.mkdir()
    write_graph(export_module(Net(), (torch.randn(3, 4),)), founded)
    stage = Learner(load_segment(founded, 0, 1), make_run(microbatch=3, batch=9))
    for index in range(3):
        stage.forward(index, index, 0, 1, (torch.randn(3, 4),))
        stage.backward(index, ())
    stage.commit({}, 1.0)
    write_module(gather(states_of([stage], tmp_path / "states", 1)), founded, out)
    net = Net()
    assert not net.load_state_dict(load_file(out / "model.safetensors"), strict=False).missing_keys
    state, loaded = stage.state(0), net.state_dict()
    assert SHARED not in stage.blocks and loaded["norm.num_batches_tracked"] == 1
    for name in ("first.weight", "norm.bias", "last.weight"):
        assert torch.equal(loaded[name], state[f"parameter/{name}"]) and not torch.equal(
            loaded[name], Net().state_dict()[name]
        )
    assert torch.equal(loaded["norm.running_mean"], state["buffer/norm.running_mean"])
    assert torch.equal(loaded["scale"], torch.full((4,), 2.0)) and torch.equal(loaded["shift"], torch.arange(4.0))
    with pytest.raises(CheckpointError, match="does not have"):
        write_module({"other": torch.ones(1)}, founded, out)
