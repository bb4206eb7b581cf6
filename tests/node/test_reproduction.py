"""A world takes the same course each time: what goes over its links, and when, follows from its seed."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from swarmnode.net.interfaces import PeerId
from swarmnode.net.memory.medium import Pipe
from swarmnode.net.memory.network import FakeWorld
from swarmnode.net.memory.virtual_time import run_virtual
from tests.node.conftest import Founded
from tests.node.virtual_swarm import VirtualSwarm
from tests.tiny import PROMPT, TinyModel

TOKENS = 16
EPOCH_S = time.time()  # one for all worlds, since it travels in announcements
Course = list[tuple[float, PeerId, PeerId, bytes]]


async def course_of(
    founded: Founded, tiny: TinyModel, folder: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> Course:
    """What is sent in a swarm that serves, of which a node is killed and another comes."""
    course: Course = []
    deliver = FakeWorld.deliver

    def noted(world: FakeWorld, pipe: Pipe, size_bytes: int) -> None:
        course.append((asyncio.get_running_loop().time(), pipe.source, pipe.target, bytes(pipe._travelling[-1])))
        deliver(world, pipe, size_bytes)

    monkeypatch.setattr(FakeWorld, "deliver", noted)
    async with VirtualSwarm(folder, seed=seed, epoch_s=EPOCH_S) as swarm:
        founded.into(swarm)
        await swarm.bootstrap()
        for name, span in (("a", "0:3"), ("b", "3:6"), ("c", "3:6")):
            await swarm.node(name, span).wait_for("ready")
        async with swarm.client() as client:
            stream = await client.stream(PROMPT, max_new_tokens=TOKENS)
            number = 0
            async for _ in stream:
                number += 1
                if number == 5:
                    await swarm.member(stream.result.route[1].peer).kill()
                    swarm.node("d", "3:6")
            assert stream.result.ids == tiny.alone(PROMPT, TOKENS)
    monkeypatch.undo()
    return course


def test_the_same_seed_gives_the_same_bytes_at_the_same_times(
    founded: Founded, tiny: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def course(name: str, seed: int) -> Course:
        (tmp_path / name).mkdir()
        return run_virtual(course_of(founded, tiny, tmp_path / name, monkeypatch, seed))

    first, again, other = course("first", 1), course("again", 1), course("other", 2)
    assert len(first) > 100
    for number, (one, two) in enumerate(zip(first, again, strict=True)):
        assert one == two, f"event {number}"
    assert other != first
