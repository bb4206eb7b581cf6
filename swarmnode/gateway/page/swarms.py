"""GET /api/v1/swarms: what there is to see of the swarms that are served here."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from swarmnode.gateway.gateway import gateway_of
from swarmnode.gateway.http.event_stream import EventStream
from swarmnode.gateway.page.page import page_of
from swarmnode.gateway.page.replies import HistoryReply, LinksReply, SwarmList, SwarmReply

router = APIRouter(prefix="/api/v1/swarms")
MAX_LINKS = 48  # peers of the matrix


@router.get("")
async def list_swarms(request: Request) -> SwarmList:
    """The swarms by what they are called here, each also a model of the API."""
    return SwarmList(swarms=page_of(request).names)


@router.get("/{name}", response_model=SwarmReply)
async def one_swarm(name: str, request: Request) -> dict[str, Any]:
    """One of them at this moment."""
    return page_of(request).feed(name).picture()


@router.get("/{name}/events", response_class=Response)
async def swarm_events(name: str, request: Request) -> Response:
    """The same as server-sent events: `swarm` with all of it, then `changes`, of peers those that changed, and who is `gone`."""
    return await _streamed(request, page_of(request).feed(name).events())


@router.get("/{name}/sessions/{trace}/events", response_class=Response)
async def session_events(name: str, trace: str, request: Request) -> Response:
    """Which machines write a text, as server-sent events: `session` whenever something changed, then `over`. `trace` is what
    follows the prefix in the answer's id."""
    return await _streamed(request, page_of(request).feed(name).session_events(trace))


async def _streamed(request: Request, events: AsyncGenerator[bytes, None]) -> Response:
    await request.body()  # there is none; what comes next from the client is that it goes
    return await EventStream.begin(request, events, write_timeout_s=gateway_of(request).config.write_timeout_s)


@router.get("/{name}/links", response_model=LinksReply)
async def links(name: str, request: Request) -> dict[str, Any]:
    """Delays and bandwidths between the machines that hold units, at most 48 of them."""
    return page_of(request).feed(name).client.links(MAX_LINKS)


@router.get("/{name}/history")
async def history(name: str, request: Request) -> HistoryReply:
    """The last hour, in samples."""
    return page_of(request).feed(name).history.reply()
