"""Compute executor: one watched thread for a device, shared by serving and training.

    loop:    submit(item) -----.                     .----> the item's own callback
    thread:               collect -> next -> run ----'

It runs `WorkItem`s, each with its kind, owner, urgency and size. A `Call` is an item that runs a function. A `WorkSource` makes
other items from its waiting work when its turn comes (`serving/worker.py`: the steps of all sessions at once).

Control comes first, then gradients and new microbatches in turn with the items of the sources, idle work last. An item handles
its own errors. Any other error (a fault of the device, an error in the scheduling itself) ends the executor: all waiting
callers get the error at once, `died` reports it to the owner, and new work is refused. The process cannot start it again: after a
fault a device's context is lost (CUDA), and after an unexpected error the state of the caches is unknown.

Errors on a device: whether one means that the device is lost, and how to drop the tensors that it keeps alive.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import logging
import queue
import sys
import threading
import time
import traceback
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Generator, Iterable
from enum import IntEnum
from typing import Any, Generic, Protocol, TypeVar

from swarmnode.errors import ExecutorDied, SwarmnodeError, WeightsLost

log = logging.getLogger(__name__)

DEVICE_FAULTS = ("CUDA error", "HIP error")  # how the texts of such RuntimeErrors begin, in torch before 2.8


def is_device_fault(error: BaseException) -> bool:
    """Return whether the device, or the weights that it computes with, are lost to this process, for example after a failed
    assertion on a card.

    Call it on the thread that met the error. A card reports its faults late: the next launch or wait fails, and not always with
    a text that says so. So after any other error this waits for the card.
    """
    if isinstance(error, WeightsLost):
        return True
    if any(kind.__name__ == "AcceleratorError" for kind in type(error).__mro__):  # torch 2.8 and later
        return True
    if isinstance(error, RuntimeError) and str(error).startswith(DEVICE_FAULTS):
        return True
    return not card_answers()


def card_answers() -> bool:
    """Wait for this thread's card to finish its submitted work. Returns whether it can; True if the thread has no card."""
    torch = sys.modules.get("torch")  # a process that has not imported torch has no card
    if torch is None or not torch.cuda.is_initialized():
        return True
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        log.critical("the card is lost", exc_info=True)
        return False
    return True


def forget_traceback(error: BaseException) -> str:
    """Drop the frames of an error and of its causes, and return the traceback as text for the log.

    The frames hold the tensors of the failed pass, and a retry would lack that memory. Clearing the frames' variables is not
    enough: functions that were made in the frames keep theirs.
    """
    text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    chain: BaseException | None = error
    while chain is not None:
        chain.__traceback__ = None
        chain = chain.__cause__ or chain.__context__
    return text


T = TypeVar("T")

ByPiece = Generator[None, None, T]
"""Long work that yields after each piece, so that the device may do other work in between, and returns its result at the end"""

CLOSE_TIMEOUT_S = 30.0  # for the item that is running; a device that hangs is left behind


class Urgency(IntEnum):
    """Priority of an item. Gradients go before new microbatches, which bounds memory (1F1B, PipeDream, 1806.03377 section 3.2)."""

    CONTROL = 0
    BACKWARD = 1
    FORWARD = 2
    IDLE = 3


def drain(work: ByPiece[T]) -> T:
    """Do all pieces of a work one after another, and return its result."""
    while True:
        try:
            next(work)
        except StopIteration as ended:
            result: T = ended.value
            return result


def as_piece(function: Callable[[], T]) -> ByPiece[T]:
    """Return the work that calls `function` in one piece."""
    yield from ()
    return function()


class WorkItem(ABC):
    """Unit of work that an executor runs on the device.

    `run` is called at most once. `abandon` is called at most once, instead of `run` or after a `run` that raised or hangs.

    Args:
        kind: Name of the work, for logs and for observers of the device.
        urgency: Priority among the waiting items.
        owner: Session or lease that the work belongs to. Empty for the node's own work.
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
            BaseException: Any error that escapes ends the executor. The item's own errors are part of its result and stay inside.
        """

    @abstractmethod
    def abandon(self, error: Exception) -> None:
        """Tell the waiting caller that the work will not be done. Called on the loop, also if the thread hangs in `run`.

        Args:
            error: Why the executor ended.
        """


class WorkSource(Protocol):
    """Queue of work that chooses its next item only when its turn comes.

    The thread calls `put` and `next_item`, one at a time. The loop calls `abandon`, after the thread has ended or hangs.
    """

    def put(self, item: Any) -> None:
        """Take in an item that was submitted for this source (`Executor.submit`), in the order of submission.

        Raises:
            BaseException: Any error that escapes ends the executor.
        """

    def next_item(self) -> WorkItem | None:
        """Return the next item to run, or None if nothing waits. The executor asks its sources in turn.

        Raises:
            BaseException: Any error that escapes ends the executor.
        """

    def abandon(self, items: Iterable[Any], error: Exception) -> None:
        """Tell all waiting callers that nothing of this source will be done. Only another `abandon` may follow.

        Args:
            items: Items that were submitted but never reached `put`. The source itself knows the items that were put and not taken.
            error: Why the executor ended.
        """


class Call(WorkItem, Generic[T]):
    """Work item that runs a function. `future` gets its result or error; a cancelled future's function does not run."""

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
    """Give a pending future an error, and mark the error as retrieved."""
    if not future.done():
        future.set_exception(error)
        future.exception()  # retrieved once: a caller that has gone leaves no "never retrieved" in the log


def _resolve(future: asyncio.Future[Any], value: object) -> None:
    if not future.done():
        future.set_result(value)


class _Calls:
    """Queue of waiting calls, the most urgent first and equals in the order of arrival."""

    def __init__(self) -> None:
        self._heap: list[tuple[Urgency, int, Call[Any]]] = []
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return len(self._heap)

    def put(self, call: Call[Any]) -> None:
        heapq.heappush(self._heap, (call.urgency, next(self._numbers), call))

    def next_item(self, least: Urgency = Urgency.FORWARD) -> WorkItem | None:
        """Return the next call that is at least as urgent as `least`; None if there is none."""
        return heapq.heappop(self._heap)[2] if self._heap and self._heap[0][0] <= least else None

    def abandon(self, items: Iterable[Call[Any]], error: Exception) -> None:
        for call in (*(entry[2] for entry in self._heap), *items):
            call.abandon(error)
        self._heap.clear()


class Executor:
    """Owner of a device's thread. Made and used on the loop; `close` ends it after the running item.

    `died` resolves with an error if the thread ends without `close`.
    """

    def __init__(self, *, threads: int | None = None, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock = clock
        self._threads = threads
        self._loop = asyncio.get_running_loop()
        self._inbox: queue.SimpleQueue[tuple[WorkSource, Any] | None] = queue.SimpleQueue()
        self._calls = _Calls()
        self._sources: deque[WorkSource] = deque([self._calls])
        self._running: tuple[WorkItem, float] | None = None
        self._over: ExecutorDied | None = None  # set once new work is refused
        self.died: asyncio.Future[ExecutorDied] = self._loop.create_future()
        self._thread = threading.Thread(target=self._run, name="swarmnode-compute", daemon=True)
        self._start()

    def __repr__(self) -> str:
        running = self._running
        doing = f"{running[0]!r} for {self.stalled_s:.1f} s" if running else "idle"
        return f"<Executor {self._over or doing}, {self.queued} wait>"

    @property
    def queued(self) -> int:
        """Number of waiting calls, and of items that arrived since the running one began.

        Items that wait inside other sources do not count.
        """
        return len(self._calls) + self._inbox.qsize()

    @property
    def began_s(self) -> float:
        """Time on `clock` at which the running item began. Only for the item itself: an item must be running."""
        assert self._running is not None
        return self._running[1]

    @property
    def running(self) -> WorkItem | None:
        """Item that the thread runs now; None if it is idle."""
        running = self._running
        return running[0] if running else None

    @property
    def stalled_s(self) -> float:
        """Seconds since the running item began; 0 if none runs. Only the item's owner knows how long it may take."""
        running = self._running
        return self.clock() - running[1] if running else 0.0

    def call(
        self, urgency: Urgency, function: Callable[[], T], *, kind: str, owner: str = "", size: int = 0
    ) -> asyncio.Future[T]:
        """Run `function` on the thread. Returns a future of its result or error.

        The future fails with ExecutorDied if the executor has ended. `kind` and `owner` name the work in logs and when the
        device hangs or fails.
        """
        future: asyncio.Future[T] = self._loop.create_future()
        self.submit(self._calls, Call(function, future, self.post, kind, urgency=urgency, owner=owner, size=size))
        return future

    def submit(self, source: WorkSource, item: Any) -> None:
        """Put an item into a source. If the executor has ended, the loop abandons the item soon."""
        if self._over is None:
            self._inbox.put((source, item))
        else:
            self.post(source.abandon, [item], self._over)

    async def check_device(self, error: Exception, *, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Check the device after an error outside its thread, such as one in loading. Raises ExecutorDied if the device is lost.

        Returns without an answer if the thread is busy for longer than `timeout_s`.
        """

        def check() -> None:
            if is_device_fault(error):
                raise error

        checked = self.call(Urgency.CONTROL, check, kind="look at the device")
        await asyncio.wait({checked}, timeout=timeout_s)
        if checked.done():
            checked.result()

    def post(self, callback: Callable[..., None], *args: Any) -> None:
        """Have the loop call `callback`, from the thread. Dropped if the loop has closed, as no caller waits any more."""
        try:
            self._loop.call_soon_threadsafe(callback, *args)
        except RuntimeError:
            log.debug("result dropped: the loop has closed")

    async def add(self, source: WorkSource) -> None:
        """Give a source its turns from now on. Raises ExecutorDied if the executor has ended."""
        await self.call(Urgency.CONTROL, lambda: self._sources.append(source), kind="add a source")

    async def remove(self, source: WorkSource, *, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Stop asking a source for items, after the running one. Waits at most `timeout_s` for a thread that hangs.

        Safe to call twice.
        """

        def remove() -> None:
            if source in self._sources:
                self._sources.remove(source)

        removed = self.call(Urgency.CONTROL, remove, kind="remove a source")
        await asyncio.wait({removed}, timeout=timeout_s)

    async def close(self, *, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Stop after the running item and abandon the waiting ones. Safe to call twice."""
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
        """Report `error` to the running item and to all waiting items, and drop them."""
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
        except BaseException as error:  # the root of the thread: SystemExit, too, would end it unnoticed
            self._die(error)

    def _die(self, error: BaseException) -> None:
        if isinstance(error, WeightsLost):  # no bug, so that a sentence is enough
            self._over = ExecutorDied(str(error))
        else:
            log.critical("the compute thread died at %r", self._running, exc_info=error)
            self._over = ExecutorDied(f"the compute thread died at {self.running!r}: {type(error).__name__}: {error}")
        self.post(self._died_of, self._over)

    def _prepare(self) -> None:
        """Set torch's thread count before the first item, not earlier: making an executor should not wait for torch's import."""
        if self._threads is not None:
            import torch

            torch.set_num_threads(self._threads)
            self._threads = None

    def _collect(self, *, wait: bool) -> bool:
        """Take in all items that have arrived, after waiting for one if `wait`. Returns False once the executor has ended."""
        while self._over is None:
            if not wait and self._inbox.empty():
                return True
            entry = self._inbox.get()
            wait = False
            if entry is not None:
                try:
                    entry[0].put(entry[1])
                except BaseException:
                    self._inbox.put(entry)  # so that `_abandon` finds it
                    raise
        return False

    def _next(self) -> WorkItem | None:
        """Return the next item: control calls, then the sources in turn, then idle calls; None if nothing waits."""
        control = self._calls.next_item(Urgency.CONTROL)
        if control is not None:
            return control
        for source in tuple(self._sources):
            if (item := source.next_item()) is not None:
                self._sources.remove(source)
                self._sources.append(source)
                return item
        return self._calls.next_item(Urgency.IDLE)
