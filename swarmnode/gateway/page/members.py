"""/api/v1/swarms/NAME/members, invites and revocations: for a swarm's owner, whose .swarm file and key are on this machine.

They do what `swarmnode members`, `invite` and `revoke` do. Each request that needs the key brings its password, which is not kept.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, Literal

from fastapi import APIRouter
from pydantic import BaseModel, Field, SecretStr

from swarmnode.client.owner_client import OwnersView, end_membership
from swarmnode.errors import UsageError
from swarmnode.gateway.page.page import OWNED, Page
from swarmnode.gateway.page.replies import MembersReply, NewInvite, RevocationReply
from swarmnode.membership.owner import InviteQr, InviteTerms, issue_invite, roles_of
from swarmnode.net.identity import SigningKey
from swarmnode.swarm.records.invite import MAX_GROUP_CHARS, MAX_INVITE_CHARS, MAX_PEER_CHARS, MAX_USES, Role
from swarmnode.swarm.storage.owner_files import (
    OWNER_SUFFIX,
    IssuedInvite,
    IssuedInvites,
    is_locked,
    issued_invites_path,
    load_owner_key,
    open_issued_invites,
)
from swarmnode.swarm.storage.swarmfile import Swarm

MAX_PASSWORD_CHARS = 1024
MAX_NOTE_CHARS = 200
YEAR_S = 365 * 86_400
MAX_LIFE_S = 100 * YEAR_S

router = APIRouter(prefix="/api/v1/swarms/{name}")


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


@router.get("/members", response_model=MembersReply)
async def members(name: str, page: Page = OWNED) -> dict[str, Any]:
    """Return the members of a swarm. If the owner's .swarm file is here, they are all that were ever seen, together with the
    invites that were issued. Only for the owner of this machine."""
    client = page.feed(name).client
    owner_client, swarm = client.as_owner(), client.swarm
    book = None if swarm.file is None else await asyncio.to_thread(_book_beside, swarm.file)
    key = None if swarm.file is None else swarm.file.with_suffix(OWNER_SUFFIX)
    keys = {"owned": key is not None and key.is_file(), "locked": key is not None and is_locked(key)}
    view = await OwnersView.read(swarm, book, owner_client)
    usual = {field: InviteCommand.model_fields[field].default for field in ("role", "life_s", "uses")}
    return {**keys, "roles": [role.name.lower() for role in roles_of(swarm)], "usual": usual, **view.told()}


@router.post("/invites", response_model=NewInvite)
async def invite(name: str, wanted: InviteCommand, page: Page = OWNED) -> dict[str, Any]:
    """Create an invite to a private swarm. Only for the swarm's owner."""
    swarm = page.feed(name).client.swarm
    async with page.book_lock:
        line, guest = await asyncio.to_thread(_issue, swarm, wanted)
    return {**guest.told(), "invite": line, "qr": _qr_picture(line)}


@router.post("/revocations", response_model=RevocationReply)
async def revoke(name: str, wanted: RevokeCommand, page: Page = OWNED) -> dict[str, Any]:
    """End a membership for good, or an invite and all memberships that came from it. Only for the swarm's owner."""
    client = page.feed(name).client
    swarm, owner_client = client.swarm, client.as_owner()
    owner = await asyncio.to_thread(_unlock, swarm, wanted.password)
    await owner_client.refresh()
    async with page.book_lock:
        book = await asyncio.to_thread(_book_beside, _owners_file(swarm))
        ended = (await OwnersView.read(swarm, book, owner_client)).find(wanted.who)
        told = await end_membership(swarm, owner, book, owner_client, ended)
    return {**ended.told(), "told": told}


def _issue(swarm: Swarm, wanted: InviteCommand) -> tuple[str, IssuedInvite]:
    owner = _unlock(swarm, wanted.password)
    return issue_invite(swarm, owner, wanted.terms(), _book_beside(_owners_file(swarm)))


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


def _book_beside(file: Path) -> IssuedInvites:
    return open_issued_invites(issued_invites_path(file))


def _qr_picture(line: str) -> dict[str, Any] | None:
    try:
        code = InviteQr(line)
    except ValueError:
        return None
    return {"size": code.size, "path": code.svg_path()}
