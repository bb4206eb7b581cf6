"""HTTP without sockets: an ASGI application behind httpx2, whose answers come in pieces, so that it lives in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx2
from starlette.types import ASGIApp


class InProcess(httpx2.AsyncBaseTransport):
    """What httpx2's own ASGITransport is, but that one waits for an answer's end and never goes away in its middle."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    def __repr__(self) -> str:
        return f"<InProcess {self._app!r}>"

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        exchange = _Exchange(await request.aread())
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": request.method,
            "headers": [(name.lower(), value) for name, value in request.headers.raw],
            "scheme": request.url.scheme,
            "path": request.url.path,
            "raw_path": request.url.raw_path.split(b"?")[0],
            "query_string": request.url.query,
            "server": (request.url.host, request.url.port or 80),
            "client": ("127.0.0.1", 1234),
            "root_path": "",
        }
        exchange.task = asyncio.ensure_future(self._app(scope, exchange.receive, exchange.send))
        begun = asyncio.ensure_future(exchange.begun.wait())
        try:
            await asyncio.wait({begun, exchange.task}, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            await exchange.aclose()
            raise
        finally:
            begun.cancel()
        if not exchange.begun.is_set():
            exchange.task.result()
            raise httpx2.RemoteProtocolError("the application ended without an answer")
        return httpx2.Response(exchange.status, headers=exchange.headers, stream=exchange)


class _Exchange(httpx2.AsyncByteStream):
    """One request and its answer. `aclose` is the client going away."""

    def __init__(self, body: bytes) -> None:
        self._body: bytes | None = body
        self._gone = asyncio.Event()
        self._pieces: asyncio.Queue[bytes | None] = asyncio.Queue()
        self.begun = asyncio.Event()
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []
        self.task: asyncio.Future[None]

    async def receive(self) -> dict[str, Any]:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self.status, self.headers = message["status"], message["headers"]
            self.begun.set()
            return
        if message.get("body"):
            self._pieces.put_nowait(message["body"])
        if not message.get("more_body", False):
            self._pieces.put_nowait(None)

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while (piece := await self._pieces.get()) is not None:
            yield piece

    async def aclose(self) -> None:
        self._gone.set()
        await self.task
