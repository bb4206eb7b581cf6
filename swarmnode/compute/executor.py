"""The compute executor: one thread for a device, shared by serving and training, and watched.

    loop:    submit(item) -----.                     .----> the item's own callback
    thread:               collect -> next -> run ----'

What it runs are `WorkItem`s, which say what they are, for whom, how urgent and how large; `Call` is one that runs a function,
and a `WorkSource` makes others of what waits in it when its turn comes (`serving/worker.py`: the steps of all
sessions at once).

Control comes first, then gradients and new microbatches in turn with what the sources have, idle work last. An item answers for
its own errors. What it cannot answer for (a fault of the device, an error in the scheduling itself) ends the executor: whoever
waits hears of it at once, `died` tells the owner, and nothing is taken any more. There is no new start in this process: after a
fault a device's context is lost (CUDA), and after an error nobody expected nothing is known of the caches.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import logging
import queue
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable
from enum import IntEnum
from typing import Any, Generic, Protocol, TypeVar

from swarmnode.compute.device_fault import forget_traceback, is_device_fault
from swarmnode.errors import ExecutorDied, SwarmnodeError

log = logging.getLogger(__name__)
T = TypeVar("T")

CLOSE_TIMEOUT_S = 30.0  # for the item that is running; a device that hangs is left behind


class Urgency(IntEnum):
    """Gradients go before new microbatches (1F1B, PipeDream, 1806.03377 section 3.2): that is what bounds memory."""

    CONTROL = 0
    BACKWARD = 1
    FORWARD = 2
    IDLE = 3


class WorkItem(ABC):
    """Work for the device, as an executor runs it. `run` is called at most once; `abandon` at most once, instead of it
    or after a `run` that raised or hangs.

    Args:
        kind: What is done, for logs and for whoever watches the device.
        urgency: Before which others the item goes.
        owner: For whom: a session or a lease. Empty if for the node itself.
        size: Positions; 0 if it has none.
    """

    def __init__(self, kind: str, *, urgency: Urgency, owner: str = "", size: int = 0) -> None:
        self.kind = kind
        self.urgency = urgency
        self.owner = owner
        self.size = size

    def __repr__(self) -> str:
        owner, size = (f" for {self.owner}" if self.owner else ""), (f" of {self.size}" if self.size else "")
        return f"<{type(self).__name__} {self.kind}{size}{owner}, {self.urgency.name}>"

    @abstractmethod
    def run(self) -> None:
        """Do the work, on the thread. The thread does nothing else meanwhile.

        Raises:
            BaseException: Whatever escapes ends the executor. An error of the item's own is part of its result and does not escape.
        """

    @abstractmethod
    def abandon(self, error: Exception) -> None:
        """Tell whoever waits that the work will not be done. Called on the loop, also if the thread hangs in `run`.

        Args:
            error: Why the executor ended.
        """


class WorkSource(Protocol):
    """Work that decides what comes next when it is its turn.

    `put` and `take` are called on the thread, never at once; `abandon` on the loop, after the thread has ended or hangs.
    """

    def put(self, item: Any) -> None:
        """Take in what `Executor.submit` was given for this source, in that order.

        Raises:
            BaseException: Whatever escapes ends the executor.
        """

    def take(self) -> WorkItem | None:
        """Return the next item to run, or None if nothing waits. Sources are asked in turn.

        Raises:
            BaseException: Whatever escapes ends the executor.
        """

    def abandon(self, items: Iterable[Any], error: Exception) -> None:
        """Tell whoever waits that nothing of this source will be done. Nothing is put or taken afterwards but by another `abandon`.

        Args:
            items: What was submitted and has not been put; what was put and not taken is the source's own to tell.
            error: Why the executor ended.
        """


class Call(WorkItem, Generic[T]):
    """Runs a function; `future` takes its result or error. One that nobody waits for any more is not run."""

    def __init__(
        self, function: Callable[[], T], future: asyncio.Future[T], post: Callable[..., None], kind: str, **about: Any
    ) -> None:
        super().__init__(kind, **about)
        self.future = future
        self._function = function
        self._post = post  # `Executor.post`

    def run(self) -> None:
        if self.future.cancelled():
            return
        try:
            result = self._function()
        except Exception as error:
            if is_device_fault(error):
                raise
            text = forget_traceback(error)
            if not isinstance(error, SwarmnodeError):
                log.error("%r failed\n%s", self, text)
            self._post(_fail, self.future, error)
        else:
            self._post(_resolve, self.future, result)

    def abandon(self, error: Exception) -> None:
        _fail(self.future, error)


def _fail(future: asyncio.Future[Any], error: BaseException) -> None:
    """Give a future an error. Nobody needs to hear of it."""
    if not future.done():
        future.set_exception(error)
        future.exception()  # read once: a caller that has gone leaves no "never retrieved" in the log


def _resolve(future: asyncio.Future[Any], value: object) -> None:
    if not future.done():
        future.set_result(value)


class _Calls:
    """The calls that wait, the most urgent first and among equals the one that came first."""

    def __init__(self) -> None:
        self._heap: list[tuple[Urgency, int, Call[Any]]] = []
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return len(self._heap)

    def put(self, call: Call[Any]) -> None:
        heapq.heappush(self._heap, (call.urgency, next(self._numbers), call))

    def take(self, least: Urgency = Urgency.FORWARD) -> WorkItem | None:
        """The next call that is at least so urgent."""
        return heapq.heappop(self._heap)[2] if self._heap and self._heap[0][0] <= least else None

    def abandon(self, items: Iterable[Call[Any]], error: Exception) -> None:
        for call in (*(entry[2] for entry in self._heap), *items):
            call.abandon(error)
        self._heap.clear()


class Executor:
    """Owns the thread of a device. Made and used on the loop; `close` ends it after the item that is running.

    `died` is resolved, with the error that says why, when the thread ended without being told to.
    """

    def __init__(self, *, threads: int | None = None, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock = clock
        self._threads = threads
        self._loop = asyncio.get_running_loop()
        self._inbox: queue.SimpleQueue[tuple[WorkSource, Any] | None] = queue.SimpleQueue()
        self._calls = _Calls()
        self._sources: deque[WorkSource] = deque([self._calls])
        self._running: tuple[WorkItem, float] | None = None
        self._over: ExecutorDied | None = None  # why nothing is taken any more
        self.died: asyncio.Future[ExecutorDied] = self._loop.create_future()
        self._thread = threading.Thread(target=self._run, name="swarmnode-compute", daemon=True)
        self._start()

    def __repr__(self) -> str:
        running = self._running
        doing = f"{running[0]!r} for {self.stalled_s:.1f} s" if running else "idle"
        return f"<Executor {self._over or doing}, {self.queued} wait>"

    @property
    def queued(self) -> int:
        """Calls that wait, and what has come since the running item began. What waits in other sources is theirs to count."""
        return len(self._calls) + self._inbox.qsize()

    @property
    def began_s(self) -> float:
        """When the running item was begun, on `clock`; for the item itself."""
        assert self._running is not None
        return self._running[1]

    @property
    def running(self) -> WorkItem | None:
        """What the thread does now."""
        running = self._running
        return running[0] if running else None

    @property
    def stalled_s(self) -> float:
        """For how long the running item has been running: 0 where there is none. Its owner knows how long it may."""
        running = self._running
        return self.clock() - running[1] if running else 0.0

    def call(
        self, urgency: Urgency, function: Callable[[], T], *, kind: str, owner: str = "", size: int = 0
    ) -> asyncio.Future[T]:
        """Run a function on the thread; its result or error comes back as a future. ExecutorDied where there is no thread. What
        it is for, and for whom, is what is told of a device that hangs or fails."""
        future: asyncio.Future[T] = self._loop.create_future()
        self.submit(self._calls, Call(function, future, self.post, kind, urgency=urgency, owner=owner, size=size))
        return future

    def submit(self, source: WorkSource, item: Any) -> None:
        """Put an item into a source. After the executor's end it is abandoned, as soon as the loop comes to it."""
        if self._over is None:
            self._inbox.put((source, item))
        else:
            self.post(source.abandon, [item], self._over)

    async def look(self, error: Exception, *, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """After an error in what was done for the device beside its thread, as loading is. Raises ExecutorDied where it is lost."""

        def look() -> None:
            if is_device_fault(error):
                raise error

        looked = self.call(Urgency.CONTROL, look, kind="look at the device")
        await asyncio.wait({looked}, timeout=timeout_s)
        if looked.done():
            looked.result()

    def post(self, callback: Callable[..., None], *args: Any) -> None:
        """From the thread: have the loop call something. Dropped once the loop has closed: nobody waits for it any more."""
        try:
            self._loop.call_soon_threadsafe(callback, *args)
        except RuntimeError:
            log.debug("result dropped: the loop has closed")

    async def add(self, source: WorkSource) -> None:
        """Let a source have its turns. Raises ExecutorDied."""
        await self.call(Urgency.CONTROL, lambda: self._sources.append(source), kind="add a source")

    async def remove(self, source: WorkSource, *, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """After the item that is running, ask a source for nothing any more. A thread that hangs is not waited for. Safe to call
        twice."""

        def remove() -> None:
            if source in self._sources:
                self._sources.remove(source)

        removed = self.call(Urgency.CONTROL, remove, kind="remove a source")
        await asyncio.wait({removed}, timeout=timeout_s)

    async def close(self, *, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Stop after the item that is running; what waits is abandoned. Safe to call twice."""
        if self._over is None:
            self._over = ExecutorDied("this node is leaving")
            self._inbox.put(None)
        await self._ended(timeout_s)
        self._abandon(self._over)

    def _start(self) -> None:
        self._thread.start()

    async def _ended(self, timeout_s: float) -> None:
        await asyncio.to_thread(self._thread.join, timeout_s)
        if self._thread.is_alive():
            log.error("%r does not end: its thread is left behind", self)

    def _abandon(self, error: ExecutorDied) -> None:
        """Tell everybody who waits."""
        running, self._running = self._running, None
        if running is not None:
            running[0].abandon(error)
        came: dict[WorkSource, list[Any]] = {source: [] for source in self._sources}
        while not self._inbox.empty():
            if (entry := self._inbox.get_nowait()) is not None:
                came.setdefault(entry[0], []).append(entry[1])
        for source, items in came.items():
            source.abandon(items, error)

    def _died_of(self, error: ExecutorDied) -> None:
        self._abandon(error)
        if not self.died.done():
            self.died.set_result(error)

    # -- below: the thread

    def _run(self) -> None:
        try:
            item: WorkItem | None = None
            while self._collect(wait=item is None):
                item = self._next()
                if item is not None:
                    self._running = (item, self.clock())
                    self._prepare()
                    item.run()
                    self._running = None
        except BaseException as error:  # the root of the thread: SystemExit, too, would end it unheard
            self._die(error)

    def _die(self, error: BaseException) -> None:
        log.critical("the compute thread died at %r", self._running, exc_info=error)
        self._over = ExecutorDied(f"the compute thread died at {self.running!r}: {type(error).__name__}: {error}")
        self.post(self._died_of, self._over)

    def _prepare(self) -> None:
        """Before the first item, not before: who makes an executor need not have waited for torch."""
        if self._threads is not None:
            import torch

            torch.set_num_threads(self._threads)
            self._threads = None

    def _collect(self, *, wait: bool) -> bool:
        """Take in everything that has arrived, and wait for it where there is nothing to do. False when told to stop."""
        while self._over is None:
            if not wait and self._inbox.empty():
                return True
            entry = self._inbox.get()
            wait = False
            if entry is not None:
                self._put(*entry)
        return False

    def _put(self, source: WorkSource, item: Any) -> None:
        try:
            source.put(item)
        except BaseException:
            self._inbox.put((source, item))  # it is among those who must be told
            raise

    def _next(self) -> WorkItem | None:
        """Control; else the next of the source whose turn it is; else idle work."""
        control = self._calls.take(Urgency.CONTROL)
        return control or self._next_in_turn() or self._calls.take(Urgency.IDLE)

    def _next_in_turn(self) -> WorkItem | None:
        for source in tuple(self._sources):
            if (item := source.take()) is not None:
                self._sources.remove(source)
                self._sources.append(source)
                return item
        return None
