"""The compute thread's order."""

from __future__ import annotations

import asyncio
import threading

import pytest

from swarmnode.roles.training.bench import Bench, Urgency


async def test_the_most_urgent_job_is_next_and_equals_keep_their_order() -> None:
    bench, go, ran = Bench(), threading.Event(), []
    first = bench.call(Urgency.CONTROL, go.wait)
    order = [Urgency.IDLE, Urgency.FORWARD, Urgency.BACKWARD, Urgency.FORWARD, Urgency.CONTROL, Urgency.BACKWARD]
    jobs = [bench.call(urgency, lambda n=n: ran.append(n)) for n, urgency in enumerate(order)]
    go.set()
    await asyncio.gather(first, *jobs)
    assert ran == [4, 2, 5, 1, 3, 0]
    await bench.close()


async def test_results_and_errors_come_back() -> None:
    bench = Bench()

    def fail() -> None:
        raise ValueError("no")

    assert await bench.call(Urgency.FORWARD, lambda: 7) == 7
    with pytest.raises(ValueError, match="no"):
        await bench.call(Urgency.FORWARD, fail)
    assert await bench.call(Urgency.FORWARD, threading.get_ident) != threading.get_ident()
    await bench.close()


async def test_a_job_that_nobody_waits_for_is_not_run() -> None:
    bench, go, ran = Bench(), threading.Event(), []
    first = bench.call(Urgency.CONTROL, go.wait)
    dropped = bench.call(Urgency.FORWARD, lambda: ran.append("dropped"))
    kept = bench.call(Urgency.FORWARD, lambda: ran.append("kept"))
    dropped.cancel()
    go.set()
    await asyncio.gather(first, kept)
    assert ran == ["kept"]
    await bench.close()
