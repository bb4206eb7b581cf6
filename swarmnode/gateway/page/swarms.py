"""Endpoints under /api/v1/swarms: the state of the swarms that this gateway serves."""

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
MAX_LINKS = 48  # peers in the matrix


@router.get("")
async def list_swarms(request: Request) -> SwarmList:
    """Return the names of the swarms, each also the name of a model of the API."""
    return SwarmList(swarms=page_of(request).names)


@router.get("/{name}", response_model=SwarmReply)
async def one_swarm(name: str, request: Request) -> dict[str, Any]:
    """Return the present state of one swarm."""
    return page_of(request).feed(name).picture()


@router.get("/{name}/events", response_class=Response)
async def swarm_events(name: str, request: Request) -> Response:
    """Stream the state of one swarm as server-sent events: `swarm` with all of it, then `changes` with the values and peers that
    changed and the ids of peers that are `gone`."""
    return await _streamed(request, page_of(request).feed(name).events())


@router.get("/{name}/sessions/{trace}/events", response_class=Response)
async def session_events(name: str, trace: str, request: Request) -> Response:
    """Stream which machines generate a text, as server-sent events: `session` after each change, then `over`. `trace` is the
    answer's id without its prefix."""
    return await _streamed(request, page_of(request).feed(name).session_events(trace))


async def _streamed(request: Request, events: AsyncGenerator[bytes, None]) -> Response:
    await request.body()  # it is empty; the client's next message is its disconnection
    return await EventStream.begin(request, events, write_timeout_s=gateway_of(request).config.write_timeout_s)


@router.get("/{name}/links", response_model=LinksReply)
async def links(name: str, request: Request) -> dict[str, Any]:
    """Return the delays and bandwidths between the machines that hold layers (units), for at most 48 of them."""
    return page_of(request).feed(name).client.links(MAX_LINKS)


@router.get("/{name}/history")
async def history(name: str, request: Request) -> HistoryReply:
    """Return the history of the last hour."""
    return page_of(request).feed(name).history.reply()
