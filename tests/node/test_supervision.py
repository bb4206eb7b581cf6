"""Whatever task of a node dies of a bug, the node does not only seem to be there: it ends with the reason, and others go on."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Coroutine
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import pytest

from swarmnode.errors import LocalError
from swarmnode.net.identity import SigningKey
from swarmnode.net.tasks import Tasks
from swarmnode.swarm.records.manifest import TRAIN
from tests.net.virtual import in_virtual_time
from tests.node.conftest import Founded
from tests.node.virtual_swarm import VirtualMember, VirtualSwarm
from tests.tiny import PROMPT, TinyModel

BOOTSTRAP = [
    "host: keep the owner's book",
    "host: keep joined",
    "host: watch the clock",
    "host: dial bootstraps",
    "host: tell paths",
    "directory: reads",
    "directory: publishes",
]
BOOTSTRAP += ["access control: watch"]
SERVING = ["bandwidth tests: explore", "adapters of members: sweep", "adapters of members: list own adapters"]
TRAINING = ["election: watch", "election: directory", "following: silence"]
SHORT = (
    "links of",
    "Seeder",
    "streams",
    "stage server: load",
    "access control: membership of",
    "access control: introduce",
)

_doomed: ContextVar[Surgery | None] = ContextVar("doomed", default=None)


class Surgery:
    """What a node's tasks are called, and the death of one of them. Made around the node's start."""

    def __init__(self) -> None:
        self.strikes: dict[str, asyncio.Future[None]] = {}
        self._news = asyncio.Condition()

    def watch(self, name: str, work: Coroutine[Any, Any, Any]) -> Coroutine[Any, Any, Any]:
        strike = self.strikes[name] = asyncio.get_running_loop().create_future()

        async def run() -> Any:
            async with self._news:
                self._news.notify_all()
            task = asyncio.ensure_future(work)
            try:
                await asyncio.wait({task, strike}, return_when=asyncio.FIRST_COMPLETED)
                if task.done():
                    self.strikes.pop(name, None)
                    return task.result()
                raise ZeroDivisionError(f"a mistake in {name}")
            finally:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

        return run()

    async def has_begun(self, name: str) -> None:
        """Wait for a task."""
        async with self._news:
            await self._news.wait_for(lambda: name in self.strikes)

    @property
    def lasting(self) -> list[str]:
        """Those that are no part of a conversation, and have no end."""
        return sorted(name for name in self.strikes if not name.startswith(SHORT))

    def kill(self, name: str) -> None:
        """Let it die of a bug."""
        self.strikes[name].set_result(None)


@pytest.fixture
def operable(monkeypatch: pytest.MonkeyPatch) -> None:
    spawn = Tasks.spawn

    def watched(self: Tasks, coroutine: Coroutine[Any, Any, Any], name: str, *, awaited: bool = False) -> Any:
        surgery = _doomed.get()
        told = re.sub(r"12D3\w+|Qm\w+", "PEER", f"{self.name}: {name}")
        if surgery is None:
            return spawn(self, coroutine, name, awaited=awaited)
        task = spawn(self, surgery.watch(told, coroutine), name, awaited=awaited)
        task.add_done_callback(lambda _task: coroutine.close())  # it may have been cancelled before it began
        return task

    monkeypatch.setattr(Tasks, "spawn", watched)


def operated(swarm: VirtualSwarm, name: str) -> tuple[VirtualMember, Surgery]:
    """Start a node of which any task can be killed."""
    surgery = Surgery()
    token = _doomed.set(surgery)
    member = swarm.node(name, "0:6")
    _doomed.reset(token)
    return member, surgery


async def dies(member: VirtualMember, surgery: Surgery, task: str) -> None:
    """Kill a task: its node ends, saying of what."""
    surgery.kill(task)
    with pytest.raises(LocalError, match=f"a mistake in {task}"):
        await asyncio.wait_for(member.task, 60)


@in_virtual_time
async def test_every_lasting_task_of_a_bootstrap_peer(tiny: TinyModel, tmp_path: Path, operable: None) -> None:
    async with VirtualSwarm(tmp_path) as swarm:
        swarm.create(tiny.folder, owner=SigningKey.generate())
        for task in BOOTSTRAP:
            surgery = Surgery()
            token = _doomed.set(surgery)
            peer = await swarm.bootstrap()
            _doomed.reset(token)
            assert surgery.lasting == sorted(BOOTSTRAP)
            surgery.kill(task)
            with pytest.raises(LocalError, match=f"a mistake in {task}"):
                await asyncio.wait_for(peer.run(asyncio.Event()), 60)
            await peer.close()


@in_virtual_time
async def test_every_lasting_task_of_a_serving_node(tiny: TinyModel, tmp_path: Path, operable: None) -> None:
    async with VirtualSwarm(tmp_path) as swarm:
        swarm.create(tiny.folder)
        await swarm.bootstrap()
        for number, task in enumerate(SERVING):
            member, surgery = operated(swarm, f"node{number}")
            await member.wait_for("ready")
            assert set(surgery.lasting) <= {*BOOTSTRAP, *SERVING}
            await dies(member, surgery, task)


@in_virtual_time
async def test_every_lasting_task_of_a_training_node(tiny: TinyModel, tmp_path: Path, operable: None) -> None:
    async with VirtualSwarm(tmp_path) as swarm:
        swarm.create(tiny.folder, mode=TRAIN)
        await swarm.bootstrap()
        for number, task in enumerate(TRAINING):
            member, surgery = operated(swarm, f"node{number}")
            await member.wait_for("ready")
            await surgery.has_begun(task)
            await dies(member, surgery, task)


@in_virtual_time
async def test_a_link_that_dies_costs_the_text_nothing_and_the_node_lives(
    founded: Founded, tiny: TinyModel, tmp_path: Path, operable: None
) -> None:
    async with VirtualSwarm(tmp_path) as swarm:
        founded.into(swarm)
        await swarm.bootstrap()
        first, surgery = operated(swarm, "first")
        swarm.node("second", "0:6")
        for member in swarm.members.values():
            await member.wait_for("ready")
        async with swarm.client() as client:
            await client.generate(PROMPT, max_new_tokens=2)
            for name in [name for name in surgery.strikes if name.startswith(SHORT)]:
                surgery.kill(name)
            result = await client.generate(PROMPT, max_new_tokens=16)
        assert result.ids == tiny.alone(PROMPT, 16)
        assert not first.over
