"""Answers as server-sent events, which end when nobody reads them any more."""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
from collections.abc import AsyncGenerator, Callable
from typing import Any

from fastapi import Request
from pydantic import BaseModel
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from swarmnode.gateway.http.client_watch import ClientGone, ClientWatch, TimeLimit

DONE = "[DONE]"


class NamedEvent(BaseModel, extra="allow"):
    """An event of an API that names its events, with whatever that one tells."""

    type: str

    @classmethod
    def of(cls, type: str, **told: Any) -> NamedEvent:
        """An event of this name."""
        return cls.model_validate({"type": type, **told})


class TextEvents:
    """Events of the choices of an answer that are the same each time but for one text. Each is written once and then filled: by
    pydantic a token takes half of all the time that the gateway has for it."""

    def __init__(self, write: Callable[[int, str], BaseModel]) -> None:
        """`write` makes the event of a choice, by its index, and a text."""
        self._write = write
        self._around: dict[int, list[str]] = {}  # by choice, what is before and behind the text

    def __repr__(self) -> str:
        return f"<TextEvents of {len(self._around)} choices>"

    def fill(self, index: int, text: str) -> bytes:
        """Return the event of a choice with this text."""
        if index not in self._around:
            place = secrets.token_hex(16)
            self._around[index] = event(self._write(index, place)).decode().split(f'"{place}"')
        before, after = self._around[index]
        return f"{before}{json.dumps(text, ensure_ascii=False)}{after}".encode()


def event(data: BaseModel | str | bytes, *, name: str | None = None) -> bytes:
    """A server-sent event, with a name where it has one; bytes are one already."""
    if isinstance(data, bytes):
        return data
    if isinstance(data, NamedEvent):
        name = data.type
    text = data if isinstance(data, str) else data.model_dump_json()
    return (f"event: {name}\ndata: {text}\n\n" if name else f"data: {text}\n\n").encode()


class EventStream(Response):
    """Server-sent events as they come. Made by `begin`."""

    media_type = "text/event-stream"

    def __init__(
        self, first: bytes, events: AsyncGenerator[bytes, None], client: ClientWatch, write_timeout_s: float
    ) -> None:
        # Proxies shall not wait either.
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._first = first
        self._events = events
        self._client = client
        self._write_timeout_s = write_timeout_s

    def __repr__(self) -> str:
        return f"<EventStream of {self._events!r}>"

    @classmethod
    async def begin(
        cls, request: Request, events: AsyncGenerator[bytes, None], *, write_timeout_s: float
    ) -> EventStream:
        """With its first event, so that what fails before that is answered by a status. Raises what it fails with."""
        client = ClientWatch(request.receive)
        try:
            first = await client.run(anext(events))
        except BaseException:
            client.close()
            await events.aclose()
            raise
        return cls(first, events, client, write_timeout_s)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Until the last one, or until nobody reads."""
        try:
            with contextlib.suppress(ClientGone), self._client:
                await self._client.run(self._send(send))
        finally:
            await self._events.aclose()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await self._write(send, self._first)
        async for each in self._events:
            await self._write(send, each)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _write(self, send: Send, body: bytes) -> None:
        """Raises ClientGone where the reader does not take it in time."""
        try:
            with TimeLimit(self._write_timeout_s):
                await send({"type": "http.response.body", "body": body, "more_body": True})
        except asyncio.TimeoutError:
            raise ClientGone from None
