"""Worker group: stages that are called, speak and go."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from swarmnode.codec.body import Body
from swarmnode.codec.messages import End
from swarmnode.codec.training_messages import Condition, Discard, Status
from swarmnode.errors import PeerLost
from swarmnode.net.interfaces import PeerId
from swarmnode.plan.view import Span
from swarmnode.training.coordinator.link_times import Failures
from swarmnode.training.coordinator.worker_group import Loopback, WorkerGroup, WorkerHandle, WorkerState


async def turn() -> None:
    """One turn of the loop: calls are answered and words arrive in the next one."""
    await asyncio.sleep(0)


class Stages:
    """The other ends of the lines. Who is in `silent` cannot be reached."""

    def __init__(self) -> None:
        self.calls: list[PeerId] = []
        self.silent: set[PeerId] = set()
        self.joined: list[PeerId] = []
        self.heard: list[tuple[PeerId, Body]] = []
        self.lost: list[PeerId] = []
        self.lines: dict[PeerId, Loopback] = {}
        self.now_s = 0.0
        self.strikes = Failures(lambda: self.now_s)
        self.worker_group = WorkerGroup(
            self.dial, self.strikes, clock=lambda: self.now_s, joined=self._join, received=self._hear, lost=self._lose
        )

    async def dial(self, peer: PeerId, on_frame: Callable[..., None], on_lost: Callable[..., None]) -> Any:
        self.calls.append(peer)
        if peer in self.silent:
            raise PeerLost("no answer", peer=peer)
        here, self.lines[peer] = Loopback.pair(peer)
        here.on_frame, here.on_lost = on_frame, on_lost
        return here

    async def enlist(self, *peers: PeerId) -> None:
        self.worker_group.enlist(peers)
        await turn()

    def _join(self, member: WorkerHandle) -> None:
        self.joined.append(member.peer)

    def _hear(self, member: WorkerHandle, body: Body) -> None:
        self.heard.append((member.peer, body))

    def _lose(self, peer: PeerId, reason: str) -> None:
        assert reason
        self.lost.append(peer)


@pytest.fixture
async def stages() -> Any:
    stages = Stages()
    yield stages
    await stages.worker_group.close()


async def test_each_is_called_once_and_again_if_it_could_not_be_reached(stages: Stages) -> None:
    stages.silent.add("b")
    await stages.enlist("a", "b")
    assert stages.joined == ["a"] and not stages.lost
    stages.silent.clear()
    await stages.enlist("a", "b")
    assert stages.calls == ["a", "b"], "not at once"
    stages.now_s += 1.0
    await stages.enlist("a", "b")
    assert stages.calls == ["a", "b", "b"] and stages.joined == ["a", "b"]


async def test_one_that_lets_go_is_lost_once_and_not_heard_any_more(stages: Stages) -> None:
    await stages.enlist("a")
    said = Discard(bytes(32))
    stages.lines["a"].send(said)
    await turn()
    assert stages.heard == [("a", said)]
    stages.lines["a"].send(End())
    stages.lines["a"].send(said)
    await turn()
    assert stages.lost == ["a"] and len(stages.heard) == 1 and not stages.worker_group.members
    stages.now_s += 1.0
    await stages.enlist("a")
    assert stages.joined == ["a", "a"], "it may come back"


async def test_all_have_answered_when_the_last_has(stages: Stages) -> None:
    assert not stages.worker_group.all_answered, "nobody is there"
    await stages.enlist("a", "b")
    for peer, member in stages.worker_group.members.items():
        assert not stages.worker_group.all_answered, peer
        member.receive(Status(1, Condition.BLANK, 0, 1, b"", 0, (), ()))
    assert stages.worker_group.all_answered


async def test_units_are_covered_by_those_who_take_part_or_soon_will(stages: Stages) -> None:
    await stages.enlist("a", "b")
    a, b = stages.worker_group
    a.worker.span, b.worker.span = Span(0, 2), Span(1, 4)
    a.state = b.state = WorkerState.USABLE
    assert stages.worker_group.uncovered(5) == (4,)
    b.state, b.listens_from = WorkerState.LISTENING, 3
    assert stages.worker_group.uncovered(5) == (2, 3, 4) and stages.worker_group.usable() == [a]
    assert stages.worker_group.hearing(2) == [a] and stages.worker_group.hearing(3) == [a, b]
