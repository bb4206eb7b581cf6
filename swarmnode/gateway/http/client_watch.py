"""Whether whoever asked is still there."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from starlette.types import Receive

from swarmnode.net.tasks import CANCEL_AGAIN_S

T = TypeVar("T")


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
