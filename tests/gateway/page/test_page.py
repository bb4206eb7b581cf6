"""What feeds the page, over a swarm in virtual time."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from datetime import time
from pathlib import Path
from typing import Any

import httpx2
import pytest

from swarmnode.cli.options.node_file import LendingOptions
from swarmnode.cli.options.node_options import read_rules
from swarmnode.gateway.access.keys import KeyFile, new_key
from swarmnode.gateway.app import build_app
from swarmnode.gateway.gateway import Gateway
from swarmnode.gateway.page import page as feed
from swarmnode.gateway.page.page import FILE, HEADER, OwnerAccess, Page
from swarmnode.lending.control import ControlServer
from swarmnode.lending.lending import Hours, Lending, LendingEvent, Rules
from swarmnode.node.node import Node
from swarmnode.node.node_config import NodeConfig
from swarmnode.peer.host_config import HostConfig
from swarmnode.swarm.storage.swarmfile import Swarm
from tests.contrib.script import CONTRIB, load
from tests.gateway.conftest import MODEL, Served, serving
from tests.gateway.in_process import InProcess
from tests.lending.test_control import server_of
from tests.net.virtual import in_virtual_time
from tests.node.conftest import Founded

HALVES = {"a": "0:2", "b": "2:4", "c": "2:4"}
SWARM = f"/api/v1/swarms/{MODEL}"
LONG = {"model": MODEL, "prompt": "hens", "max_tokens": 64, "temperature": 0}


@contextlib.asynccontextmanager
async def events(served: Served, path: str) -> AsyncIterator[Any]:
    """Pairs of name and what is told."""

    async def read() -> AsyncIterator[tuple[str, Any]]:
        async for line in answer.aiter_lines():
            if line.startswith("event: "):
                name = line.removeprefix("event: ")
            elif line.startswith("data: "):
                yield name, json.loads(line.removeprefix("data: "))

    async with served.http.stream("GET", path) as answer:
        assert answer.status_code == 200
        yield read()


@in_virtual_time
async def test_the_picture_is_that_of_status_without_addresses(founded: Founded, tmp_path: Path) -> None:
    async with serving(founded, tmp_path, nodes=HALVES) as served:
        assert (await served.http.get("/api/v1/swarms")).json() == {"swarms": [MODEL]}
        told = (await served.http.get(SWARM)).json()
        status = json.loads(json.dumps(served.client.status()))
        assert status.pop("addresses")
        assert told == {"id": MODEL, **status, "tokens_per_s": None, "sessions": []}
        assert {peer["name"]: peer["standing"] for peer in told["peers"]} == {"a": "good", "b": "good", "c": "good"}
        links = (await served.http.get(f"{SWARM}/links")).json()
        assert len(links["peers"]) == len(links["rtt_s"]) == len(links["bandwidth_bps"]) == 3
        assert links["rtt_s"][0][0] == 0 < links["rtt_s"][0][1]
        assert (await served.http.get("/api/v1/swarms/nobody/links")).status_code == 404


@in_virtual_time
async def test_events_tell_who_comes_and_goes_and_nothing_twice(founded: Founded, tmp_path: Path) -> None:
    async with serving(founded, tmp_path, nodes=HALVES) as served, events(served, f"{SWARM}/events") as told:
        name, swarm = await anext(told)
        assert name == "swarm" and swarm["covered"] and len(swarm["peers"]) == 3
        dead = served.swarm.members["a"].peer
        await served.swarm.members["a"].kill()
        changes: dict[str, Any] = {}
        while dead not in changes.get("gone", []):
            name, changes = await anext(told)
            assert name == "changes"
        assert changes["missing"] == [0, 1] and changes["covered"] is False and "model" not in changes


@in_virtual_time
async def test_a_text_tells_who_writes_it_and_who_took_over(founded: Founded, tmp_path: Path) -> None:
    async with serving(founded, tmp_path, nodes=HALVES) as served:
        expected = (await served.openai.completions.create(**LONG)).choices[0].text
        stream = await served.openai.completions.create(stream=True, **LONG)
        chunks = aiter(stream)
        first = await anext(chunks)
        trace = first.id.split("-")[-1]
        async with events(served, f"{SWARM}/sessions/{trace}/events") as told:
            _, session = await anext(told)
            writer = served.swarm.member(session["route"][-1]["peer"])
            assert [hop["span"] for hop in session["route"]] == [[0, 2], [2, 4]] and writer.name in "bc"
            assert (await served.http.get(SWARM)).json()["sessions"][0]["trace"] == trace
            await writer.kill()
            text = first.choices[0].text + "".join([chunk.choices[0].text async for chunk in chunks])
            heard = [event async for event in told]
        assert text == expected
        assert heard[-1] == ("over", {"trace": trace})
        last = heard[-2][1]
        assert (
            last["reroutes"] == 1 and last["faults"][0]["peer"] == writer.peer and last["tokens"] == LONG["max_tokens"]
        )
        assert served.swarm.member(last["route"][-1]["peer"]).name in {"b", "c"} - {writer.name}
        assert (await served.http.get(SWARM)).json()["sessions"] == []
        assert (await served.http.get(f"{SWARM}/sessions/{trace}/events")).status_code == 404


@in_virtual_time
async def test_who_has_a_key_hears_of_no_others_texts(founded: Founded, tmp_path: Path) -> None:
    alice = new_key(tmp_path / "keys", "alice")
    async with serving(founded, tmp_path, keys=KeyFile(tmp_path / "keys"), api_key=alice) as served:
        assert (await served.http.get(SWARM)).status_code == 401
        assert (await served.http.get("/")).status_code == 200, "the page itself asks for the key"
        stream = await served.openai.completions.create(stream=True, **LONG)
        first = await anext(aiter(stream))
        bearer = {"authorization": f"Bearer {alice}"}
        assert (await served.http.get(SWARM, headers=bearer)).json()["sessions"] == []
        path = f"{SWARM}/sessions/{first.id.split('-')[-1]}/events"
        async with served.http.stream("GET", path, headers=bearer) as answer:
            assert answer.status_code == 200, "its own it knows by its trace"
        await stream.close()


@in_virtual_time
async def test_the_last_hour_is_sampled(founded: Founded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed, "KEPT", 5)
    async with serving(founded, tmp_path) as served, served.page.watching():
        await served.openai.completions.create(**LONG)
        await asyncio.sleep(feed.PERIOD_S)
        samples = (await served.http.get(f"{SWARM}/history")).json()["samples"]
        assert samples[0]["tokens_per_s"] == pytest.approx(LONG["max_tokens"] / feed.PERIOD_S)
        speed = (await served.http.get(SWARM)).json()["tokens_per_s"]
        assert speed > samples[0]["tokens_per_s"], "of a text, without the time in which none was written"
        counted = {
            f"{result}_per_s": sum(one.value for one in served.client.readings() if one.labels[1:] == (result,))
            / feed.PERIOD_S
            for result in ("accepted", "wasted")
        }
        assert counted.items() <= samples[0].items() and sum(counted.values()) > 0
        await asyncio.sleep(100)
        samples = (await served.http.get(f"{SWARM}/history")).json()["samples"]
        assert len(samples) == 5
        assert {(each["peers"], each["missing"], each["loss"]) for each in samples} == {(1, 0, None)}
        assert (await served.http.get(SWARM)).json()["tokens_per_s"] == speed, "the last known one"


@in_virtual_time
async def test_streams_end_with_the_gateway(founded: Founded, tmp_path: Path) -> None:
    async with serving(founded, tmp_path) as served:
        async with served.page.watching():
            opened = events(served, f"{SWARM}/events")
            told = await opened.__aenter__()
            assert (await anext(told))[0] == "swarm"
        assert [event async for event in told] == []
        await opened.__aexit__(None, None, None)


async def test_the_page_holds_scripts_and_styles_of_its_own_alone(founded: Founded, tmp_path: Path) -> None:
    from swarmnode.gateway.page.endpoints import FILES

    text = "".join(file.content.decode() for file in FILES.values())
    for forbidden in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "style=", "onclick="):
        assert forbidden not in text
    assert text.count("https://") == 0 and text.replace("http://www.w3.org/2000/svg", "").count("http://") == 0


@in_virtual_time
async def test_files_are_served_with_a_strict_policy(founded: Founded, tmp_path: Path) -> None:
    async with serving(founded, tmp_path) as served:
        answer = await served.http.get("/")
        assert answer.headers["content-type"].startswith("text/html") and "<main" in answer.text
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy and "unsafe" not in policy and "frame-ancestors 'none'" in policy
        again = await served.http.get("/", headers={"if-none-match": answer.headers["etag"]})
        assert again.status_code == 304 and not again.content
        script = await served.http.get("/page/main.js")
        assert script.headers["content-type"].startswith("text/javascript")
        for path in ("/page/nothing.js", "/page/..%2Fpage.py", "/page/__init__.py"):
            assert (await served.http.get(path)).status_code == 404


@pytest.fixture
async def owned(tmp_path: Path) -> AsyncIterator[tuple[httpx2.AsyncClient, Page, Lending]]:
    """A page without a swarm, and a node's lending that takes commands over its socket."""
    gateway, lending = Gateway({}), Lending()
    lending.happened(LendingEvent.LOADED)
    page = Page(gateway, tmp_path)
    transport = InProcess(build_app(gateway, page))
    async with (
        server_of(lending).listening(tmp_path, "a"),
        httpx2.AsyncClient(transport=transport, base_url="http://localhost") as http,
    ):
        yield http, page, lending


@pytest.mark.parametrize(
    "more",
    [{}, {HEADER: "guessed"}, {HEADER: b"\xfc"}, {"x-forwarded-for": "203.0.113.7"}, {"origin": "http://evil.example"}],
)
async def test_nobody_else_sees_or_commands_this_machine(owned: Any, more: dict[str, Any]) -> None:
    http, page, lending = owned
    headers = more if HEADER in more or not more else {HEADER: page.owner.token, **more}
    for answer in (
        await http.get("/api/v1/machine", headers=headers),
        await http.post("/api/v1/machine/a", headers=headers, json={"command": "pause"}),
    ):
        assert answer.status_code == 403
    assert lending.reason == ""


async def test_the_owner_commands_this_machine(owned: Any) -> None:
    http, page, lending = owned
    owner = {HEADER: page.owner.token}
    (node,) = (await http.get("/api/v1/machine", headers=owner)).json()["nodes"]
    assert (node["node"], node["state"], node["sessions"]) == ("a", "running", 2)
    told = await http.post("/api/v1/machine/a", headers=owner, json={"command": "pause", "reason": "film"})
    assert told.json()["state"] == "draining" and told.json()["reason"] == "film"
    assert (await http.post("/api/v1/machine/b", headers=owner, json={"command": "pause"})).status_code == 404
    for bad in ({"command": "stop"}, {"command": "pause", "keep": "cloud"}, {"command": "pause", "reason": "x" * 999}):
        assert (await http.post("/api/v1/machine/a", headers=owner, json=bad)).status_code == 400
    await http.post("/api/v1/machine/a", headers=owner, json={"command": "resume"})
    assert lending.reason == ""


async def test_only_the_owner_sees_and_changes_rules(tmp_path: Path) -> None:
    node = Node(Swarm(bytes(32), "friends"), NodeConfig(HostConfig(tmp_path)))
    control = ControlServer(node.lending, asyncio.Event(), node.describe, node.why, LendingOptions(tmp_path, node))
    page = Page(Gateway({}), tmp_path)
    transport = InProcess(build_app(Gateway({}), page))
    path, owner = "/api/v1/machine/a/options", {HEADER: page.owner.token}
    async with (
        control.listening(tmp_path, "a"),
        httpx2.AsyncClient(transport=transport, base_url="http://localhost") as http,
    ):
        hours = {"options": {"hours": "22:00-07:00", "exclusive": ["blender"], "on_mains": True}}
        for headers in ({}, {HEADER: "guessed"}, {**owner, "origin": "http://evil.example"}):
            assert (await http.get(path, headers=headers)).status_code == 403
            assert (await http.post(path, headers=headers, json=hours)).status_code == 403
        assert not node.lending.rules.any and not (tmp_path / "rules.toml").exists()
        told = (await http.post(path, headers=owner, json=hours)).json()
        assert told["told"] == f"Kept in {tmp_path / 'rules.toml'} for later starts."
        assert (
            node.lending.rules
            == read_rules(tmp_path)
            == Rules(hours=Hours(time(22), time(7)), exclusive=frozenset({"blender"}), on_mains=True)
        )
        rows = {row["name"]: row for row in (await http.get(path, headers=owner)).json()["options"]}
        assert rows["hours"]["value"] == "22:00-07:00" and rows["hours"]["origin"] == f"file {tmp_path / 'rules.toml'}"
        (told,) = (await http.get("/api/v1/machine", headers=owner)).json()["nodes"]
        assert told["lends"] == {"hours": "22:00-07:00", "exclusive": ["blender"], "on_mains": True}
        for bad, sentence in (
            ({"hours": "late"}, "hours late: write the hours as 22:00-07:00"),
            ({"hours": True}, "hours = True: write a text"),
            ({"on_mains": "yes"}, "on_mains = yes: write true or false"),
            ({"exclusive": "x"}, "exclusive = x: write a list"),
            ({"hours": "a\nb"}, "hours = a\nb: write a text"),
            ({"device": "cpu"}, "there is no option 'device' to change"),
        ):
            answer = await http.post(path, headers=owner, json={"options": {"days": "mon-fri", **bad}})
            assert answer.status_code == 400 and answer.json()["error"]["message"].startswith(sentence)
        for bad in ({}, {"x" * 101: ""}, {"exclusive": ["x"] * 33}, {"hours": "x" * 101}, {"hours": 7}):
            assert (await http.post(path, headers=owner, json={"options": bad})).status_code == 400
        assert node.lending.rules.days == frozenset(), "nothing has changed"
        await http.post(path, headers=owner, json={"options": {"hours": "", "exclusive": [], "on_mains": False}})
        assert not node.lending.rules.any and (tmp_path / "rules.toml").read_text() == ""
        assert (await http.post("/api/v1/machine/b/options", headers=owner, json=hours)).status_code == 404


def test_the_owners_token_stays_and_is_private(tmp_path: Path) -> None:
    token = OwnerAccess(tmp_path / "home").token
    file = tmp_path / "home" / FILE
    assert OwnerAccess(tmp_path / "home").token == token and file.stat().st_mode & 0o777 == 0o600
    file.write_bytes(b"\xff")
    assert len(OwnerAccess(tmp_path / "home").token) >= 24, "what is damaged is drawn anew"


@pytest.mark.parametrize(("sessions", "expected"), [([], {}), ([{"trace": "t"}], {"sessions": [{"trace": "t"}]})])
def test_changes_are_what_is_new(sessions: list[Any], expected: dict[str, Any]) -> None:
    a, b = {"peer": "a", "sessions": 0}, {"peer": "b", "sessions": 0}
    before = {"name": "x", "peers": [a, b], "sessions": []}
    assert feed.changes_between(before, {**before, "sessions": sessions}) == expected
    after = {**before, "peers": [{**b, "sessions": 1}, {"peer": "c"}], "sessions": sessions}
    changes = {"peers": [{"peer": "b", "sessions": 1}, {"peer": "c"}], "gone": ["a"], **expected}
    assert feed.changes_between(before, after) == changes


async def test_made_up_swarms_have_what_the_page_asks_of_a_client(tmp_path: Path) -> None:
    """The stand-in of the benchmark is that of the tests in Chromium, which not every machine has."""
    crowd = load(CONTRIB / "benchmarks" / "page.py").Crowd(tmp_path, 3, 1)
    gateway = Gateway({"crowd": crowd})
    transport = InProcess(build_app(gateway, Page(gateway, tmp_path)))
    async with httpx2.AsyncClient(transport=transport, base_url="http://localhost") as http:
        assert [card["id"] for card in (await http.get("/v1/models")).json()["data"]] == ["crowd"]
    ((trace, session),) = crowd.running.items()
    assert feed.progress_of(trace, session)["tokens"] == 1
