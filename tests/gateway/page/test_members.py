"""What a swarm's owner does on the page: who belongs, invites, revocations. Over a private swarm in virtual time."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
import segno

from swarmnode.errors import NotAdmitted
from swarmnode.gateway.app import build_app
from swarmnode.gateway.gateway import Gateway
from swarmnode.gateway.page.page import HEADER, Page
from swarmnode.membership.owner import HOST_NOTE, QUIET_ZONE, InviteQr, with_host_grant
from swarmnode.net.identity import Identity
from swarmnode.swarm.records.manifest import PRIVATE
from swarmnode.swarm.storage.owner_files import IssuedInvites, issued_invites_path, open_issued_invites, save_owner_key
from swarmnode.swarm.storage.swarmfile import save_swarm
from tests.gateway.conftest import MODEL, Served, serving
from tests.gateway.in_process import InProcess
from tests.gateway.speaking import save_speaking_llama
from tests.net.virtual import in_virtual_time
from tests.node.conftest import Founded
from tests.swarm.society import OWNER, STRANGER

PASSWORD = "correct horse"
MARKUP = "<img src=x onerror=alert(1)>"
SWARM = f"/api/v1/swarms/{MODEL}"
MEMBERS, INVITES, REVOCATIONS = f"{SWARM}/members", f"{SWARM}/invites", f"{SWARM}/revocations"


@pytest.fixture(scope="session")
def private(tmp_path_factory: pytest.TempPathFactory) -> Founded:
    """Of a private swarm; its owner's key and book lie beside its file."""
    model, folder = tmp_path_factory.mktemp("model"), tmp_path_factory.mktemp("private")
    save_speaking_llama(model)
    founded = Founded.on(model, folder, membership=PRIVATE, owner=OWNER)
    book = IssuedInvites(issued_invites_path(founded.file))
    save_swarm(with_host_grant(founded.swarm, OWNER, book), founded.file)
    book.save()
    save_owner_key(OWNER, founded.file.with_suffix(".owner"), PASSWORD)
    return founded


@contextlib.asynccontextmanager
async def owned(private: Founded, folder: Path) -> AsyncIterator[Served]:
    """A gateway on the owner's machine; whoever asks by its `http` has the token."""
    for suffix in (".owner", ".guests"):
        shutil.copy2(private.file.with_suffix(suffix), folder / f"virtual{suffix}")
    async with serving(private, folder) as served:
        served.http.headers[HEADER] = served.page.owner.token
        yield served


async def told(served: Served, path: str, **body: Any) -> Any:
    """The answer to a command of the owner."""
    answer = await send(served.http, path, **body)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def send(http: httpx2.AsyncClient, path: str, **body: Any) -> httpx2.Response:
    """A command, with the right password where the body has no other; characters go as JSON escapes."""
    content = json.dumps({"password": PASSWORD, **body})
    return await http.post(path, content=content, headers={"content-type": "application/json"})


async def sentence(answer: httpx2.Response, status: int = 400) -> str:
    """What a refusal says, in one line."""
    assert answer.status_code == status, answer.text
    message: str = answer.json()["error"]["message"]
    assert "\n" not in message and PASSWORD not in message
    return message


@in_virtual_time
async def test_who_is_invited_on_the_page_joins_is_seen_and_is_revoked(private: Founded, tmp_path: Path) -> None:
    async with owned(private, tmp_path) as served:
        made = await told(served, INVITES, uses=1, life_s=86_400, group="berlin", note=MARKUP)
        assert made["role"] == "volunteer" and made["uses"] == 1 and made["qr"]["path"].startswith("M")
        guest = served.swarm.node(MARKUP, "0:4", swarm=made["invite"])
        await guest.wait_for("ready")
        seen: dict[str, Any] = {}
        while made["id"] not in seen:
            await served.client.changed()
            picture = (await served.http.get(MEMBERS)).json()
            seen = {member["invite"]: member for member in picture["members"]}
        assert picture["owned"] and picture["locked"] and picture["membership"] == PRIVATE
        assert picture["roles"] == ["client", "bootstrap", "volunteer"], "no one trains in a swarm that serves"
        assert picture["usual"] == {"role": "volunteer", "life_s": 365 * 86_400, "uses": 1}, "as `swarmnode invite`"
        member = seen[made["id"]]
        assert (member["name"], member["note"], member["group"]) == (MARKUP, MARKUP, "berlin")
        assert [each["peer"] for each in member["peers"]] == [guest.peer] and not member["revoked"]
        assert [(each["note"], each["used"]) for each in picture["invites"]] == [(HOST_NOTE, 2), (MARKUP, 1)]
        ended = await told(served, REVOCATIONS, who=guest.peer)
        assert ended["invites"] == [made["id"]] and ended["peers"] == [] and ended["told"] >= 2
        with pytest.raises(NotAdmitted):
            await guest.task
        ended = await told(served, REVOCATIONS, who=made["id"][:8])
        assert ended["invites"] == [made["id"]] and ended["told"] >= 2
        picture = (await served.http.get(MEMBERS)).json()
        assert {each["note"]: each["revoked"] for each in picture["members"]}[MARKUP], "it stays in the book"
        assert [each["revoked"] for each in picture["invites"]] == [False, True]
        book = open_issued_invites(served.swarm.file)
        assert book.revocations and PASSWORD.encode() not in book.path.read_bytes(), "kept for when nobody is online"


@in_virtual_time
async def test_a_key_without_a_password_needs_none(private: Founded, tmp_path: Path) -> None:
    async with owned(private, tmp_path) as served:
        save_owner_key(OWNER, tmp_path / "virtual.owner", "")
        picture = (await served.http.get(MEMBERS)).json()
        assert picture["owned"] and not picture["locked"]
        made = await told(served, INVITES, password="", uses=1)
        ended = await told(served, REVOCATIONS, password="", who=made["id"])
        assert ended["invites"] == [made["id"]]


@in_virtual_time
async def test_what_the_owner_cannot_have_is_told_in_a_sentence(private: Founded, tmp_path: Path) -> None:
    async with owned(private, tmp_path) as served:
        http, key = served.http, tmp_path / "virtual.owner"
        for path, body in ((INVITES, {}), (REVOCATIONS, {"who": "nobody"})):
            assert "password is wrong" in await sentence(await send(http, path, **body, password="guess"))
            assert "needs a password" in await sentence(await send(http, path, **body, password=""))
            assert "password" in await sentence(await http.post(path, json=body))
        assert "neither a member of virtual nor an invite" in await sentence(
            await send(http, REVOCATIONS, who="nobody")
        )
        assert "peer id" in await sentence(await send(http, INVITES, peer="me"))
        for bad in (
            {"role": "king"},
            {"role": "trainer"},
            {"uses": -1},
            {"uses": 5000},
            {"life_s": 0},
            {"life_s": 10**12},
            {"group": "x" * 25},
            {"group": "a\nb"},
            {"note": "x" * 201},
            {"note": "\ud800"},
            {"password": "x" * 2000},
            {"password": "\ud800"},
        ):
            await sentence(await send(http, INVITES, **bad))
        for name, who in (
            ("too much", "x" * 9000),
            ("nothing", ""),
            ("half an invite", "swarm2abc"),
            ("text", "\ud800"),
        ):
            assert await sentence(await send(http, REVOCATIONS, who=who)), name
        assert "no swarm" in await sentence(await send(http, "/api/v1/swarms/other/invites"), 404)
        key.unlink()
        save_owner_key(STRANGER, key, PASSWORD)
        for path, body in ((INVITES, {}), (REVOCATIONS, {"who": Identity.generate().peer_id})):
            assert "not the key of the owner" in await sentence(await send(http, path, **body))
        key.unlink()
        assert "only the swarm's owner" in await sentence(await send(http, INVITES))
        picture = (await served.http.get(MEMBERS)).json()
        assert not picture["owned"] and len(picture["invites"]) == 1 and not picture["invites"][0]["revoked"]


@in_virtual_time
async def test_nobody_else_sees_or_changes_who_belongs(private: Founded, tmp_path: Path) -> None:
    async with owned(private, tmp_path) as served:
        token = served.http.headers.pop(HEADER)
        for more in ({}, {HEADER: "guessed"}, {HEADER: token, "x-forwarded-for": "203.0.113.7"}):
            for answer in (
                await served.http.get(MEMBERS, headers=more),
                await served.http.post(INVITES, headers=more, json={"password": PASSWORD}),
                await served.http.post(REVOCATIONS, headers=more, json={"password": PASSWORD, "who": "a"}),
            ):
                assert answer.status_code == 403
        assert len(open_issued_invites(served.swarm.file).guests) == 1


@in_virtual_time
async def test_a_member_who_is_not_the_owner_sees_members_and_changes_nothing(private: Founded, tmp_path: Path) -> None:
    async with owned(private, tmp_path) as served:
        line = (await told(served, INVITES, role="client"))["invite"]
        async with served.swarm.client(line) as client:
            gateway = Gateway({MODEL: client})
            page = Page(gateway, tmp_path / "members")
            headers = {HEADER: page.owner.token}
            transport = InProcess(build_app(gateway, page))
            async with httpx2.AsyncClient(transport=transport, base_url="http://localhost", headers=headers) as http:
                picture = (await http.get(MEMBERS)).json()
                assert not picture["owned"] and picture["invites"] == [] and picture["members"]
                for path, body in ((INVITES, {}), (REVOCATIONS, {"who": "a"})):
                    assert "start the gateway with the .swarm file" in await sentence(await send(http, path, **body))


@in_virtual_time
async def test_a_swarm_without_an_owner_has_no_members(founded: Founded, tmp_path: Path) -> None:
    async with serving(founded, tmp_path) as served:
        served.http.headers[HEADER] = served.page.owner.token
        assert "has no owner" in await sentence(await served.http.get(MEMBERS))
        for path, body in ((INVITES, {}), (REVOCATIONS, {"who": "a"})):
            await sentence(await send(served.http, path, **body))


def test_the_picture_of_an_invite_is_its_qr_code() -> None:
    code, expected = InviteQr("swarm2abc234"), segno.make_qr("SWARM2ABC234", error="l").matrix
    dark = {
        (int(y), int(x) + step)
        for x, y, width in re.findall(r"M(\d+) (\d+)h(\d+)v1h-\3z", code.svg_path())
        for step in range(int(width))
    }
    side = len(expected)
    assert code.size == side + 2 * QUIET_ZONE
    wanted = {(y + QUIET_ZONE, x + QUIET_ZONE) for y in range(side) for x in range(side) if expected[y][x]}
    assert dark == wanted
    with pytest.raises(ValueError):
        InviteQr("a" * 5000)
