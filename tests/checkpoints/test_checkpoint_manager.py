"""A checkpoint is copied on the executor, and written beside it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch

from swarmnode.checkpoints import checkpoint_manager as module
from swarmnode.checkpoints.checkpoint_manager import CheckpointManager
from swarmnode.checkpoints.state_exchange import StateServer
from swarmnode.compute.executor import Executor, Urgency
from swarmnode.compute.training.snapshot import read_step, write_step
from swarmnode.ledger import Account, MemoryLedger
from swarmnode.links.link_config import LinkConfig
from swarmnode.swarm.storage.state_store import StateStore
from tests.compute.training.toy import ToySegment, one_learner
from tests.peer.memory_network import MemoryNetwork
from tests.peer.toy_peer import ToyPeer
from tests.peer.training_swarm import HELLO, toy_batches, toy_run

RUN = toy_run(toy_batches(), 12)


class SlowDisk:
    """Writes a step when it may, and knows by which threads steps were written."""

    def __init__(self) -> None:
        self.began, self.may_write = threading.Event(), threading.Event()
        self.threads: list[str] = []

    def write(self, store: StateStore, step: int, states: Any) -> None:
        self.threads.append(threading.current_thread().name)
        self.began.set()
        assert self.may_write.wait(20)
        write_step(store, step, states)


class Stage:
    """A learner, an executor with a thread, and a manager whose disk is slow."""

    def __init__(self, folder: Path) -> None:
        self.ledger = MemoryLedger()
        self.folder = folder
        self.learner = one_learner(ToySegment(), RUN)
        self.executor = Executor()
        network: Any = MemoryNetwork({}, "stage")  # type: ignore[no-untyped-call]
        peer = ToyPeer(network, LinkConfig(ledger=self.ledger), HELLO)
        self.manager = CheckpointManager(peer, folder, StateServer(peer))
        self.manager.open(RUN)

    async def update(self) -> None:
        """As a step's end does to all parameters."""

        def add_one() -> None:
            with torch.no_grad():
                for tensors in self.learner.segment.parameters().values():
                    for tensor in tensors.values():
                        tensor += 1.0
            self.learner.step += 1

        await self.executor.call(Urgency.CONTROL, add_one, kind="try")

    def kept(self, step: int) -> Any:
        assert self.manager.store is not None
        return read_step(self.manager.store, step, self.learner.blocks)

    async def close(self) -> None:
        await self.executor.close()
        await self.manager.close()


@pytest_asyncio.fixture
async def stage(tmp_path: Path) -> AsyncIterator[Stage]:
    stage = Stage(tmp_path)
    yield stage
    await stage.close()


async def test_the_executor_goes_on_while_the_disk_is_written(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = SlowDisk()
    monkeypatch.setattr(module, "write_step", disk.write)
    before = stage.learner.copy_state()
    saving = asyncio.ensure_future(stage.manager.save(stage.learner, stage.executor))
    assert await asyncio.to_thread(disk.began.wait, 20)
    await stage.update()  # would hang if the executor waited for the disk
    assert stage.ledger.accounts()[Account.CHECKPOINTS] == stage.learner.state_bytes
    disk.may_write.set()
    assert await saving == 0
    assert stage.ledger.accounts()[Account.CHECKPOINTS] == 0
    for block, tensors in stage.kept(0).items():
        assert all(torch.equal(tensor, before[block][name]) for name, tensor in tensors.items()), "the step as it was"


async def test_without_room_for_a_copy_the_executor_writes(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = SlowDisk()
    disk.may_write.set()
    monkeypatch.setattr(module, "write_step", disk.write)
    stage.ledger.limit_bytes = stage.learner.state_bytes - 1
    assert await stage.manager.save(stage.learner, stage.executor) == 0
    thread = await stage.executor.call(Urgency.CONTROL, lambda: threading.current_thread().name, kind="try")
    assert disk.threads == [thread]
    assert set(stage.kept(0)) == set(stage.learner.blocks)


async def test_a_step_is_written_once(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    await stage.manager.save(stage.learner, stage.executor)
    monkeypatch.setattr(module, "write_step", None)
    assert await stage.manager.save(stage.learner, stage.executor) == 0
