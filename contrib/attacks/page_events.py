"""A stranger holds more connections to a gateway than it has places, with event streams that it never reads to the end."""

from __future__ import annotations

import asyncio
import resource

from attack import Outcome, main
from fastapi import FastAPI, Request
from starlette.responses import PlainTextResponse, Response

from swarmnode.gateway.http.event_stream import EventStream, event
from swarmnode.gateway.http.http_server import MAX_CONNECTIONS, serving_http

VIRTUAL, FAST = False, False
STRANGER, HONEST = "127.0.0.2", "127.0.0.1"  # in a private network each address counts separately
MORE = 200
ASKS = 20
ANSWER_S = 2.0
FILES = 4096


async def attack() -> Outcome:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(FILES, hard), hard))
    app = FastAPI()

    async def events(request: Request) -> Response:
        async def forever():  # type: ignore[no-untyped-def]
            while True:
                yield event("{}", name="changes")
                await asyncio.sleep(0.5)

        return await EventStream.begin(request, forever(), write_timeout_s=30.0)

    async def health() -> Response:
        return PlainTextResponse("ok")

    app.get("/events")(events)
    app.get("/health")(health)
    async with serving_http(app, "0.0.0.0", 0) as port:
        held = [await _ask(port, STRANGER, "/events") for _ in range(MAX_CONNECTIONS + MORE)]
        answered, slowest_s = 0, 0.0
        loop = asyncio.get_running_loop()
        for _ in range(ASKS):
            began_s = loop.time()
            reader, writer = await _ask(port, HONEST, "/health")
            try:
                line = await asyncio.wait_for(reader.readline(), ANSWER_S)
            except (asyncio.TimeoutError, ConnectionError):
                line = b""
            answered += b" 200 " in line
            slowest_s = max(slowest_s, loop.time() - began_s)
            writer.close()
        for _, writer in held:
            writer.close()
    return Outcome(
        answered == ASKS,
        f"{len(held)} streams of one address; {answered} of {ASKS} questions from another one were answered, "
        f"within {slowest_s:.2f} s",
    )


async def _ask(port: int, source: str, path: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=(source, 0))
    writer.write(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
    return reader, writer


main(__name__, attack, virtual=VIRTUAL)
