"""Guard before every endpoint: checks the API key, its rate, the origin and the body's size. It is ASGI middleware, so that it
decides before any of the body is stored."""

from __future__ import annotations

import asyncio
import re
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from swarmnode.gateway.access.keys import KeyRing
from swarmnode.gateway.gateway import GatewayConfig
from swarmnode.gateway.http.api_error import ApiError, too_many
from swarmnode.gateway.http.body_route import JsonBound
from swarmnode.gateway.http.event_stream import TimeLimit

OPEN_PATHS = {"/health", "/ready", "/"}  # for monitoring, and for the page, which asks for the key itself
OPEN_FOLDER = "/page/"
LOOPBACK_NAMES = {"localhost", "127.0.0.1", "::1"}
PIECE_BYTES = 1 << 16  # of a body that are counted in one turn of the event loop
BEARER = re.compile(r"Bearer +(\S+)", re.IGNORECASE)


class Guard:
    """Middleware that admits requests to the application and puts their API key into the scope's state."""

    def __init__(self, app: ASGIApp, keys: KeyRing, config: GatewayConfig) -> None:
        self._app = app
        self._keys = keys
        self._config = config

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check one request; pass it on, or send the error."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if scope["method"] == "HEAD":
            scope = {**scope, "method": "GET"}  # the server sends only the head of the response
        body = _BoundedBody(receive, self._config)
        try:
            headers = Headers(scope=scope)
            self._check_page(headers)
            length = headers.get("content-length", "")
            if length.isdigit() and int(length[:20]) > self._config.max_body_bytes:
                raise body.too_large()
            coding = headers.get("content-encoding", "identity")
            if coding != "identity":  # a few bytes of gzip can expand to gigabytes
                raise ApiError(
                    415, f"the gateway reads no compressed bodies: send it without Content-Encoding: {coding}"
                )
            if scope["path"] not in OPEN_PATHS and not scope["path"].startswith(OPEN_FOLDER):
                bearer = BEARER.fullmatch(headers.get("authorization", ""))
                key = self._keys.find(bearer[1] if bearer else headers.get("x-api-key"))
                if key is None:
                    raise ApiError(
                        "invalid_api_key", "this gateway needs an API key: send the header Authorization: Bearer sk-…"
                    )
                if wait_s := key.count_request():
                    raise too_many(
                        f"this key is limited to {key.limits.per_minute} requests a minute: try again later", wait_s
                    )
                scope.setdefault("state", {})["key"] = key
        except ApiError as error:
            await error.response()(scope, receive, _as_typed(send))
            return
        await self._app(scope, body.receive, _as_typed(send))

    def _check_page(self, headers: Headers) -> None:
        """Raise ApiError (403) for a request of a web page that may not call the gateway. Such a page reaches loopback from this
        machine's browser, either by a name that leads there (DNS rebinding) or across origins."""
        host = headers.get("host")  # HTTP/1.0 may lack it, but no browser uses that
        if self._config.loopback and host is not None and urlsplit(f"//{host}").hostname not in LOOPBACK_NAMES:
            raise ApiError(
                "wrong_host", "only programs on this machine may call this gateway: use http://127.0.0.1:PORT"
            )
        origin = headers.get("origin")
        if origin is None or origin in self._config.origins:
            return
        if urlsplit(origin).netloc != host:
            raise ApiError(
                "wrong_origin", f"pages of {origin} may not call this gateway: allow them with --cors {origin}"
            )


def _as_typed(send: Send) -> Send:
    """Add X-Content-Type-Options to each response, so that browsers do not guess another type: JSON and events hold texts by
    others."""

    async def sent(message: Message) -> None:
        if message["type"] == "http.response.start":
            MutableHeaders(scope=message)["X-Content-Type-Options"] = "nosniff"
        await send(message)

    return sent


class _BoundedBody:
    """Body of a request, bounded in bytes, in JSON values and in the time that it takes to arrive."""

    def __init__(self, receive: Receive, config: GatewayConfig) -> None:
        self._receive = receive
        self._config = config
        self._received_bytes = 0
        self._json = JsonBound()
        self._whole = False

    async def receive(self) -> Message:
        """Return the next ASGI message of the body. Raises ApiError if the body takes too long, is too large or holds too many
        values."""
        if self._whole:
            return await self._receive()
        try:
            with TimeLimit(self._config.body_timeout_s):
                message = await self._receive()
        except asyncio.TimeoutError:
            raise ApiError(408, "the request did not arrive in time") from None
        body = message.get("body", b"")
        self._received_bytes += len(body)
        self._whole = not message.get("more_body", False)
        if self._received_bytes > self._config.max_body_bytes:
            raise self.too_large()
        self._json.push(body[:PIECE_BYTES])
        for begin in range(PIECE_BYTES, len(body), PIECE_BYTES):
            await asyncio.sleep(0)
            self._json.push(body[begin : begin + PIECE_BYTES])
        return message

    def too_large(self) -> ApiError:
        """Return the error (413) for a body beyond the limit."""
        return ApiError(413, f"the request is too large: at most {self._config.max_body_bytes} bytes are allowed")
