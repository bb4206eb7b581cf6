"""Endpoints of the page: the swarms that this gateway serves; this machine and its nodes, for the machine's owner; members, invites
and revocations, for a swarm's owner; and the page's static files, from the package, which hold no secrets and so need no key.

The endpoints of members do what `swarmnode members`, `invite` and `revoke` do. Each request that needs the key brings its password,
which is not kept.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import AsyncGenerator
from functools import cache
from importlib import resources
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal, NamedTuple

import psutil
from fastapi import APIRouter, Request
from pydantic import BaseModel, Field, SecretStr, StringConstraints
from starlette.responses import Response

from swarmnode.client.owner_client import OwnersView, end_membership
from swarmnode.errors import UsageError
from swarmnode.gateway.gateway import gateway_of
from swarmnode.gateway.http.api_error import ApiError
from swarmnode.gateway.http.body_route import Items, at_most
from swarmnode.gateway.http.event_stream import EventStream
from swarmnode.gateway.page.page import OWNED, Page, page_of
from swarmnode.gateway.page.page_replies import (
    ChangeReply,
    HistoryReply,
    LendingOptionsReply,
    LinksReply,
    MachineReply,
    MembersReply,
    NewInvite,
    NodeReply,
    RevocationReply,
    SwarmList,
    SwarmReply,
)
from swarmnode.lending.cards import Cards
from swarmnode.lending.control import running_nodes, tell_node
from swarmnode.membership.owner import InviteQr, InviteTerms, issue_invite, roles_of
from swarmnode.net.identity import SigningKey
from swarmnode.swarm.records.invite import MAX_GROUP_CHARS, MAX_INVITE_CHARS, MAX_PEER_CHARS, MAX_USES, Role
from swarmnode.swarm.storage.owner_files import (
    OWNER_SUFFIX,
    IssuedInvite,
    is_locked,
    load_owner_key,
    open_issued_invites,
)
from swarmnode.swarm.storage.swarmfile import Swarm

router = APIRouter(prefix="/api/v1")
MAX_LINKS = 48  # peers in the matrix


@router.get("/swarms")
async def list_swarms(request: Request) -> SwarmList:
    """Return the names of the swarms, each also the name of a model of the API."""
    return SwarmList(swarms=page_of(request).names)


@router.get("/swarms/{name}", response_model=SwarmReply)
async def one_swarm(name: str, request: Request) -> dict[str, Any]:
    """Return the present state of one swarm."""
    return page_of(request).feed(name).picture()


@router.get("/swarms/{name}/events", response_class=Response)
async def swarm_events(name: str, request: Request) -> Response:
    """Stream the state of one swarm as server-sent events: `swarm` with all of it, then `changes` with the values and peers that
    changed and the ids of peers that are `gone`."""
    return await _streamed(request, page_of(request).feed(name).events())


@router.get("/swarms/{name}/sessions/{trace}/events", response_class=Response)
async def session_events(name: str, trace: str, request: Request) -> Response:
    """Stream which machines generate a text, as server-sent events: `session` after each change, then `over`. `trace` is the
    answer's id without its prefix."""
    return await _streamed(request, page_of(request).feed(name).session_events(trace))


async def _streamed(request: Request, events: AsyncGenerator[bytes, None]) -> Response:
    await request.body()  # it is empty; the client's next message is its disconnection
    return await EventStream.begin(request, events, write_timeout_s=gateway_of(request).config.write_timeout_s)


@router.get("/swarms/{name}/links", response_model=LinksReply)
async def links(name: str, request: Request) -> dict[str, Any]:
    """Return the delays and bandwidths between the machines that hold layers (units), for at most 48 of them."""
    return page_of(request).feed(name).client.links(MAX_LINKS)


@router.get("/swarms/{name}/history")
async def history(name: str, request: Request) -> HistoryReply:
    """Return the history of the last hour."""
    return page_of(request).feed(name).history.reply()


MAX_REASON_CHARS = 200
MAX_OPTIONS, MAX_ITEMS, MAX_OPTION_CHARS = 32, 32, 100
CPU_SENSORS = ("coretemp", "k10temp", "zenpower", "cpu_thermal")  # of Intel, AMD and ARM, as Linux names them

OptionText = Annotated[str, StringConstraints(max_length=MAX_OPTION_CHARS)]
OptionList = Annotated[Items[OptionText], Field(max_length=MAX_ITEMS)]


Options = Annotated[
    dict[OptionText, OptionText | bool | OptionList],
    at_most(MAX_OPTIONS, f"at most {MAX_OPTIONS} options may change at once"),
]


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


@router.get("/machine", response_model=MachineReply)
async def nodes(page: Page = OWNED) -> dict[str, Any]:
    """Return this machine's temperatures, what its nodes lend, what they do now and why, and what they have
    contributed."""
    found, machine = await asyncio.gather(asyncio.to_thread(page.nodes), asyncio.to_thread(_sensed))
    return {"nodes": [{"node": node, **answer} for node, answer in found.items()], **machine}


@router.post("/machine/{node}", response_model=NodeReply)
async def tell(node: str, wanted: NodeCommand, page: Page = OWNED) -> dict[str, Any]:
    """Let a node pause, finish its work, or resume. Returns at once; `GET /api/v1/machine` shows the progress. Raises ApiError
    (404) if no such node runs."""
    told = wanted.model_dump(exclude_none=True)
    return await _answer_of(page, node, told.pop("command"), **told)


@router.get("/machine/{node}/options", response_model=LendingOptionsReply)
async def options(node: str, page: Page = OWNED) -> dict[str, Any]:
    """Return the limits and rules that a node lends by. Raises ApiError (404) if no such node runs."""
    return await _answer_of(page, node, "options")


@router.post("/machine/{node}/options", response_model=ChangeReply)
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


MAX_PASSWORD_CHARS = 1024
MAX_NOTE_CHARS = 200
YEAR_S = 365 * 86_400
MAX_LIFE_S = 100 * YEAR_S


class InviteCommand(BaseModel):
    """Terms of a new invite, with the defaults of `swarmnode invite`. `life_s` null means forever, `uses` 0 any number of machines,
    `peer` empty any peer. `note` is for the owner's own list. `password` opens the owner's key."""

    password: SecretStr = Field(max_length=MAX_PASSWORD_CHARS)
    role: Literal["client", "bootstrap", "volunteer", "trainer"] = "volunteer"
    life_s: int | None = Field(YEAR_S, ge=1, le=MAX_LIFE_S)
    uses: int = Field(1, ge=0, le=MAX_USES)
    peer: str = Field("", max_length=MAX_PEER_CHARS)
    group: str = Field("", max_length=MAX_GROUP_CHARS)
    note: str = Field("", max_length=MAX_NOTE_CHARS)

    def terms(self) -> InviteTerms:
        """Return the invite's terms."""
        return InviteTerms(Role[self.role.upper()], self.life_s, self.uses, self.peer, self.group, self.note)


class RevokeCommand(BaseModel):
    """Membership or invite to end. `who` is a member's name, the note of its invite, a peer's id or the end of the id; or an
    invite, or the beginning of its id. `password` opens the owner's key."""

    password: SecretStr = Field(max_length=MAX_PASSWORD_CHARS)
    who: str = Field(min_length=1, max_length=MAX_INVITE_CHARS)


@router.get("/swarms/{name}/members", response_model=MembersReply)
async def members(name: str, page: Page = OWNED) -> dict[str, Any]:
    """Return the members of a swarm. If the owner's .swarm file is here, they are all that were ever seen, together with the
    invites that were issued. Only for the owner of this machine."""
    client = page.feed(name).client
    owner_client, swarm = client.as_owner(), client.swarm
    book = None if swarm.file is None else await asyncio.to_thread(open_issued_invites, swarm.file)
    key = None if swarm.file is None else swarm.file.with_suffix(OWNER_SUFFIX)
    keys = {"owned": key is not None and key.is_file(), "locked": key is not None and is_locked(key)}
    view = await OwnersView.read(swarm, book, owner_client)
    usual = {field: InviteCommand.model_fields[field].default for field in ("role", "life_s", "uses")}
    return {**keys, "roles": [role.name.lower() for role in roles_of(swarm)], "usual": usual, **view.to_json()}


@router.post("/swarms/{name}/invites", response_model=NewInvite)
async def invite(name: str, wanted: InviteCommand, page: Page = OWNED) -> dict[str, Any]:
    """Create an invite to a private swarm. Only for the swarm's owner."""
    swarm = page.feed(name).client.swarm
    async with page.book_lock:
        line, guest = await asyncio.to_thread(_issue, swarm, wanted)
    picture = None
    with contextlib.suppress(ValueError):  # too long for a QR code
        code = InviteQr(line)
        picture = {"size": code.size, "path": code.svg_path()}
    return {**guest.terms(), "invite": line, "qr": picture}


@router.post("/swarms/{name}/revocations", response_model=RevocationReply)
async def revoke(name: str, wanted: RevokeCommand, page: Page = OWNED) -> dict[str, Any]:
    """End a membership for good, or an invite and all memberships that came from it. Only for the swarm's owner."""
    client = page.feed(name).client
    swarm, owner_client = client.swarm, client.as_owner()
    owner = await asyncio.to_thread(_unlock, swarm, wanted.password)
    await owner_client.refresh()
    async with page.book_lock:
        book = await asyncio.to_thread(open_issued_invites, _owners_file(swarm))
        ended = (await OwnersView.read(swarm, book, owner_client)).find(wanted.who)
        told = await end_membership(swarm, owner, book, owner_client, ended)
    return {**ended.to_json(), "told": told}


def _issue(swarm: Swarm, wanted: InviteCommand) -> tuple[str, IssuedInvite]:
    owner = _unlock(swarm, wanted.password)
    return issue_invite(swarm, owner, wanted.terms(), open_issued_invites(_owners_file(swarm)))


def _unlock(swarm: Swarm, password: SecretStr) -> SigningKey:
    """Return the owner's key. Opening it is slow by design, to slow down guessing. Raises UsageError if the password or the file is
    wrong."""
    path = _owners_file(swarm).with_suffix(OWNER_SUFFIX)
    return load_owner_key(path, password.get_secret_value() or None)


def _owners_file(swarm: Swarm) -> Path:
    if swarm.file is None:
        raise UsageError(
            f"only the owner of {swarm.name} can do this: start the gateway with the .swarm file that has the owner's key beside it"
        )
    return swarm.file


files = APIRouter(include_in_schema=False)
INDEX = "index.html"
MEDIA_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
HEADERS = {
    # Only scripts and styles of this gateway run, and no text becomes markup (`trusted-types 'none'`), wherever it slipped in.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'",
    "Cache-Control": "no-cache",  # the browser checks each time for a newer file
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
}


class StaticFile(NamedTuple):
    """File of the page. `tag` is its ETag, a hash of the content."""

    content: bytes
    media_type: str
    tag: str


FILES: dict[str, StaticFile] = {}
for _file in resources.files(__package__).joinpath("static").iterdir():
    _content = _file.read_bytes()
    _tag = f'"{hashlib.sha256(_content).hexdigest()[:16]}"'
    FILES[_file.name] = StaticFile(_content, MEDIA_TYPES[PurePosixPath(_file.name).suffix], _tag)


@files.get("/")
async def index(request: Request) -> Response:
    """Return the page."""
    return _file_answer(request, INDEX)


@files.get("/page/{name}")
async def static_file(name: str, request: Request) -> Response:
    """Return a script, a style or a picture of the page."""
    return _file_answer(request, name)


def _file_answer(request: Request, name: str) -> Response:
    file = FILES.get(name)
    if file is None:
        raise ApiError(404, f"the page has no file {name!r}: reload the page")
    headers = {**HEADERS, "ETag": file.tag}
    if request.headers.get("if-none-match") == file.tag:
        return Response(status_code=304, headers=headers)
    return Response(file.content, media_type=file.media_type, headers=headers)
