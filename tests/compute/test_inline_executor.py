"""The executor of virtual time: the order and the endings of the one with a thread, and seconds that a cost function says."""

from __future__ import annotations

import asyncio
import math

import pytest

from swarmnode.compute.executor import Urgency
from swarmnode.errors import ExecutorDied
from tests.compute.inline_executor import InlineExecutor
from tests.net.virtual import in_virtual_time


@in_virtual_time
async def test_what_runs_takes_the_seconds_that_it_costs() -> None:
    executor = InlineExecutor(lambda item: {"slow": 5.0, "quick": 1.0}[item.kind])
    slow = executor.call(Urgency.FORWARD, lambda: 1, kind="slow")
    quick = executor.call(Urgency.FORWARD, lambda: 2, kind="quick")
    assert [await slow, await quick] == [1, 2]
    assert asyncio.get_running_loop().time() == 6.0
    await executor.close()


@in_virtual_time
async def test_the_most_urgent_goes_first_and_equals_in_their_order() -> None:
    executor, order = InlineExecutor(lambda _item: 1.0), []
    urgencies = (Urgency.IDLE, Urgency.FORWARD, Urgency.BACKWARD, Urgency.CONTROL, Urgency.BACKWARD)
    calls = [
        executor.call(urgency, lambda number=number: order.append(number), kind="try")
        for number, urgency in enumerate(urgencies)
    ]
    await asyncio.gather(*calls)
    assert order == [3, 2, 4, 1, 0]
    await executor.close()


@in_virtual_time
async def test_errors_are_for_who_asked_and_device_faults_end_it() -> None:
    executor = InlineExecutor()

    def fault() -> None:
        raise RuntimeError("CUDA error: device-side assert triggered")

    with pytest.raises(ZeroDivisionError):
        await executor.call(Urgency.FORWARD, lambda: 1 // 0, kind="try")
    doomed = executor.call(Urgency.FORWARD, fault, kind="doomed")
    waiting = executor.call(Urgency.IDLE, lambda: None, kind="try")
    error = await executor.died
    assert "doomed" in str(error)
    for future in (doomed, waiting, executor.call(Urgency.CONTROL, lambda: None, kind="try")):
        with pytest.raises(ExecutorDied):
            await future
    await executor.close()


@in_virtual_time
async def test_a_device_that_hangs_is_seen_to_stall_and_does_not_hold_up_the_close() -> None:
    executor = InlineExecutor(lambda _item: math.inf)
    hanging = executor.call(Urgency.FORWARD, lambda: None, kind="try")
    await asyncio.sleep(7.0)
    assert executor.stalled_s == 7.0
    await executor.close()
    with pytest.raises(ExecutorDied):
        await hanging
