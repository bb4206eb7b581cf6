"""States on disk: steps that are there entirely or not at all, whatever the disk and the processes do."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from swarmnode.codec.body import SHARED
from swarmnode.errors import CheckpointError, LocalError
from swarmnode.swarm.records.run import Averaging, Run, differences
from swarmnode.swarm.storage.content import FileContent, describe_files
from swarmnode.swarm.storage.state_store import StateStore, remove_old_runs, stored_runs

BLOCKS = (SHARED, 0, 1)


def make_run(**changes: Any) -> Run:
    return Run(**{"data": bytes(32), "steps": 95, "batch": 4, "microbatch": 2, "checkpoint_steps": 10, **changes})


def content(step: int, block: int) -> bytes:
    return f"block {block} at step {step} ".encode() * 1000


class Home:
    """A store with a clock that the test moves."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.now_s = 0.0
        self.store = self.open()

    def open(self, run: Run | None = None) -> StateStore:
        return StateStore(self.root, run or make_run(), clock=lambda: self.now_s)

    def reopen(self) -> StateStore:
        """As the next process does."""
        self.store.close()
        self.store = self.open()
        return self.store

    def write(self, *steps: int, blocks: tuple[int, ...] = BLOCKS) -> None:
        for step in steps:

            def write_block(block: int, path: Path, step: int = step) -> None:
                path.write_bytes(content(step, block))

            self.store.write(step, blocks, write_block)

    def folders(self) -> list[str]:
        return sorted(path.name for path in self.store.folder.iterdir() if path.is_dir())


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    home = Home(tmp_path / "training")
    yield home
    home.store.close()


def test_steps_are_kept_over_restarts(home: Home) -> None:
    home.write(10, 20)
    store = home.reopen()
    assert store.steps() == {10: BLOCKS, 20: BLOCKS}
    assert store.newest() == 20
    for block, file in store.files(20).items():
        assert store.path(20, block).read_bytes() == content(20, block)
        assert store.find(file.root) == (20, block, file, store.folder / "step-00000020" / file.name)
        assert file == describe_files([store.path(20, block)])[0]
    assert sorted(path.name for path in (store.folder / "step-00000020").iterdir()) == [
        "files.msgpack",
        "shared.safetensors",
        "unit-0000.safetensors",
        "unit-0001.safetensors",
    ]
    assert store.find(bytes(32)) is None


def test_old_steps_go_but_never_those_of_all_peers_for_one_of_a_newcomer(home: Home) -> None:
    home.write(10, 20, 30, 31, 32, 33, 40, 95)
    assert list(home.store.steps()) == [30, 33, 40, 95]
    assert home.folders() == ["step-00000030", "step-00000033", "step-00000040", "step-00000095"]


def test_a_step_that_somebody_fetches_stays(home: Home) -> None:
    home.write(31)
    home.store.hold(31, 60)
    home.write(32, 33)
    assert list(home.store.steps()) == [31, 33]
    home.now_s = 61
    home.write(34)
    assert list(home.store.steps()) == [34]
    for step in range(35, 45):
        home.write(step)
        home.store.hold(step, 60)
    assert list(home.store.steps()) == [40, 41, 42, 43, 44], "40 is for all peers; of what is held only a few are kept"


def test_a_step_can_grow_and_be_replaced(home: Home) -> None:
    home.write(10, blocks=(0,))
    home.write(10, blocks=(1,))
    assert home.store.steps() == {10: (0, 1)}

    def write_again(_block: int, path: Path) -> None:
        path.write_bytes(b"again")

    home.store.write(10, (0,), write_again)
    store = home.reopen()
    assert store.path(10, 0).read_bytes() == b"again" and store.path(10, 1).read_bytes() == content(10, 1)
    assert home.folders() == ["step-00000010"]


def test_a_full_disk_keeps_what_was_there(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    home.write(10, 20)
    before = home.store.steps()

    def full(_block: int, path: Path) -> None:
        path.write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(LocalError, match=r"step 30 .*No space left on device.*earlier steps are still there"):
        home.store.write(30, BLOCKS, full)
    assert home.store.steps() == before and home.folders() == ["step-00000010", "step-00000020"]
    with monkeypatch.context() as patch, pytest.raises(LocalError, match="No space left"):
        patch.setattr(os, "fsync", lambda _: full(0, home.root / "x"))
        home.write(30)
    assert home.reopen().steps() == before


def test_a_killed_process_leaves_no_half_step(home: Home) -> None:
    home.write(10, 20)
    folder = home.store.folder
    (folder / ".partial-00000030").mkdir()
    (folder / ".partial-00000030" / "unit-0000.safetensors").write_bytes(b"half")
    (folder / "step-00000020").rename(folder / ".old-00000020")  # killed while step 20 was exchanged
    store = home.reopen()
    assert store.steps() == {10: BLOCKS, 20: BLOCKS}
    assert home.folders() == ["step-00000010", "step-00000020"]


def test_a_file_cut_short_is_passed_by(home: Home, caplog: pytest.LogCaptureFixture) -> None:
    home.write(10, 20)
    os.truncate(home.store.path(20, 1), 100)
    with caplog.at_level(logging.WARNING):
        store = home.reopen()
    assert "unit-0001.safetensors is missing or was cut short" in caplog.text
    assert store.steps() == {10: BLOCKS, 20: (SHARED, 0)}, "what is sound can still be given to others"


def test_a_changed_file_is_noticed_when_it_is_loaded(home: Home) -> None:
    home.write(10, 20)
    path = home.store.path(20, 0)
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    store = home.reopen()
    with pytest.raises(CheckpointError, match=r"unit-0000.safetensors cannot be used: it was changed or damaged"):
        store.path(20, 0)
    assert store.steps() == {10: BLOCKS, 20: (SHARED, 1)}
    with pytest.raises(CheckpointError, match="no training state of layer 0 at step 20"):
        home.store.path(20, 0)
    home.write(20, blocks=(0,))
    assert home.store.path(20, 0) == path, "written again, it is sound again"


def test_a_damaged_list_costs_its_step_alone(home: Home) -> None:
    home.write(10, 20)
    (home.store.folder / "step-00000020" / "files.msgpack").write_bytes(b"\xc1")
    assert home.reopen().steps() == {10: BLOCKS}


def test_what_was_fetched_becomes_a_step(home: Home) -> None:
    home.write(10, blocks=(0,))
    incoming = home.store.incoming(10)
    assert home.store.begun() == [10]
    (source := home.root / "source").write_bytes(content(10, 1))
    size_and_root = describe_files([source])[0]
    file = FileContent("unit-0001-v1", size_and_root.size, size_and_root.root)
    incoming.write(file, 0, content(10, 1))
    home.reopen().complete(10, {1: file})
    store = home.reopen()
    assert store.steps() == {10: (0, 1)} and store.path(10, 1).read_bytes() == content(10, 1)
    assert store.begun() == [] and home.folders() == ["step-00000010"]


def test_nodes_that_share_a_home_keep_out_of_each_others_way(home: Home) -> None:
    other = home.open()
    assert other.folder != home.store.folder
    home.write(10)
    assert other.steps() == {}
    other.close()


def test_runs_that_are_begun_again_and_again_fill_no_disk(tmp_path: Path) -> None:
    """Kept are the one in force and the one that came furthest, whatever was begun after it."""
    long = Home(tmp_path)
    long.write(10, 20)
    long.store.close()
    for seed in range(1, 6):
        run = make_run(seed=seed)
        store = long.open(run)
        store.write(0, (0,), lambda _block, path: path.write_bytes(b"state"))
        remove_old_runs(tmp_path, run)
        assert {found.seed for found in stored_runs(tmp_path)} == {0, seed}
        store.close()
    assert sorted(long.reopen().steps()) == [10, 20]
    long.store.close()


def test_what_another_process_uses_is_not_removed(tmp_path: Path) -> None:
    used = [StateStore(tmp_path, make_run(seed=seed)) for seed in range(3)]
    remove_old_runs(tmp_path, make_run(seed=3))
    assert {run.seed for run in stored_runs(tmp_path)} == {0, 1, 2}
    for store in used:
        store.close()


def test_what_differs_between_runs_is_told(home: Home) -> None:
    later = make_run(learning_rate=0.001, averaging=Averaging(every=8), data=b"\1" * 32)
    home.open(later).close()
    (own, other) = sorted(stored_runs(home.root), key=lambda run: run.learning_rate)
    assert (own, other) == (make_run(), later)
    assert differences(own, other) == [
        "The data is other data (00000000 here, 01010101 there).",
        "The setting 'learning rate' is 0.0003 here and 0.001 there.",
        "The setting 'averaging every' is 1 here and 8 there.",
    ]
    assert differences(own, own) == []


def test_a_home_that_cannot_be_written_is_said_to_be_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(LocalError, match="choose another --home"):
        StateStore(tmp_path / "file" / "training", make_run())
