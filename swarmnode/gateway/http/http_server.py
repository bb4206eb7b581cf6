"""HTTP server of the gateway: uvicorn on the caller's event loop, with bounds on connections and request heads."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Iterator
from functools import partial
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from swarmnode.errors import LocalError, with_port_advice
from swarmnode.net.addressing.addresses import Claimant, address_group, bound
from swarmnode.net.fair_share import FairShare

MAX_CONNECTIONS = 1024
LEAVE_S = 5  # for unfinished responses when the server stops
MAX_HEAD_BYTES = 1 << 16  # may be exceeded by the size of one read
HEAD_S = 30.0  # for a request's head to arrive, also for the first one of a connection
UPGRADE = re.compile(rb"\r\nupgrade:", re.IGNORECASE)
FRAMING = 8  # bytes on the wire for each byte of a chunked body: a chunk of one byte takes 6


BUSY = b"HTTP/1.1 503 Service Unavailable\r\nretry-after: 1\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"


class BoundedHttp(HttpToolsProtocol):
    """Connection of a client. If all `places` are taken, the address group with the most connections loses its newest one."""

    def __init__(
        self, *arguments: Any, places: FairShare[BoundedHttp] | None = None, **named: Any
    ) -> None:  # uvicorn's arguments, and `places`
        super().__init__(*arguments, **named)
        self._places = FairShare[BoundedHttp](1) if places is None else places

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)  # type: ignore[arg-type]  # uvicorn's is narrower than asyncio's
        self._beside_bytes = 0  # bytes of the current request that are not of its body
        self._overdue: asyncio.TimerHandle | None = None
        host = self.client[0] if self.client else ""
        yielding = self._places.admit(self, Claimant(address_group(f"/ip{6 if ':' in host else 4}/{host}"), host))
        if yielding is self:
            self.transport.write(BUSY)
            self.transport.close()
            return
        if yielding is not None:
            yielding.transport.abort()
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._places.leave(self)
        self._stop_waiting()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Pass the data on to uvicorn; refuse a head that is too long, and start the timer for the next head."""
        self._beside_bytes += len(data)
        if self._overdue is not None:
            # Hide the Upgrade header of a client that offers HTTP/2, as Java's does: the parser would take the body for HTTP/2. A
            # client whose offer gets no answer goes on with HTTP/1.1.
            head, end, body = data.partition(b"\r\n\r\n")
            data = UPGRADE.sub(b"\r\nX-Upgrade:", head) + end + body
        super().data_received(data)
        if self._beside_bytes > MAX_HEAD_BYTES:
            self._refuse(f"The head of a request may have {MAX_HEAD_BYTES} bytes.")
        elif not self._is_answering:
            self._await_head()

    def on_message_begin(self) -> None:
        self._beside_bytes = 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._stop_waiting()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._beside_bytes -= FRAMING * len(body)
        super().on_body(body)

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _await_head(self) -> None:
        if self._overdue is None and not self.transport.is_closing():
            self._overdue = self.loop.call_later(HEAD_S, self._refuse, "The request did not arrive in time.")

    def _stop_waiting(self) -> None:
        if self._overdue is not None:
            self._overdue.cancel()
            self._overdue = None

    def _refuse(self, sentence: str) -> None:
        """Close the connection; if no response is under way, send `sentence` with status 400 first."""
        if self.transport.is_closing():
            return
        if self._is_answering:
            self.transport.close()
        else:
            self.send_400_response(sentence)


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to the command, which handles Ctrl-C itself."""
        yield


@contextlib.asynccontextmanager
async def serving_http(app: ASGIApp, host: str, port: int) -> AsyncIterator[int]:
    """Serve `app` at `host` and `port` while the context lasts, and yield the port (a free one if `port` is 0). Raises LocalError
    if it cannot listen there."""
    try:
        listener = await asyncio.to_thread(bound, host, port, backlog=MAX_CONNECTIONS)  # may query a DNS resolver
    except OSError as error:
        raise LocalError(
            f"cannot listen at {host}:{port}: {with_port_advice(error, 'choose another --port')}"
        ) from None
    listener.setblocking(False)
    config = uvicorn.Config(
        app,
        http=partial(BoundedHttp, places=FairShare(MAX_CONNECTIONS)),  # type: ignore[arg-type]  # uvicorn only calls it
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=LEAVE_S,
    )
    server = _Server(config)
    running = asyncio.ensure_future(server.serve([listener]))
    try:
        yield listener.getsockname()[1]
    finally:
        server.should_exit = True
        await running
