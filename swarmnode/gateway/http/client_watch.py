"""Cancels work for a request whose client has gone, and work that takes too long."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from starlette.types import Receive

from swarmnode.net.tasks import CANCEL_AGAIN_S

T = TypeVar("T")


class TimeLimit:
    """Context manager that raises asyncio.TimeoutError if the code inside takes longer than `seconds`. It costs one timer;
    `wait_for` costs a task and two turns of the loop. Python 3.10 lacks `asyncio.timeout`."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._is_over = False

    def __repr__(self) -> str:
        return f"<TimeLimit of {self._seconds} s{', which are over' * self._is_over}>"

    def __enter__(self) -> TimeLimit:
        self._task = asyncio.current_task()
        self._timer = asyncio.get_running_loop().call_later(self._seconds, self._end)
        return self

    def _end(self) -> None:
        assert self._task is not None
        self._is_over = self._task.cancel()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._timer.cancel()
        if self._is_over and kind is asyncio.CancelledError:
            raise asyncio.TimeoutError from None


class ClientGone(Exception):
    """Raised if the client has closed the connection or does not read, so that no response can be sent."""


class ClientWatch:
    """Watch for the client's disconnection, from construction to `close` or while its context lasts. `receive` is the ASGI function
    of a request whose body has been read."""

    def __init__(self, receive: Receive) -> None:
        self._gone = asyncio.ensure_future(_gone(receive))

    def __enter__(self) -> ClientWatch:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<ClientWatch: {'gone' if self._gone.done() else 'there'}>"

    def close(self) -> None:
        """Stop watching."""
        self._gone.cancel()

    async def run(self, work: Awaitable[T]) -> T:
        """Return the result of `work`; cancel it when the client disconnects. Raises ClientGone in that case.

        The caller's own task runs `work`: another task would cost two turns of the loop before the first token, and two after it.
        """
        task, loop = asyncio.current_task(), asyncio.get_running_loop()
        assert task is not None
        again: list[asyncio.TimerHandle] = []

        def end(_gone: object = None) -> None:
            task.cancel()
            again[:] = [loop.call_later(CANCEL_AGAIN_S, end)]  # for the same reason as `cancel_and_wait`

        self._gone.add_done_callback(end)
        try:
            return await work
        except asyncio.CancelledError:
            if self._gone.done():
                raise ClientGone from None
            raise
        finally:
            self._gone.remove_done_callback(end)
            for timer in again:
                timer.cancel()


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
