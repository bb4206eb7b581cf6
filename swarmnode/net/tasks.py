"""Background tasks: each has an owner, which awaits or cancels it, and a supervisor, which learns of crashes."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from swarmnode.errors import LocalError, PeerError

log = logging.getLogger(__name__)

CANCEL_AGAIN_S = 0.5

# The intensity and period of an Erlang supervisor: a bug in one conversation costs that conversation alone.
MOST_CRASHES = 5
PERIOD_S = 60.0

T = TypeVar("T")
OnCrash = Callable[[BaseException], None]


class Tasks:
    """Owner of background tasks, from `spawn` to `close`.

    A task that dies of an unexpected error is logged and counted, and `on_crash` is called with the error. `on_crash` is None if
    the owner starts tasks anew, or if all tasks are `awaited`.
    """

    def __init__(self, name: str, *, on_crash: OnCrash | None) -> None:
        self.name = name
        self.crashes = 0
        self._on_crash = on_crash
        self._tasks: dict[asyncio.Task[Any], None] = {}  # the oldest first
        self._closed = False

    def __repr__(self) -> str:
        return f"<Tasks {self.name}: {len(self._tasks)} running, {self.crashes} crashed{', closed' if self._closed else ''}>"

    def __len__(self) -> int:
        """Return the number of running tasks."""
        return len(self._tasks)

    def spawn(self, coroutine: Coroutine[Any, Any, T], name: str, *, awaited: bool = False) -> asyncio.Task[T]:
        """Run a coroutine in the background and return its task. Raises RuntimeError after `close`.

        `awaited`: callers await the task and get its errors, so these are no crashes.
        """
        if self._closed:
            coroutine.close()
            raise RuntimeError(f"{self.name} is closed: cannot start {name}")
        task = asyncio.get_running_loop().create_task(coroutine, name=f"{self.name}: {name}")
        self._tasks[task] = None
        task.add_done_callback(self._finished if awaited else self._ended)
        return task

    def _finished(self, task: asyncio.Task[Any]) -> None:
        """Forget an awaited task. Its error is for the callers that await it; without any, it is dropped."""
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
        """Wait until no task is running."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    async def close(self) -> None:
        """Cancel all tasks and wait for their end. May be called again, and by one of the tasks."""
        self._closed = True
        await cancel_and_wait(*(task for task in self._tasks if task is not asyncio.current_task()))


async def cancel_and_wait(*tasks: asyncio.Future[Any]) -> None:
    """Cancel tasks and wait until they have ended; their errors are dropped.

    Tasks that go on are cancelled again after CANCEL_AGAIN_S seconds: before Python 3.12, `asyncio.wait_for` loses a cancellation
    that comes together with its result.
    """
    running = {task for task in tasks if not task.done()}
    while running:
        for task in running:
            task.cancel()
        _, running = await asyncio.wait(running, timeout=CANCEL_AGAIN_S)
    for task in tasks:
        if not task.cancelled():
            task.exception()  # marks it as retrieved, so that asyncio does not log it


async def until_first(*work: Awaitable[Any]) -> None:
    """Wait until the first awaitable ends, and cancel the others. Raises the error of the ended one, if any."""
    tasks = [asyncio.ensure_future(each) for each in work]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            if task.done():
                task.result()
    finally:
        await cancel_and_wait(*tasks)


async def unless_failed(work: Awaitable[T], failed: asyncio.Future[None], left_s: Callable[[], float]) -> T:
    """Return the result of `work`, which is cancelled if anything else comes first.

    Raises the error of `failed`, or asyncio.TimeoutError once `left_s()`, which may grow meanwhile, is no longer above 0.
    """
    working = asyncio.ensure_future(work)
    try:
        while not working.done():
            if (timeout_s := left_s()) <= 0:
                raise asyncio.TimeoutError
            both: set[asyncio.Future[Any]] = {working, failed}
            await asyncio.wait(both, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if failed.done():
                failed.result()
        return working.result()
    finally:
        if not working.cancel() and not working.cancelled():
            working.exception()  # marks it as retrieved


async def cancel_the_rest() -> None:
    """Cancel all tasks of this event loop but the current one, such as searches of the table without a caller, before the loop
    ends."""
    await cancel_and_wait(*(task for task in asyncio.all_tasks() if task is not asyncio.current_task()))


class Supervisor:
    """Supervisor of one peer: learns of every task that died of an unexpected error. The code that runs the peer waits for
    `broken`."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.failure: LocalError | None = None
        self._clock = clock
        self._crashed_at_s: deque[float] = deque(maxlen=MOST_CRASHES)
        self._broken = asyncio.Event()

    def ends_peer(self, error: BaseException) -> None:
        """Note the death of a task that the peer cannot do without. The first such error is the reason of the failure."""
        if self.failure is None:
            text = f"a part of this peer died of a mistake in swarmnode: {error!r}. Please report it with the log, and start again"
            self.failure = error if isinstance(error, LocalError) else LocalError(text)
            self._broken.set()

    def ends_conversation(self, error: BaseException) -> None:
        """Note the death of a conversation's task. MOST_CRASHES of them within PERIOD_S seconds break the peer; a PeerError does
        not count."""
        if isinstance(error, PeerError):
            return
        now_s = self._clock()
        self._crashed_at_s.append(now_s)
        if len(self._crashed_at_s) == MOST_CRASHES and now_s - self._crashed_at_s[0] <= PERIOD_S:
            self.ends_peer(error)

    def check(self) -> None:
        """Raise LocalError if an essential part of this peer has failed."""
        if self.failure is not None:
            raise self.failure

    async def broken(self) -> LocalError:
        """Wait until the peer is broken, and return the reason."""
        await self._broken.wait()
        assert self.failure is not None
        return self.failure

    async def watch(self, work: Awaitable[T]) -> T:
        """Return the result of `work`. If the peer breaks first, `work` is cancelled and LocalError raised."""
        task = asyncio.ensure_future(work)
        await until_first(task, self._broken.wait())
        if task.cancelled():
            self.check()
        return task.result()
