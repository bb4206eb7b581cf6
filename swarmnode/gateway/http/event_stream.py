"""Responses as server-sent events, which end when the client stops reading.

Cancels work for a request whose client has gone, and work that takes too long.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any, TypeVar

from fastapi import Request
from pydantic import BaseModel
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from swarmnode.net.tasks import CANCEL_AGAIN_S, Tasks

T = TypeVar("T")


class TimeLimit:
    """Context manager that raises asyncio.TimeoutError if the code inside takes longer than `seconds`. It costs one timer;
    `wait_for` costs a task and two turns of the loop. Python 3.10 lacks `asyncio.timeout`."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._is_over = False

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


DONE = "[DONE]"
COMMENT = b": waiting\n\n"  # clients ignore it
COMMENT_AFTER_S = 10.0  # proxies close connections that are silent for some 30 to 60 s


class NamedEvent(BaseModel, extra="allow"):
    """Event of an API that names its events, with any further fields."""

    type: str

    @classmethod
    def of(cls, type: str, **told: Any) -> NamedEvent:
        """Return an event of the name `type` with the fields in `told`."""
        return cls.model_validate({"type": type, **told})


class TextEvents:
    """Writer of events of an answer's choices that differ only in one text. Each choice's event is serialised once and then filled
    in: serialising every token's event by pydantic took half of the gateway's time for the token."""

    def __init__(self, write: Callable[[int, str], BaseModel]) -> None:
        """`write` builds the event of a choice from its index and a text."""
        self._write = write
        self._around: dict[int, list[str]] = {}  # by choice: the serialised event before and after the text

    def fill(self, index: int, text: str) -> bytes:
        """Return the serialised event of choice `index` with `text`."""
        if index not in self._around:
            place = secrets.token_hex(16)
            self._around[index] = event(self._write(index, place)).decode().split(f'"{place}"')
        before, after = self._around[index]
        return f"{before}{json.dumps(text, ensure_ascii=False)}{after}".encode()


def event(data: BaseModel | str | bytes, *, name: str | None = None) -> bytes:
    """Serialise `data` as a server-sent event, with a name if `name` is given or `data` is a NamedEvent. Bytes are returned
    unchanged, because they are an event already."""
    if isinstance(data, bytes):
        return data
    if isinstance(data, NamedEvent):
        name = data.type
    text = data if isinstance(data, str) else data.model_dump_json()
    return (f"event: {name}\ndata: {text}\n\n" if name else f"data: {text}\n\n").encode()


class EventStream(Response):
    """Response that streams server-sent events. Create it with `begin`."""

    media_type = "text/event-stream"

    def __init__(
        self, first: bytes, events: AsyncGenerator[bytes, None], client: ClientWatch, write_timeout_s: float
    ) -> None:
        # Proxies must not buffer the stream either.
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._first = first
        self._events = events
        self._client = client
        self._write_timeout_s = write_timeout_s
        self._writing = asyncio.Lock()
        self._written_at = 0.0

    def __repr__(self) -> str:
        return f"<EventStream of {self._events!r}>"

    @classmethod
    async def begin(
        cls, request: Request, events: AsyncGenerator[bytes, None], *, write_timeout_s: float
    ) -> EventStream:
        """Wait for the first event and return the response. An error before that event is raised, so that the client gets a status
        instead of a stream. Raises ClientGone if the client disconnects while waiting."""
        client = ClientWatch(request.receive)
        try:
            first = await client.run(anext(events))
        except BaseException:
            client.close()
            await events.aclose()
            raise
        return cls(first, events, client, write_timeout_s)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events until the last one, or until the client stops reading."""
        try:
            with contextlib.suppress(ClientGone), self._client:
                await self._client.run(self._send(send))
        finally:
            await self._events.aclose()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await self._write(send, self._first)
        comments = Tasks("comments of a stream", on_crash=None)
        try:
            comments.spawn(self._comment(send), "comments", awaited=True)
            async for each in self._events:
                await self._write(send, each)
        finally:
            await comments.close()
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _comment(self, send: Send) -> None:
        """Send a comment whenever there was no event for `COMMENT_AFTER_S`, until the client stops reading."""
        loop = asyncio.get_running_loop()
        with contextlib.suppress(ClientGone):
            while True:
                await asyncio.sleep(max(1.0, self._written_at + COMMENT_AFTER_S - loop.time()))
                if not self._writing.locked() and loop.time() >= self._written_at + COMMENT_AFTER_S:
                    await self._write(send, COMMENT)

    async def _write(self, send: Send, body: bytes) -> None:
        """Send one piece. Raises ClientGone if the client does not take it within the write timeout."""
        try:
            async with self._writing:
                with TimeLimit(self._write_timeout_s):
                    await send({"type": "http.response.body", "body": body, "more_body": True})
            self._written_at = asyncio.get_running_loop().time()
        except asyncio.TimeoutError:
            raise ClientGone from None
