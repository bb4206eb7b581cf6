"""Virtual time: timers at once and in order, and work for other threads done on the way."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from swarmnode.net.memory.virtual_time import run_virtual


def test_hours_pass_at_once() -> None:
    async def sleep() -> float:
        await asyncio.sleep(3600.0)
        return asyncio.get_running_loop().time()

    began_s = time.monotonic()
    assert run_virtual(sleep()) == 3600.0
    assert time.monotonic() - began_s < 60.0


def test_work_for_threads_is_done_on_the_loop_and_takes_no_time() -> None:
    def work(number: int) -> tuple[int, threading.Thread]:
        return number, threading.current_thread()

    async def ask() -> tuple[tuple[int, threading.Thread], float]:
        slept = asyncio.ensure_future(asyncio.sleep(1.0))
        done = await asyncio.to_thread(work, 7)
        assert not slept.done()
        with pytest.raises(ZeroDivisionError):
            await asyncio.to_thread(lambda: 1 // 0)
        return done, asyncio.get_running_loop().time()

    assert run_virtual(ask()) == ((7, threading.current_thread()), 0.0)


def test_another_thread_wakes_a_loop_that_has_nothing_to_do_and_its_own_need_not() -> None:
    async def woken() -> tuple[list[str], float]:
        loop, heard = asyncio.get_running_loop(), asyncio.Event()
        told: list[str] = []
        loop.call_soon_threadsafe(told.append, "from here")
        loop.call_soon(told.append, "then")
        thread = threading.Thread(target=loop.call_soon_threadsafe, args=(heard.set,))
        loop.call_soon(thread.start)
        await heard.wait()
        thread.join()
        return told, loop.time()

    assert run_virtual(woken()) == (["from here", "then"], 0.0)
