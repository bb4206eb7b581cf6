"""Pace of tuning on a device that also serves sessions."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator
from typing import TypeVar

from swarmnode.compute.executor import Executor, Urgency

T = TypeVar("T")
ByPiece = Generator[None, None, T]


class TuningPace:
    """Pace of tuning passes on one device.

    While `serves` returns true, the device computes one piece of a pass (a layer) at a time, and rests from tuning after each, so
    that tuning takes `share` of the time. A session's step then waits for one piece at most. Otherwise a pass is one item of the
    executor.
    """

    def __init__(self, executor: Executor, share: float, serves: Callable[[], bool]) -> None:
        self._executor = executor
        self._share = share
        self._serves = serves
        self._turn = asyncio.Lock()
        self._free_at_s = 0.0  # on the executor's clock
        self.busy_s = 0.0  # seconds of all passes

    def __repr__(self) -> str:
        return f"<TuningPace {self._share:.0%} of {self._executor!r}>"

    async def run(self, urgency: Urgency, work: ByPiece[T], *, kind: str, owner: str, size: int) -> T:
        """Do all pieces of `work` on the device, and return its result. Raises ExecutorDied, and whatever the work raises."""
        while True:
            is_shared = self._serves()
            if not is_shared:
                ended = await self._call(urgency, work, kind, owner, size, most=None)
            else:
                async with self._turn:
                    await self._rest()
                    ended = await self._call(urgency, work, kind, owner, size, most=1)
            if ended:
                return ended[0]

    async def _call(
        self, urgency: Urgency, work: ByPiece[T], kind: str, owner: str, size: int, *, most: int | None
    ) -> list[T]:
        pieces = lambda: self._timed(work, most)  # noqa: E731
        return await self._executor.call(urgency, pieces, kind=kind, owner=owner, size=size)

    async def _rest(self) -> None:
        wait_s = self._free_at_s - self._executor.clock()
        if wait_s > 0 and self._serves():
            await asyncio.sleep(wait_s)

    def _timed(self, work: ByPiece[T], most: int | None) -> list[T]:
        """Do at most `most` pieces on the device's thread (None: all), and note how long the device rests from tuning afterwards.

        Returns a list with the result; empty if the work goes on.
        """
        began_s = self._executor.began_s
        try:
            while most is None or most > 0:
                next(work)
                most = None if most is None else most - 1
            return []
        except StopIteration as ended:
            return [ended.value]
        finally:
            ended_s = self._executor.clock()
            self.busy_s += ended_s - began_s
            self._free_at_s = ended_s + (ended_s - began_s) * (1 / self._share - 1)
