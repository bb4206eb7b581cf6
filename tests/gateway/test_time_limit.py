from __future__ import annotations

import asyncio

import pytest

from swarmnode.gateway.http.event_stream import TimeLimit
from tests.net.virtual import in_virtual_time


@in_virtual_time
async def test_what_takes_too_long_ends_in_time() -> None:
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    with pytest.raises(asyncio.TimeoutError), TimeLimit(2.0):
        await asyncio.sleep(60)
    assert loop.time() - began_s == pytest.approx(2.0)
    await asyncio.sleep(60)  # nothing is left of it


@in_virtual_time
async def test_what_comes_in_time_is_left_alone() -> None:
    with TimeLimit(2.0):
        await asyncio.sleep(1)
    await asyncio.sleep(60)


@in_virtual_time
async def test_who_is_cancelled_meanwhile_is_cancelled() -> None:
    async def wait() -> None:
        with TimeLimit(60.0):
            await asyncio.Event().wait()

    task = asyncio.ensure_future(wait())
    await asyncio.sleep(1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@in_virtual_time
async def test_its_own_error_is_heard() -> None:
    with pytest.raises(KeyError), TimeLimit(2.0):
        raise KeyError("k")
