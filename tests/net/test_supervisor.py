"""A peer ends of its own bugs: of one in a task that it cannot be without at once, of those in conversations when they are many."""

from __future__ import annotations

import asyncio

import pytest

from swarmnode.errors import LocalError, PeerLost
from swarmnode.net.tasks import MOST_CRASHES, PERIOD_S, Supervisor
from tests.net.virtual import in_virtual_time


@in_virtual_time
async def test_the_first_error_is_the_reason() -> None:
    supervisor = Supervisor()
    supervisor.ends_peer(ZeroDivisionError("a mistake"))
    supervisor.ends_peer(ValueError("what followed"))
    assert "a mistake" in str(await supervisor.broken())
    with pytest.raises(LocalError, match="a mistake"):
        supervisor.check()


@in_virtual_time
async def test_an_error_of_this_machine_is_told_as_it_is() -> None:
    supervisor = Supervisor()
    supervisor.ends_peer(LocalError("the disk is full"))
    assert str(await supervisor.broken()) == "the disk is full"


@in_virtual_time
async def test_conversations_may_crash_now_and_then_and_not_one_after_the_other() -> None:
    now_s = [0.0]
    supervisor = Supervisor(lambda: now_s[0])
    for _ in range(3 * MOST_CRASHES):
        now_s[0] += PERIOD_S
        supervisor.ends_conversation(ZeroDivisionError())
        supervisor.ends_conversation(PeerLost("it went away"))
    supervisor.check()
    for _ in range(MOST_CRASHES):
        supervisor.ends_conversation(ZeroDivisionError())
    with pytest.raises(LocalError):
        supervisor.check()


@in_virtual_time
async def test_what_a_broken_peer_does_is_cancelled() -> None:
    supervisor = Supervisor()
    cancelled: list[bool] = []

    async def work() -> None:
        try:
            await asyncio.sleep(1e6)
        except asyncio.CancelledError:
            cancelled.append(True)
            raise

    asyncio.get_running_loop().call_later(5.0, supervisor.ends_peer, ZeroDivisionError())
    with pytest.raises(LocalError):
        await supervisor.watch(work())
    assert cancelled


@in_virtual_time
async def test_work_that_ends_first_is_none_of_its_business() -> None:
    assert await Supervisor().watch(asyncio.sleep(1.0, "done")) == "done"
