"""The way back from a compute thread to the loop that it works for."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

log = logging.getLogger(__name__)


class LoopBridge:
    """Made on the loop. What comes after the loop has closed is dropped: nobody waits for it any more."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()

    def __repr__(self) -> str:
        return f"<LoopBridge to a loop that is {'closed' if self._loop.is_closed() else 'open'}>"

    def post(self, callback: Callable[..., None], *args: Any) -> None:
        """From the thread: have the loop call something."""
        try:
            self._loop.call_soon_threadsafe(callback, *args)
        except RuntimeError:
            log.debug("result dropped: the loop has closed")

    def resolve(self, future: asyncio.Future[Any], value: object) -> None:
        """From the thread: give a future of the loop its result, if somebody still waits for it."""
        self.post(_resolve, future, value)

    def fail(self, future: asyncio.Future[Any], error: BaseException) -> None:
        """From the thread: give a future of the loop an error, if somebody still waits for it."""
        self.post(fail, future, error)


def fail(future: asyncio.Future[Any], error: BaseException) -> None:
    """Give a future an error, on the loop. Nobody needs to hear of it."""
    if not future.done():
        future.set_exception(error)
        future.exception()  # read once: a caller that has gone leaves no "never retrieved" in the log


def _resolve(future: asyncio.Future[Any], value: object) -> None:
    if not future.done():
        future.set_result(value)
