"""The way back from a compute thread to the loop that it works for."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any, TypeVar

log = logging.getLogger(__name__)
T = TypeVar("T")


class WayBack:
    """Made on the loop. What comes after the loop has closed is dropped: nobody waits for it any more."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()

    def __repr__(self) -> str:
        return f"<WayBack to a loop that is {'closed' if self._loop.is_closed() else 'open'}>"

    def post(self, callback: Callable[..., None], *args: Any) -> None:
        """From the thread: have the loop call something."""
        try:
            self._loop.call_soon_threadsafe(callback, *args)
        except RuntimeError:
            log.debug("result dropped: the loop has closed")

    def promise(self, function: Callable[[], T]) -> tuple[asyncio.Future[T], Callable[[], None]]:
        """From the loop: a future, and the job that the thread does for it. The future takes the function's result or error."""
        future: asyncio.Future[T] = self._loop.create_future()

        def job() -> None:
            try:
                result = function()
            except BaseException as error:
                self.post(_fail, future, error)
            else:
                self.post(_resolve, future, result)

        return future, job


def _resolve(future: asyncio.Future[T], value: T) -> None:
    if not future.done():
        future.set_result(value)


def _fail(future: asyncio.Future[T], error: BaseException) -> None:
    if not future.done():
        future.set_exception(error)
