"""Whether whoever asked is still there."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from starlette.types import Receive

from swarmnode.net.tasks import CANCEL_AGAIN_S

T = TypeVar("T")


class TimeLimit:
    """`with TimeLimit(seconds):` raises asyncio.TimeoutError where what is awaited inside takes longer. A timer is all that it
    costs; `wait_for` costs a task, and two turns of the loop. (`asyncio.timeout`, which Python 3.10 does not have.)"""

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
    """Whoever asked has closed the connection, or does not read: there is nobody to answer."""


class ClientWatch:
    """From when it is made to `close`, or while its context lasts. `receive` is ASGI's, of a request whose body was read."""

    def __init__(self, receive: Receive) -> None:
        self._gone = asyncio.ensure_future(_gone(receive))

    def __enter__(self) -> ClientWatch:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<ClientWatch: {'gone' if self._gone.done() else 'there'}>"

    def close(self) -> None:
        """Look no longer."""
        self._gone.cancel()

    async def run(self, work: Awaitable[T]) -> T:
        """The result of `work`, which is cancelled when the client goes. Raises ClientGone.

        It runs in the task of who calls: another one would put two turns of the loop before a first token, and two behind it.
        """
        task, loop = asyncio.current_task(), asyncio.get_running_loop()
        assert task is not None
        again: list[asyncio.TimerHandle] = []

        def end(_gone: object = None) -> None:
            task.cancel()
            again[:] = [loop.call_later(CANCEL_AGAIN_S, end)]  # as `cancel_and_wait` does, and for its reason

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
