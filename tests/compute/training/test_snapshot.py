"""Snapshots: what is written is read back, bit for bit, and nothing else is taken for it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from swarmnode.compute.training.learner import Learner
from swarmnode.compute.training.snapshot import read_block, read_step, write_block, write_step
from swarmnode.errors import CheckpointError
from swarmnode.swarm.storage.content import describe_files
from swarmnode.swarm.storage.state_store import StateStore
from tests.compute.training.conftest import MICROBATCHES, make_run
from tests.compute.training.toy import ToySegment, toy_values

ODD = {
    "bfloat16": torch.randn(3, 5).bfloat16(),
    "empty": torch.zeros(0, 4),
    "number": torch.tensor(7),
    "transposed": torch.randn(4, 6).t(),
    "part": torch.randn(10)[2:5],
    "flag": torch.tensor([True, False]),
}


def trained(steps: int) -> Learner:
    learner = Learner(ToySegment(), make_run())
    for _ in range(steps):
        for index in range(MICROBATCHES):
            learner.forward(index, index, 0, 3, *toy_values(index))
            learner.backward(index, ())
        learner.commit({}, 1.0)
    return learner


def test_all_kinds_of_tensors_come_back(tmp_path: Path) -> None:
    path = tmp_path / "unit-0003.safetensors"
    write_block(path, ODD, step=5, block=3, run=b"r" * 32)
    mapped, read = read_block(path, step=5, block=3, run=b"r" * 32), load_file(path)
    assert mapped.keys() == read.keys() == ODD.keys()
    for name, tensor in ODD.items():
        assert mapped[name].dtype == tensor.dtype
        assert torch.equal(mapped[name], tensor) and torch.equal(read[name], tensor)


def test_equal_states_are_equal_files(tmp_path: Path) -> None:
    """So that replicas' files can complete one another."""
    paths = [tmp_path / "a", tmp_path / "b"]
    for path, names in zip(paths, (list(ODD), list(reversed(ODD))), strict=True):
        write_block(path, {name: ODD[name] for name in names}, step=5, block=3, run=b"r" * 32)
    assert paths[0].read_bytes() == paths[1].read_bytes()


@pytest.mark.parametrize("wrong", [{"step": 6}, {"block": -1}, {"run": b"s" * 32}], ids=["step", "block", "run"])
def test_another_state_is_refused(tmp_path: Path, wrong: dict[str, object]) -> None:
    path = tmp_path / "state"
    write_block(path, ODD, step=5, block=3, run=b"r" * 32)
    with pytest.raises(CheckpointError, match=f"a state of {next(iter(wrong))}"):
        read_block(path, **{"step": 5, "block": 3, "run": b"r" * 32, **wrong})  # type: ignore[arg-type]


def test_what_is_no_state_is_refused(tmp_path: Path) -> None:
    (tmp_path / "state").write_bytes(b"no state at all")
    with pytest.raises(CheckpointError, match="not readable"):
        read_block(tmp_path / "state", step=5, block=3, run=b"r" * 32)


def test_a_learner_goes_on_from_a_step_as_if_it_had_never_stopped(tmp_path: Path) -> None:
    store = StateStore(tmp_path, make_run())
    first = trained(2)
    write_step(store, 2, {block: first.state(block) for block in first.blocks})
    second = Learner(ToySegment(), make_run(), step=2)
    for block, state in read_step(store, 2, second.blocks).items():
        second.load(block, state)
    for learner in (first, second):
        learner.forward(0, 0, 0, 3, *toy_values(9))
        learner.backward(0, ())
        learner.commit({}, 1.0)
    for block in first.blocks:
        for name, tensor in first.state(block).items():
            assert torch.equal(second.state(block)[name], tensor), name
    assert store.files(2)[0] == describe_files([store.path(2, 0)])[0]
    store.close()
