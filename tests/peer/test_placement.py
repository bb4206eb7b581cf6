"""A node's place, decided on a directory that the test holds in its hands, in virtual time."""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from swarmnode.net.clock import Clock
from swarmnode.peer.placement import Placement, PlacementConfig
from swarmnode.plan.spans.span_placement import BY_THROUGHPUT, Move, MovePolicy, PlacementRule
from swarmnode.plan.view import Span
from swarmnode.swarm.records.announcement import VERSION, Announcement, Machine, Section, State, said
from tests.net.virtual import in_virtual_time

ME = "me"
QUICK = PlacementConfig(
    settle_s=0.05,
    claim_interval_s=0.01,
    move_interval_s=0.01,
    calm_interval_s=0.02,
    move_policy=MovePolicy(turn_s=0.01),
)


def announcement(peer: str, span: tuple[int, int], state: State = State.READY, speed: float = 100.0) -> Announcement:
    return Announcement(VERSION, b"swarm", peer, 1, 0.0, 60.0, 0.0, state, span, decode_units_per_s=speed)


class Directory:
    """What a place asks of one. `hidden` is found only by looking for its units."""

    def __init__(self, *known: Announcement, crowd: float = 0.0, hidden: tuple[Announcement, ...] = ()) -> None:
        self.known = {one.peer: one for one in known}
        self.hidden = hidden
        self.own = self.known.get(ME)
        self._crowd = crowd
        self.searched: list[int] = []
        self.revision = 0

    async def changed(self, since: int) -> int:
        await asyncio.Event().wait()  # nobody comes or goes
        return since

    def peers(self) -> dict[str, Announcement]:
        return self.known

    @property
    def crowd(self) -> float:
        return max(self._crowd, len(self.known))

    async def refresh(self) -> None:
        pass

    async def read_holders(self, unit: int) -> None:
        self.searched.append(unit)
        self.known.update({one.peer: one for one in self.hidden if one.holds(unit)})

    def announce(self, *sections: Section) -> None:
        own = self.own or announcement(ME, (0, 0), State.JOINING)
        self.own = self.known[ME] = msgspec.structs.replace(own, **said(sections))


def place(
    directory: Directory, capacity: int, config: PlacementConfig = QUICK, rule: PlacementRule = BY_THROUGHPUT
) -> Placement:
    manifest = SimpleNamespace(model=SimpleNamespace(units=6), width=0, mode="serve")
    swarm = SimpleNamespace(manifest=manifest)
    standing = SimpleNamespace(shunned=frozenset())
    host = SimpleNamespace(
        peer_id=ME,
        directory=directory,
        swarm=swarm,
        standing=standing,
        clock=Clock(monotonic=asyncio.get_running_loop().time),
        decisions=SimpleNamespace(record=lambda *_facts, **_units: None),
    )
    return Placement(host, capacity, config, rule)  # type: ignore[arg-type]


async def reason(where: Placement) -> Any:
    return await where.reason_to_move(bound=lambda: False, news=tuple)


async def stays(where: Placement) -> bool:
    try:
        await asyncio.wait_for(where.reason_to_move(bound=lambda: False, news=tuple), 0.3)
    except asyncio.TimeoutError:
        return True
    return False


@in_virtual_time
async def test_claims_what_others_lack() -> None:
    directory = Directory(announcement("a", (0, 3)))
    assert await place(directory, 3).claim(Machine(device="test")) == (3, 6)
    assert directory.own is not None and directory.own.life is State.JOINING


@in_virtual_time
async def test_fills_a_gap_when_it_is_its_turn() -> None:
    directory = Directory(announcement("a", (0, 3)), announcement(ME, (0, 3)))
    move = await reason(place(directory, 3))
    assert move.span == (3, 6) and move.fills


@in_virtual_time
async def test_a_bound_node_stays() -> None:
    where = place(Directory(announcement("a", (0, 3)), announcement(ME, (0, 3))), 3)
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(where.reason_to_move(bound=lambda: True, news=tuple), 0.3)


@pytest.mark.parametrize("disturbs", [True, False])
@in_virtual_time
async def test_who_disturbs_others_by_moving_stays_the_longer_the_more_often_it_has_moved(disturbs: bool) -> None:
    """By forecasts of which each wants another place: links are measured while they are busy with the last move."""
    loop = asyncio.get_running_loop()
    rule = PlacementRule(lambda *_: Span(0, 3), lambda *_: Move(Span(3, 6), 1.0, 0.0, disturbs=disturbs))
    where = place(Directory(announcement("a", (0, 6)), announcement(ME, (0, 3))), 3, rule=rule)
    waited_s = list[float]()
    for _ in range(4):
        began_s = loop.time()
        await reason(where)
        waited_s.append(round(loop.time() - began_s))
        where.arrived()
    assert waited_s == ([0, 30, 60, 120] if disturbs else [0, 0, 0, 0])


@in_virtual_time
async def test_a_gap_is_filled_however_short_ago_the_last_move_was() -> None:
    loop = asyncio.get_running_loop()
    gains = iter((1.0, math.inf))
    rule = PlacementRule(lambda *_: Span(0, 3), lambda *_: Move(Span(3, 6), next(gains), 0.0, disturbs=True))
    where = place(Directory(announcement("a", (0, 6)), announcement(ME, (0, 3))), 3, rule=rule)
    began_s = loop.time()
    assert [(await reason(where)).fills for _ in range(2)] == [False, True]
    assert loop.time() - began_s < 1.0


@in_virtual_time
async def test_where_units_are_trained_nobody_leaves_a_replica_for_speed() -> None:
    pairs = [announcement(name, (0, 3)) for name in "ab"] + [announcement("d", (3, 6), speed=400.0)]
    directory = Directory(*pairs, announcement("e", (3, 6)), announcement(ME, (3, 6)))
    trained = replace(QUICK, move_policy=replace(QUICK.move_policy, for_gain=False))
    assert not await stays(place(directory, 3))
    assert await stays(place(directory, 3, trained))


@in_virtual_time
async def test_noise_in_speeds_is_no_reason() -> None:
    pairs = [announcement(name, span) for name, span in (("a", (0, 3)), ("b", (3, 6)), ("c", (3, 6)))]
    directory = Directory(*pairs, announcement(ME, (0, 3)))
    where = place(directory, 3)
    assert await stays(where)
    directory.known["a"] = announcement("a", (0, 3), speed=118.0)
    directory.known["b"] = announcement("b", (3, 6), speed=85.0)
    assert await stays(where)


@in_virtual_time
async def test_a_node_counts_with_what_several_sessions_get_from_all_its_devices() -> None:
    directory = Directory(announcement("a", (0, 3), speed=110.0), announcement("b", (3, 6)))
    assert await place(directory, 3).claim() == (3, 6)
    directory.own, directory.known[ME] = None, announcement("gone", (0, 3), State.OFFLINE)
    directory.known["b"] = msgspec.structs.replace(announcement("b", (3, 6)), parallel_speedup=2.0)
    assert await place(directory, 3).claim() == (0, 3)


@in_virtual_time
async def test_in_a_sample_a_gap_is_looked_for_before_it_is_filled() -> None:
    rare = announcement("rare", (3, 6))
    directory = Directory(announcement("a", (0, 3)), announcement(ME, (0, 3)), crowd=1000.0, hidden=(rare,))
    assert await stays(place(directory, 3))
    assert directory.searched[:3] == [3, 4, 5]


@in_virtual_time
async def test_in_a_sample_a_peer_weighs_less() -> None:
    """Among four a move gains a fifth; of four known among a thousand it is nothing."""
    known = [announcement("a", (0, 3)), announcement("b", (0, 3)), announcement("d", (3, 6), speed=150.0)]
    assert not await stays(place(Directory(*known, announcement(ME, (0, 3))), 3))
    assert await stays(place(Directory(*known, announcement(ME, (0, 3)), crowd=1000.0), 3))


@in_virtual_time
async def test_who_wants_to_move_waits_for_a_moment_in_which_it_may_and_stays_where_it_must() -> None:
    """By then it may have become the last that has something."""
    step, is_last = asyncio.Event(), [False]
    rule = PlacementRule(lambda *_: Span(0, 3), lambda *_: Move(Span(3, 6), 1.0, 0.0))
    where = place(Directory(announcement("a", (0, 6)), announcement(ME, (0, 3))), 3, rule=rule)

    async def settled() -> None:
        await step.wait()

    moving = asyncio.ensure_future(where.reason_to_move(bound=lambda: is_last[0], news=tuple, settled=settled))
    await asyncio.sleep(5.0)
    assert not moving.done()
    is_last[0] = True
    step.set()
    await asyncio.sleep(5.0)
    assert not moving.done()
    is_last[0] = False
    assert (await moving).span == (3, 6)
