"""What a thread hands back to the loop."""

from __future__ import annotations

import asyncio
import threading

import pytest

from swarmnode.compute.loop_bridge import LoopBridge


async def test_results_and_errors_come_back_from_another_thread() -> None:
    bridge, loop = LoopBridge(), asyncio.get_running_loop()
    done, failed = loop.create_future(), loop.create_future()
    threading.Thread(target=lambda: bridge.resolve(done, 7)).start()
    threading.Thread(target=lambda: bridge.fail(failed, ValueError("no"))).start()
    assert await done == 7
    with pytest.raises(ValueError, match="no"):
        await failed


async def test_what_nobody_waits_for_any_more_is_dropped_quietly() -> None:
    bridge, future = LoopBridge(), asyncio.get_running_loop().create_future()
    future.cancel()
    bridge.resolve(future, 1)
    bridge.fail(future, ValueError())
    await asyncio.sleep(0)
    assert future.cancelled()


def test_what_comes_after_the_loop_has_closed_is_dropped() -> None:
    async def make() -> LoopBridge:
        return LoopBridge()

    bridge, called = asyncio.run(make()), []
    bridge.post(called.append, 1)
    assert not called and "closed" in repr(bridge)
