"""The compute thread of a training stage: the most urgent job first, and among equals the one that came first."""

from __future__ import annotations

import asyncio
import itertools
import queue
import threading
from collections.abc import Callable
from enum import IntEnum
from typing import TypeVar

import torch

from swarmnode.roles.way_back import WayBack

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
        self._way_back = WayBack()
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
        future, job = self._way_back.promise(function)
        self._jobs.put((urgency, next(self._numbers), lambda: None if future.cancelled() else job()))
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
