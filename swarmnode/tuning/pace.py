"""Pace of tuning on a device that also serves sessions."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import TypeVar

from swarmnode.compute.executor import ByPiece, Executor, Urgency

T = TypeVar("T")


class TuningPace:
    """Pace of all that tuning computes on one device: passes, starts, updates and states.

    While `serves` returns true, the device computes one piece of a work (a layer for some rows, some elements of a vector) at a
    time, and rests from tuning after each, so that tuning takes `share` of the time. Otherwise a work goes on until a session
    comes. So a session's step waits for one piece at most.
    """

    def __init__(self, executor: Executor, share: float, serves: Callable[[], bool]) -> None:
        self._executor = executor
        self._share = share
        self._serves = serves
        self._turn = asyncio.Lock()
        self._free_at_s = 0.0  # on the executor's clock
        self.busy_s = 0.0  # seconds of all works

    def __repr__(self) -> str:
        return f"<TuningPace {self._share:.0%} of {self._executor!r}>"

    async def run(self, urgency: Urgency, work: ByPiece[T], *, kind: str, owner: str, size: int) -> T:
        """Do all pieces of `work` on the device, and return its result. Raises ExecutorDied, and whatever the work raises."""
        while True:
            async with self._turn if self._serves() else nullcontext():
                await self._rest()
                ended = await self._executor.call(
                    urgency, partial(self._timed, work), kind=kind, owner=owner, size=size
                )
            if ended:
                return ended[0]

    async def _rest(self) -> None:
        wait_s = self._free_at_s - self._executor.clock()
        if wait_s > 0 and self._serves():
            await asyncio.sleep(wait_s)

    def _timed(self, work: ByPiece[T]) -> list[T]:
        """Do a piece on the device's thread, and all others unless sessions run. Note how long the device then rests from tuning.

        Returns a list with the result; empty if the work goes on. A work that has waited for the thread while a session came does
        nothing before the rest is over.
        """
        began_s = self._executor.began_s
        if self._serves() and began_s < self._free_at_s:
            return []
        try:
            next(work)
            while not self._serves():
                next(work)
            return []
        except StopIteration as ended:
            return [ended.value]
        finally:
            ended_s = self._executor.clock()
            self.busy_s += ended_s - began_s
            self._free_at_s = ended_s + (ended_s - began_s) * (1 / self._share - 1)
