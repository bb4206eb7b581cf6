"""An event loop without waiting: when nothing can run, the clock jumps to the next timer.

A scenario of minutes takes milliseconds, and takes the same course each time. It is only for code that waits for timers, its own
tasks and work given to threads (`asyncio.to_thread`), which runs at once, on the loop. It does not wait for other threads or for
sockets while a timer is due.
"""

from __future__ import annotations

import asyncio
import contextvars
import selectors
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from swarmnode.net.tasks import cancel_the_rest

T = TypeVar("T")


class _JumpingSelector(selectors.DefaultSelector):
    """Selector that does not wait while a timer is due, and adds up the times that it should have waited. Without a timer it
    waits for events."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0

    def select(self, timeout: float | None = None) -> Any:
        if timeout is None:
            return super().select(None)
        if timeout == 0:
            return []  # something can run; events are looked for when nothing can
        events = super().select(0)
        if not events:
            self.now_s += timeout
        return events


class VirtualLoop(asyncio.SelectorEventLoop):
    """Event loop that runs timers in order, at once; `time()` is the seconds since the loop was made."""

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        self._thread = threading.get_ident()
        super().__init__(self._jumping)

    def __repr__(self) -> str:
        return f"<VirtualLoop at {self.time():.3f} s>"

    def time(self) -> float:
        return self._jumping.now_s

    def run_in_executor(  # type: ignore[override]  # typeshed's packs the arguments' types
        self, executor: object, func: Callable[..., Any], *args: Any
    ) -> asyncio.Future[Any]:
        """Run the work as soon as the loop comes to it; it takes no virtual time."""
        future: asyncio.Future[Any] = self.create_future()
        self.call_soon(_fulfil, future, func, *args)
        return future

    def call_soon_threadsafe(  # type: ignore[override]  # as above
        self, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        """Schedule a callback. On the loop's own thread the loop need not be woken through a socket; nearly all calls come from
        there."""
        is_awake = threading.get_ident() == self._thread
        schedule = self.call_soon if is_awake else super().call_soon_threadsafe
        return schedule(callback, *args, context=context)

    def sleep_through(self, seconds: float) -> None:
        """Let time pass while nothing runs, as in a suspended process: timers are late afterwards."""
        self._jumping.now_s += seconds


def _fulfil(future: asyncio.Future[Any], work: Callable[..., Any], *args: Any) -> None:
    if future.cancelled():
        return
    try:
        future.set_result(work(*args))
    except Exception as error:  # for the caller, whatever it is
        future.set_exception(error)


def run_virtual(main: Coroutine[Any, Any, T]) -> T:
    """Run `main` like `asyncio.run`, in virtual time, and return its result."""
    loop = VirtualLoop()
    try:
        return loop.run_until_complete(main)
    finally:
        loop.run_until_complete(cancel_the_rest())
        loop.close()
