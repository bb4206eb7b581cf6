"""A hop whose compute thread stands still while its loop answers: found by itself, told to the client, blamed alone."""

from __future__ import annotations

import asyncio
import math

import pytest

from swarmnode.serving.worker import STALLED, ComputeWatch, Running
from tests.net.virtual import in_virtual_time
from tests.peer.toy_swarm import ToySwarm, expected

OURS = Running(math.inf, serving=True)
PROMPT = [5, 17, 3, 99, 42]
THREE = [(0, 1), (1, 3), (3, 4)]


def used(*, step_s: float = 0.1, passes: int = 40) -> ComputeWatch:
    """A watch that has seen steps of one position."""
    watch = ComputeWatch()
    for number in range(1, passes + 1):
        watch.submitted(1, number, 1, number)
        watch.computed(1, number, 1, step_s, number + step_s)
    return watch


def test_nothing_stands_still_where_nothing_waits() -> None:
    watch = used()
    assert not watch.stalled(1e6, OURS)
    watch.submitted(1, 41, 1, 50.0)
    watch.forget(1)
    assert not watch.stalled(1e6, OURS)


def test_the_deadline_is_of_the_pass_that_is_expected() -> None:
    for step_s, limit_s in [(0.001, STALLED.floor_s), (2.0, 8.0)]:
        watch = used(step_s=step_s)
        watch.submitted(1, 41, 1, 100.0)
        assert not watch.stalled(100.0 + limit_s * 0.9, OURS)
        assert watch.stalled(100.0 + limit_s * 1.3, OURS)


def test_the_first_pass_of_a_kind_has_all_the_time_there_is() -> None:
    watch = used()
    watch.submitted(2, 128, 128, 100.0)
    assert not watch.stalled(100.0 + STALLED.ceiling_s * 0.9, OURS)
    assert watch.stalled(100.0 + STALLED.ceiling_s * 1.1, OURS)


def test_what_was_measured_before_holds_for_the_first_pass() -> None:
    watch = ComputeWatch()
    watch.expect(step_s=0.05, position_s=0.001)
    for session, count in [(1, 1), (2, 128)]:
        watch.submitted(session, count, count, 100.0)
        assert not watch.stalled(100.0 + STALLED.floor_s * 0.9, OURS)
        assert watch.stalled(100.0 + STALLED.floor_s * 1.1, OURS)
        watch.forget(session)


def test_jobs_that_went_through_together_are_done_together() -> None:
    watch = used()
    for end in (41, 42, 43):
        watch.submitted(1, end, 1, 100.0)
    watch.computed(1, 43, 3, 0.2, 100.2)
    assert watch.waiting == frozenset()


def test_other_work_of_the_device_is_not_ours_to_time() -> None:
    watch = used()
    watch.submitted(1, 41, 1, 100.0)
    assert not watch.stalled(130.0, Running(30.0, serving=False)), "a training pass goes first"
    assert not watch.stalled(130.5, Running(0.5, serving=True)), "ours has just begun"
    assert watch.stalled(134.0, Running(4.0, serving=True))
    assert watch.stalled(170.0, Running(70.0, serving=False))


@pytest.mark.parametrize("index", [0, 1, 2], ids=["first", "middle", "last"])
@in_virtual_time
async def test_a_hop_that_computes_no_more_is_replaced_and_blamed_alone(index: int) -> None:
    swarm = await ToySwarm.start(*THREE, *THREE)
    victim = swarm.volunteers[index]
    stream = swarm.ring(PROMPT, 15)
    tokens = []
    async for token in stream:
        tokens.append(token)
        if len(tokens) == 7:
            victim.worker.step_s = math.inf  # PING is answered as ever
    assert tokens == expected(PROMPT, 15)
    assert stream.result.longest_stall_s < STALLED.floor_s + 1.5
    assert swarm.router.suspected == [victim.peer]
    assert [hop.peer for hop in stream.result.route][index] == swarm.volunteers[index + 3].peer
    await asyncio.sleep(20.0)
    assert swarm.loads == [0] * 6
