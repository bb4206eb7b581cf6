"""Responses that the gateway keeps: conversations that go on from an id, and files that only their key's client can read."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

from swarmnode.errors import LocalError
from swarmnode.gateway.access.keys import ApiKey, KeyRing, _hash
from swarmnode.gateway.openai import kept_responses, responses
from swarmnode.gateway.openai.kept_responses import FOLDER, KEY_FILE, LIFE_S, Item, ItemPart, ResponseStore
from tests.gateway.conftest import MODEL, serving
from tests.gateway.scripted import says
from tests.gateway.test_other_apis import COUNT, HENS
from tests.net.virtual import in_virtual_time
from tests.node.conftest import Founded

ASK = {"model": MODEL, "max_output_tokens": 12, "temperature": 0}
HELLO = "How are the hens?"
MESSAGE = Item("msg_1", "message", "completed", "user", [ItemPart("input_text", HELLO)])
REPLY = json.dumps({"id": "resp_1", "output": []}).encode()


class Clock:
    def __init__(self) -> None:
        self.now_s = 1e9

    def __call__(self) -> float:
        return self.now_s


def files(home: Path) -> list[Path]:
    return [path for path in (home / FOLDER).rglob("*") if path.is_file()]


def said(role: str, text: str) -> dict[str, str]:
    return {"role": role, "content": text}


@in_virtual_time
async def test_a_conversation_goes_on_from_an_id(founded: Founded, tmp_path: Path) -> None:
    async with serving(founded, tmp_path) as served:
        create = served.openai.responses.create
        first = await create(input=HELLO, instructions="Be short.", metadata={"day": "one"}, **ASK)
        second = await create(input="And?", previous_response_id=first.id, **ASK)
        told = [said("user", HELLO), said("assistant", first.output_text), said("user", "And?")]
        alone = await create(input=told, store=False, **ASK)
        assert second.output_text == alone.output_text, "the instructions of the first one are not carried over"
        assert second.usage.input_tokens == alone.usage.input_tokens
        assert (second.previous_response_id, second.store, alone.store) == (first.id, True, False)
        events = [
            event async for event in await create(input="So?", previous_response_id=second.id, stream=True, **ASK)
        ]
        third = events[-1].response
        told += [said("assistant", second.output_text), said("user", "So?")]
        assert third.output_text == (await create(input=told, store=False, **ASK)).output_text
        assert len({one.output[0].id for one in (first, second, third)}) == 3

        kept = served.openai.responses
        assert (await kept.retrieve(first.id)).model_dump() == first.model_dump() and first.metadata == {"day": "one"}
        assert (await kept.retrieve(third.id)).model_dump() == third.model_dump()
        items = [item async for item in kept.input_items.list(third.id, limit=2, order="asc")]
        assert [(item.role, item.content[0].text) for item in items] == [
            (turn["role"], turn["content"]) for turn in told
        ]
        newest = await kept.input_items.list(third.id, limit=1)
        assert newest.data[0].content[0].text == "So?" and newest.data[0].content[0].type == "input_text"

        deleted = await served.http.delete(f"/v1/responses/{second.id}")
        assert deleted.json() == {"id": second.id, "object": "response", "deleted": True}
        assert (await create(input="Why?", previous_response_id=third.id, **ASK)).status == "incomplete"
        for missing in (second.id, alone.id, "resp_x", "../page-token", "x" * 2000):
            await assert_missing(served.openai, missing)


@in_virtual_time
async def test_an_item_is_sent_by_its_id(founded: Founded, tmp_path: Path) -> None:
    """Vercel's AI SDK refers to the items of the answers that it has got."""
    keys = KeyRing({_hash(name): ApiKey(name) for name in ("alice", "bob")})
    async with serving(founded, tmp_path, keys=keys, api_key="alice") as served:
        create = served.openai.responses.create
        told: list[Any] = [said("user", HELLO)]
        sent = list(told)
        for question in ("And?", "So?"):
            answer = await create(input=sent, **ASK)
            told += [said("assistant", answer.output_text), said("user", question)]
            sent += [{"type": "item_reference", "id": answer.output[0].id}, said("user", question)]
            assert (await create(input=sent, **ASK)).output_text == (await create(input=told, **ASK)).output_text
        for stranger, words in ((served.openai.with_options(api_key="bob"), "names no item"), (served.openai, "msg_x")):
            wrong = sent if words == "names no item" else [{"type": "item_reference", "id": "msg_x"}]
            with pytest.raises(openai.NotFoundError, match=words):
                await stranger.responses.create(input=wrong, **ASK)


async def assert_missing(client: openai.AsyncOpenAI, id: str) -> None:
    """Assert that the API reports a missing response in OpenAI's form."""
    for call in (client.responses.retrieve(id), client.responses.delete(id), client.responses.input_items.list(id)):
        with pytest.raises(openai.NotFoundError) as caught:
            await call
        assert caught.value.type == "invalid_request_error" or "/" in id
    with pytest.raises(openai.NotFoundError) as caught:
        await client.responses.create(input="And?", previous_response_id=id, **ASK)
    assert (caught.value.code, caught.value.param) == ("previous_response_not_found", "previous_response_id")


@in_virtual_time
async def test_a_tools_result_refers_to_an_earlier_response(
    founded: Founded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tools = [{"type": "function", "name": "count", "parameters": COUNT, "strict": False}]
    async with serving(founded, tmp_path) as served:
        tokenizer, create = await served.client.tokenizer(), served.openai.responses.create
        prompts = says(served.client, monkeypatch, f"<think>Hm.</think>Let me see. <tool_call>{HENS}</tool_call>")
        called = await create(model=MODEL, input=HELLO, tools=tools)
        call = called.output[-1]
        result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "4 hens"}
        answered = await create(model=MODEL, input=[result], previous_response_id=called.id)
        assert tokenizer.decode(prompts[-1]).endswith("4 hens\n</tool_response>") and "Let me see." in tokenizer.decode(
            prompts[-1]
        )
        items = await served.openai.responses.input_items.list(answered.id, order="asc")
        assert [item.type for item in items.data] == ["message", "message", "function_call", "function_call_output"]
        assert items.data[2].arguments == call.arguments and items.data[3].output == "4 hens"
        with pytest.raises(openai.BadRequestError, match="belongs to no earlier call"):
            await create(model=MODEL, input=[{**result, "call_id": "x"}], previous_response_id=called.id)


@in_virtual_time
async def test_no_other_key_finds_a_response(founded: Founded, tmp_path: Path) -> None:
    keys = KeyRing({_hash(name): ApiKey(name) for name in ("alice", "bob")})
    async with serving(founded, tmp_path, keys=keys, api_key="alice") as served:
        first = await served.openai.responses.create(input=HELLO, **ASK)
        await assert_missing(served.openai.with_options(api_key="bob"), first.id)
        assert (await served.openai.responses.retrieve(first.id)).id == first.id


@in_virtual_time
async def test_nothing_is_kept_if_the_client_forbids_it_or_leaves(founded: Founded, tmp_path: Path) -> None:
    async with serving(founded, tmp_path) as served:
        await served.openai.responses.create(input=HELLO, store=False, **ASK)
        async with served.http.stream("POST", "/v1/responses", json={"input": HELLO, "stream": True, **ASK}) as stream:
            await anext(stream.aiter_bytes())
        await asyncio.sleep(1.0)
        assert not (tmp_path / "page" / FOLDER).exists()


@in_virtual_time
async def test_a_full_disk_costs_the_response_only_its_memory(founded: Founded, tmp_path: Path) -> None:
    async with serving(founded, tmp_path) as served:
        (tmp_path / "page" / FOLDER).write_text("no folder")
        whole = await served.openai.responses.create(input=HELLO, **ASK)
        *_, last = [one async for one in await served.openai.responses.create(input=HELLO, stream=True, **ASK)]
        assert (whole.store, last.response.store) == (False, False) and whole.output_text == last.response.output_text


@in_virtual_time
async def test_wrong_questions_about_responses(founded: Founded, tmp_path: Path) -> None:
    async with serving(founded, tmp_path) as served:
        first = await served.openai.responses.create(input=HELLO, **ASK)
        path = f"/v1/responses/{first.id}"
        for wrong, field in (
            (f"{path}?stream=true", "stream"),
            (f"{path}/input_items?limit=0", "limit"),
            (f"{path}/input_items?order=up", "order"),
            (f"{path}/input_items?after=msg_x", "after"),
        ):
            told: httpx2.Response = await served.http.get(wrong)
            assert (told.status_code, told.json()["error"]["param"]) == (400, field)
        for field, value in (("conversation", "conv_1"), ("prompt", {"id": "p"}), ("background", True)):
            told = await served.http.post("/v1/responses", json={"input": HELLO, field: value, **ASK})
            assert (told.status_code, told.json()["error"]["param"]) == (400, field)
        for metadata in ({"a": "b" * 513}, {"a" * 65: "b"}, {"a": 1}, dict.fromkeys(map(str, range(17)), "")):
            told = await served.http.post("/v1/responses", json={"input": HELLO, "metadata": metadata, **ASK})
            assert (told.status_code, told.json()["error"]["param"]) == (400, "metadata")


def test_a_response_lives_a_day_also_over_a_restart(tmp_path: Path) -> None:
    clock = Clock()
    ResponseStore(tmp_path, clock=clock).store("alice", "resp_1", REPLY, [MESSAGE])
    again = ResponseStore(tmp_path, clock=clock)
    found = again.find("alice", "resp_1")
    assert found is not None and bytes(found.reply) == REPLY and found.conversation() == [MESSAGE]
    clock.now_s += LIFE_S + 1
    assert again.find("alice", "resp_1") is None and not again.remove("alice", "resp_1")


def test_expired_files_are_swept(tmp_path: Path) -> None:
    kept = ResponseStore(tmp_path)
    kept.sweep()
    kept.store("alice", "resp_1", REPLY, [MESSAGE])
    kept.sweep()
    assert len(files(tmp_path)) == 1
    later = ResponseStore(tmp_path, clock=lambda: files(tmp_path)[0].stat().st_mtime + LIFE_S + 1)
    later.sweep()
    assert not files(tmp_path)


def test_the_disk_tells_nothing(tmp_path: Path) -> None:
    kept = ResponseStore(tmp_path)
    kept.store("alice", "resp_1", REPLY, [MESSAGE])
    kept.store("bob", "resp_1", REPLY, [MESSAGE])
    assert kept.find("carol", "resp_1") is None and kept.find("alice", "resp_2") is None
    one, two = files(tmp_path)
    for path in (one, two, tmp_path / KEY_FILE):
        assert path.stat().st_mode & 0o777 == 0o600
    for folder in (tmp_path / FOLDER, one.parent, two.parent):
        assert folder.stat().st_mode & 0o777 == 0o700
    told = b"".join(str(path).encode() + path.read_bytes() for path in (one, two))
    assert not any(word in told for word in (b"alice", b"resp_1", b"hens"))
    one.write_bytes(two.read_bytes())
    assert sorted(kept.find(owner, "resp_1") is not None for owner in ("alice", "bob")) == [False, True]
    for damaged in (b"", b"x" * 200):
        one.write_bytes(damaged)
        two.write_bytes(damaged)
        assert kept.find("alice", "resp_1") is None and kept.find("bob", "resp_1") is None


def test_each_key_has_its_own_bounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_responses, "MOST_RESPONSES", 3)
    kept = ResponseStore(tmp_path)
    kept.store("bob", "resp_0", REPLY, [MESSAGE])
    for number in range(5):
        kept.store("alice", f"resp_{number}", REPLY, [MESSAGE])
    assert [kept.find("alice", f"resp_{number}") is not None for number in range(5)] == [False, False, True, True, True]
    assert kept.find("bob", "resp_0") is not None
    monkeypatch.setattr(kept_responses, "MOST_BYTES", files(tmp_path)[0].stat().st_size + 1)
    kept.store("alice", "resp_5", REPLY, [MESSAGE])
    assert [kept.find("alice", f"resp_{number}") is not None for number in range(6)] == [False] * 5 + [True]
    with pytest.raises(LocalError, match="are kept"):
        kept.store("alice", "resp_6", b'"' + b"x" * kept_responses.MAX_BYTES + b'"', [MESSAGE])


def test_gateways_of_one_home_share_a_key(tmp_path: Path) -> None:
    first, second = ResponseStore(tmp_path), ResponseStore(tmp_path)
    kept_responses._write_first(tmp_path / KEY_FILE, b"k" * 32)
    kept_responses._write_first(tmp_path / KEY_FILE, b"l" * 32)
    assert (tmp_path / KEY_FILE).read_bytes() == b"k" * 32 and len(list(tmp_path.iterdir())) == 1
    first.store("alice", "resp_1", REPLY, [MESSAGE])
    assert second.find("alice", "resp_1") is not None
    (tmp_path / KEY_FILE).write_bytes(b"short")
    broken = ResponseStore(tmp_path)
    assert broken.find("alice", "resp_1") is None
    with pytest.raises(LocalError, match="is no key"):
        broken.store("alice", "resp_2", REPLY, [MESSAGE])


@in_virtual_time
async def test_readings_at_once_are_bounded(founded: Founded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(founded, tmp_path) as served:
        first = await served.openai.responses.create(input=HELLO, **ASK)
        path, most = f"/v1/responses/{first.id}", 0
        find = responses._stored_response
        let_go = asyncio.Event()

        async def slow(*arguments: Any) -> Any:
            nonlocal most
            most += 1
            await let_go.wait()
            return await find(*arguments)

        monkeypatch.setattr(responses, "_stored_response", slow)
        goes_on = {"model": MODEL, "input": "And?", "previous_response_id": first.id, "max_output_tokens": 1}
        asking = [served.http.get(path) for _ in range(30)] + [
            served.http.get(f"{path}/input_items") for _ in range(30)
        ]
        asked = [asyncio.ensure_future(one) for one in [*asking, served.http.post("/v1/responses", json=goes_on)]]
        await asyncio.sleep(1)
        refused = [one.result() for one in asked if one.done()]
        assert most == responses.MOST_READINGS_OF_KEY and len(refused) == len(asked) - most
        assert all(one.status_code == 429 and int(one.headers["retry-after"]) >= 1 for one in refused)
        let_go.set()
        assert sum(one.status_code == 200 for one in await asyncio.gather(*asked)) == responses.MOST_READINGS_OF_KEY
        assert (await served.http.post("/v1/responses", json=goes_on)).status_code == 200
