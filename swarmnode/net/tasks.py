"""Every background task has an owner, which awaits or cancels it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

log = logging.getLogger(__name__)
T = TypeVar("T")
OnCrash = Callable[[BaseException], None]
CANCEL_AGAIN_S = 0.5


class Tasks:
    """Owns background tasks from `spawn` to `close`. One that dies of an error nobody expected is logged and counted, and
    `on_crash` called; None where their owner begins them anew, or all of them are `awaited`."""

    def __init__(self, name: str, *, on_crash: OnCrash | None) -> None:
        self.name = name
        self.crashes = 0
        self._on_crash = on_crash
        self._tasks: dict[asyncio.Task[Any], None] = {}  # in the order in which they began
        self._closed = False

    def __repr__(self) -> str:
        return f"<Tasks {self.name}: {len(self._tasks)} running, {self.crashes} crashed{', closed' if self._closed else ''}>"

    def __len__(self) -> int:
        """How many are running."""
        return len(self._tasks)

    def spawn(self, coroutine: Coroutine[Any, Any, T], name: str, *, awaited: bool = False) -> asyncio.Task[T]:
        """Run a coroutine in the background. Raises RuntimeError after `close`.

        `awaited`: others wait for it, and hear of its errors.
        """
        if self._closed:
            coroutine.close()
            raise RuntimeError(f"{self.name} is closed: cannot start {name}")
        task = asyncio.get_running_loop().create_task(coroutine, name=f"{self.name}: {name}")
        self._tasks[task] = None
        task.add_done_callback(self._heard if awaited else self._ended)
        return task

    def _heard(self, task: asyncio.Task[Any]) -> None:
        """Whoever waits hears of its error; if nobody does any more, then nobody cares."""
        self._tasks.pop(task, None)
        if not task.cancelled():
            task.exception()

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.pop(task, None)
        if task.cancelled() or (error := task.exception()) is None:
            return
        self.crashes += 1
        log.error("task %r died: %s", task.get_name(), error, exc_info=error)
        if self._on_crash is not None:
            self._on_crash(error)

    async def idle(self) -> None:
        """Wait until nothing runs any more."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    async def close(self) -> None:
        """Cancel everything and wait for its end. Safe to call twice, and from one of the tasks."""
        self._closed = True
        await cancel_and_wait(*(task for task in self._tasks if task is not asyncio.current_task()))


async def cancel_and_wait(*tasks: asyncio.Future[Any]) -> None:
    """Cancel tasks and wait until they have ended; nobody hears of their errors.

    Those that go on are cancelled again after a while: before Python 3.12, `asyncio.wait_for` loses a cancellation that comes
    together with its result.
    """
    running = {task for task in tasks if not task.done()}
    while running:
        for task in running:
            task.cancel()
        _, running = await asyncio.wait(running, timeout=CANCEL_AGAIN_S)
    for task in tasks:
        if not task.cancelled():
            task.exception()  # seen, so that asyncio does not log it


async def until_first(*work: Awaitable[Any]) -> None:
    """Wait until the first of them ends; the others are cancelled. Raises what it raised."""
    tasks = [asyncio.ensure_future(each) for each in work]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            if task.done():
                task.result()
    finally:
        await cancel_and_wait(*tasks)


async def cancel_the_rest() -> None:
    """Searches of the table that nobody waits for any more, say, go with the loop that is theirs."""
    await cancel_and_wait(*(task for task in asyncio.all_tasks() if task is not asyncio.current_task()))
