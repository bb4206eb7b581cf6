"""An executor without a thread, for virtual time: what it runs takes the seconds that a cost function says, on the loop's clock."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from swarmnode.compute.executor import Executor, WorkItem, WorkSource

CostS = Callable[[WorkItem], float]
"""Seconds that an item takes; infinity is a device that hangs"""


class InlineExecutor(Executor):
    """Computes on the loop itself: an item is chosen, its seconds pass, and then it is run at once."""

    def __init__(self, cost_s: CostS = lambda _item: 0.0) -> None:
        self._cost_s = cost_s
        self._turn: asyncio.Handle | None = None  # the next step, if one is due
        super().__init__(clock=asyncio.get_running_loop().time)

    def submit(self, source: WorkSource, item: Any) -> None:
        super().submit(source, item)
        if self._turn is None and self._over is None:
            self._turn = self._loop.call_soon(self._choose)

    def _start(self) -> None:
        """There is no thread."""

    async def _ended(self, timeout_s: float) -> None:
        """What runs is not waited for: its seconds may be many."""
        if self._turn is not None:
            self._turn.cancel()

    def _choose(self) -> None:
        self._turn = None
        try:
            item = self._next() if self._collect(wait=False) else None
        except BaseException as error:
            self._die(error)
            return
        if item is not None:
            self._running = (item, self.clock())
            cost_s = self._cost_s(item)
            if cost_s < float("inf"):
                self._turn = self._loop.call_later(cost_s, self._finish, item)

    def _finish(self, item: WorkItem) -> None:
        self._turn = None
        try:
            item.run()
        except BaseException as error:
            self._die(error)
            return
        self._running = None
        if self._over is None:
            self._turn = self._loop.call_soon(self._choose)
