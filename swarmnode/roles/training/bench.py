"""The compute thread of a training stage: the most urgent job first, and among equals the one that came first."""

from __future__ import annotations

import asyncio
import itertools
import logging
import queue
import threading
from collections.abc import Callable
from enum import IntEnum
from typing import Any, TypeVar

import torch

log = logging.getLogger(__name__)
T = TypeVar("T")


class Urgency(IntEnum):
    """Gradients go before new microbatches (1F1B, PipeDream, 1806.03377 section 3.2): that is what bounds memory."""

    CONTROL = 0
    BACKWARD = 1
    FORWARD = 2
    IDLE = 3


class Bench:
    """Runs jobs one at a time on a thread of its own. `close` ends it after the job that is running."""

    def __init__(self, *, threads: int | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        self._jobs: queue.PriorityQueue[tuple[int, int, Callable[[], None] | None]] = queue.PriorityQueue()
        self._numbers = itertools.count()
        self._threads = threads
        self._thread = threading.Thread(target=self._run, name="swarmnode-training", daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        return f"<Bench with {self.queued} jobs waiting>"

    @property
    def queued(self) -> int:
        """Jobs that wait."""
        return self._jobs.qsize()

    def call(self, urgency: Urgency, function: Callable[[], T]) -> asyncio.Future[T]:
        """Run a function on the thread; its result or error comes back as a future of the loop."""
        future: asyncio.Future[T] = self._loop.create_future()

        def job() -> None:
            if future.cancelled():
                return
            try:
                result = function()
            except BaseException as error:
                self._post(_fail, future, error)
            else:
                self._post(_resolve, future, result)

        self._jobs.put((urgency, next(self._numbers), job))
        return future

    async def close(self) -> None:
        """Stop; jobs that wait are not run any more."""
        self._jobs.put((-1, next(self._numbers), None))
        await asyncio.to_thread(self._thread.join)

    def _run(self) -> None:
        if self._threads is not None:
            torch.set_num_threads(self._threads)
        while (job := self._jobs.get()[2]) is not None:
            job()

    def _post(self, callback: Callable[..., None], *args: Any) -> None:
        try:
            self._loop.call_soon_threadsafe(callback, *args)
        except RuntimeError:  # the loop has closed: nobody waits for results any more
            log.debug("result dropped: the loop has closed")


def _resolve(future: asyncio.Future[T], value: T) -> None:
    if not future.done():
        future.set_result(value)


def _fail(future: asyncio.Future[T], error: BaseException) -> None:
    if not future.done():
        future.set_exception(error)
