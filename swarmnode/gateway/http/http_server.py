"""The gateway's HTTP server: uvicorn on our own loop, until it is told to stop."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Iterator
from functools import partial

import uvicorn
from starlette.types import ASGIApp

from swarmnode.errors import LocalError
from swarmnode.gateway.http.bounded_http import BoundedHttp
from swarmnode.net.limits.fair_share import FairShare

MAX_CONNECTIONS = 1024
LEAVE_S = 5  # for answers that are under way


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Ctrl-C is the command's business."""
        yield


@contextlib.asynccontextmanager
async def serving_http(app: ASGIApp, host: str, port: int) -> AsyncIterator[int]:
    """ApiAnswer while the context lasts, at the port that it yields (a free one for 0). Raises LocalError."""
    listener = await asyncio.to_thread(_listen, host, port)  # it may ask a resolver
    config = uvicorn.Config(
        app,
        http=partial(BoundedHttp, places=FairShare(MAX_CONNECTIONS)),  # type: ignore[arg-type]  # what makes one will do
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


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(MAX_CONNECTIONS)
            listener.setblocking(False)
        except BaseException:
            listener.close()
            raise
    except OSError as error:
        raise LocalError(f"cannot listen at {host}:{port}: {error.strerror or error}; choose another --port") from None
    return listener
