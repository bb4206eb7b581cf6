from __future__ import annotations

import asyncio
import gc
import logging

import pytest

from swarmnode.net.tasks import Tasks, cancel_and_wait


async def forever() -> None:
    await asyncio.Event().wait()


async def crash() -> None:
    raise ZeroDivisionError("no")


async def test_close_cancels_and_waits() -> None:
    tasks = Tasks("owner", on_crash=None)
    cleaned = []

    async def tidy() -> None:
        try:
            await forever()
        finally:
            await asyncio.sleep(0)
            cleaned.append(True)

    task = tasks.spawn(tidy(), "tidy")
    await asyncio.sleep(0)
    assert repr(tasks) == "<Tasks owner: 1 running, 0 crashed>"
    assert task.get_name() == "owner: tidy"
    await tasks.close()
    assert cleaned == [True] and task.cancelled()
    assert repr(tasks) == "<Tasks owner: 0 running, 0 crashed, closed>"
    await tasks.close()


async def test_a_crash_is_logged_counted_and_told(caplog: pytest.LogCaptureFixture) -> None:
    told: list[BaseException] = []
    tasks = Tasks("owner", on_crash=told.append)
    with caplog.at_level(logging.ERROR):
        task = tasks.spawn(crash(), "crasher")
        await asyncio.wait([task])
        await asyncio.sleep(0)
    assert tasks.crashes == 1
    assert [type(error) for error in told] == [ZeroDivisionError]
    assert "owner: crasher" in caplog.text and "ZeroDivisionError" in caplog.text
    await tasks.close()


async def test_nothing_is_started_after_close() -> None:
    tasks = Tasks("owner", on_crash=None)
    await tasks.close()
    coroutine = forever()
    with pytest.raises(RuntimeError, match="owner is closed"):
        tasks.spawn(coroutine, "late")
    with pytest.raises(RuntimeError, match="cannot reuse already awaited"):  # it was closed, not leaked
        await coroutine


async def test_a_task_may_close_its_owner() -> None:
    tasks = Tasks("owner", on_crash=None)
    other = tasks.spawn(forever(), "other")
    await tasks.spawn(tasks.close(), "closer")
    assert other.cancelled()


async def test_a_cancellation_that_was_lost_comes_again() -> None:
    """As `wait_for` loses it, before Python 3.12, where it comes together with the result."""
    lost = []

    async def deaf() -> None:
        try:
            await forever()
        except asyncio.CancelledError:
            lost.append(True)
        await forever()

    task = asyncio.ensure_future(deaf())
    await asyncio.sleep(0)
    await cancel_and_wait(task)
    assert lost == [True] and task.cancelled()


async def test_what_they_die_of_is_nobodys_business(caplog: pytest.LogCaptureFixture) -> None:
    gc.collect()  # what earlier tests left
    caplog.clear()
    task = asyncio.ensure_future(crash())
    await asyncio.sleep(0)
    await cancel_and_wait(task)
    del task
    gc.collect()
    assert not caplog.records
