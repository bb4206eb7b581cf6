"""/api/v1/machine: this machine, its nodes and their limits and rules, for its owner alone."""

from __future__ import annotations

import asyncio
from functools import cache
from typing import Annotated, Any, Literal

import psutil
from fastapi import APIRouter
from pydantic import BaseModel, Field, StringConstraints

from swarmnode.gateway.http.api_error import ApiError
from swarmnode.gateway.http.body_route import Items, at_most
from swarmnode.gateway.page.page import OWNED, Page
from swarmnode.gateway.page.replies import ChangeReply, LendingOptionsReply, MachineReply, NodeReply
from swarmnode.lending.cards import Cards
from swarmnode.lending.control import running_nodes, tell_node

MAX_REASON_CHARS = 200
MAX_OPTIONS, MAX_ITEMS, MAX_OPTION_CHARS = 32, 32, 100
CPU_SENSORS = ("coretemp", "k10temp", "zenpower", "cpu_thermal")  # of Intel, AMD and ARM, as Linux names them

OptionText = Annotated[str, StringConstraints(max_length=MAX_OPTION_CHARS)]
OptionList = Annotated[Items[OptionText], Field(max_length=MAX_ITEMS)]


Options = Annotated[
    dict[OptionText, OptionText | bool | OptionList],
    at_most(MAX_OPTIONS, f"at most {MAX_OPTIONS} options may change at once"),
]


router = APIRouter(prefix="/api/v1/machine")


class NodeCommand(BaseModel):
    """Command of the owner to a node, like `swarmnode pause`, `pause --after-work` and `resume`. `keep` is where the weights of a
    paused node stay."""

    command: Literal["pause", "finish", "resume"]
    reason: str = Field("", max_length=MAX_REASON_CHARS)
    keep: Literal["disk", "memory"] | None = None


class OptionsCommand(BaseModel):
    """Options of a node to change, by their names in rules.toml and node.toml, with values as typed there; empty ones (also
    `false`) turn the option off."""

    options: Options = Field(min_length=1)


@router.get("", response_model=MachineReply)
async def nodes(page: Page = OWNED) -> dict[str, Any]:
    """Return this machine's temperatures, what its nodes lend, what they do now and why, and what they have
    contributed."""
    found, machine = await asyncio.gather(asyncio.to_thread(page.nodes), asyncio.to_thread(_sensed))
    return {"nodes": [{"node": node, **answer} for node, answer in found.items()], **machine}


@router.post("/{node}", response_model=NodeReply)
async def tell(node: str, wanted: NodeCommand, page: Page = OWNED) -> dict[str, Any]:
    """Let a node pause, finish its work, or resume. Returns at once; `GET /api/v1/machine` shows the progress. Raises ApiError
    (404) if no such node runs."""
    told = wanted.model_dump(exclude_none=True)
    return await _answer_of(page, node, told.pop("command"), **told)


@router.get("/{node}/options", response_model=LendingOptionsReply)
async def options(node: str, page: Page = OWNED) -> dict[str, Any]:
    """Return the limits and rules that a node lends by. Raises ApiError (404) if no such node runs."""
    return await _answer_of(page, node, "options")


@router.post("/{node}/options", response_model=ChangeReply)
async def change(node: str, wanted: OptionsCommand, page: Page = OWNED) -> dict[str, Any]:
    """Change limits and rules of a node, for this run and later ones. `told` says in sentences what happened. Raises ApiError: 400
    if a value is not valid (then nothing changes), 404 if no such node runs."""
    return await _answer_of(page, node, "change", change=wanted.options)


async def _answer_of(page: Page, node: str, command: str, **arguments: Any) -> dict[str, Any]:
    path = running_nodes(page.owner.home).get(node)
    answer = None if path is None else await asyncio.to_thread(tell_node, path, command, **arguments)
    if answer is None:
        raise ApiError(404, f"no node {node!r} runs on this machine: start it with `swarmnode run`")
    if "error" in answer:
        raise ApiError(400, str(answer["error"]))
    return {"node": node, **answer}


@cache
def _cards() -> Cards:
    return Cards()


def _sensed() -> dict[str, Any]:
    """Return the temperatures of this machine; None without a sensor. Blocks for some milliseconds."""
    sensors: Any = getattr(psutil, "sensors_temperatures", dict)()  # Linux and FreeBSD only
    return {
        "card_celsius": _cards().celsius(),
        "cpu_celsius": max((each.current for name in CPU_SENSORS for each in sensors.get(name, ())), default=None),
    }
