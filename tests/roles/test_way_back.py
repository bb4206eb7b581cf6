"""What a thread hands back to the loop."""

from __future__ import annotations

import asyncio
import threading

import pytest

from swarmnode.roles.way_back import WayBack


async def test_results_and_errors_come_back_from_another_thread() -> None:
    way_back = WayBack()
    named, name = way_back.promise(lambda: threading.current_thread().name)
    failed, fail = way_back.promise(lambda: 1 // 0)
    for job in (name, fail):
        threading.Thread(target=job, name="compute").start()
    assert await asyncio.wait_for(named, 5.0) == "compute"
    with pytest.raises(ZeroDivisionError):
        await asyncio.wait_for(failed, 5.0)


async def test_a_promise_that_nobody_waits_for_any_more_is_kept_quietly() -> None:
    way_back, ran = WayBack(), []
    future, job = way_back.promise(lambda: ran.append(1))
    future.cancel()
    job()
    await asyncio.sleep(0)
    assert ran == [1] and future.cancelled()


def test_what_comes_after_the_loop_has_closed_is_dropped() -> None:
    async def make() -> WayBack:
        return WayBack()

    way_back, called = asyncio.run(make()), []
    way_back.post(called.append, 1)
    assert not called and "closed" in repr(way_back)
