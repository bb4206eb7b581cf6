"""/api/v1/machine: the nodes of this machine, for its owner alone."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

from fastapi import APIRouter
from pydantic import BaseModel, Field

from swarmnode.gateway.http.api_error import ApiError
from swarmnode.gateway.page.page import OWNED, Page
from swarmnode.gateway.page.replies import MachineReply, NodeReply
from swarmnode.lending.control_client import running_nodes, tell_node

MAX_REASON_CHARS = 200


router = APIRouter(prefix="/api/v1/machine")


class NodeCommand(BaseModel):
    """Command of the owner to a node, like `swarmnode pause`, `finish` and `resume`. `keep` is where the weights of a paused node
    stay."""

    command: Literal["pause", "finish", "resume"]
    reason: str = Field("", max_length=MAX_REASON_CHARS)
    keep: Literal["disk", "memory"] | None = None


@router.get("", response_model=MachineReply)
async def nodes(page: Page = OWNED) -> dict[str, Any]:
    """Return what this machine lends, what it does now and why, and what it has contributed."""
    found = await asyncio.to_thread(page.nodes)
    return {"nodes": [{"node": node, **answer} for node, answer in found.items()]}


@router.post("/{node}", response_model=NodeReply)
async def tell(node: str, wanted: NodeCommand, page: Page = OWNED) -> dict[str, Any]:
    """Let a node pause, finish its work, or resume. Returns at once; `GET /api/v1/machine` shows the progress. Raises ApiError
    (404) if no such node runs."""
    path = running_nodes(page.owner.home).get(node)
    told = wanted.model_dump(exclude_none=True)
    answer = None if path is None else await asyncio.to_thread(tell_node, path, told.pop("command"), **told)
    if answer is None:
        raise ApiError(404, f"no node {node!r} runs on this machine: start it with `swarmnode run`")
    return {"node": node, **answer}
