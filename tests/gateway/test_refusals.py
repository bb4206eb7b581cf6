"""Requests that cannot be answered: each in OpenAI's shape with the right status, and nothing computed for it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import openai
import pytest

from swarmnode.gateway.access.keys import KeyFile, new_key
from swarmnode.gateway.gateway import Gateway
from swarmnode.gateway.http.api_error import ApiError
from swarmnode.serving.client.limits import ModelLimits
from tests.gateway.conftest import MODEL, Served, found_on, serving
from tests.gateway.speaking import save_speaking_llama
from tests.net.virtual import in_virtual_time
from tests.node.conftest import Founded

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
FULL = {"cache_tokens": 2048, "max_cache_tokens": 2048, "cost_s": lambda _item: 0.1}  # with one long text
HI = [{"role": "user", "content": "hi"}]
IMAGE = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]


OVERLAPPING = {"type": "object", "patternProperties": {"^a": {"type": "string"}, "^ab": {"type": "integer"}}}
TOOL = {"type": "function", "function": {"name": "count"}}


def formatted(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}


BAD: list[tuple[str, Any, int, str]] = [
    (CHAT, {"model": "gpt-4", "messages": HI}, 404, "there is no model 'gpt-4'"),
    (CHAT, {"messages": []}, 400, "messages"),
    (CHAT, {"messages": IMAGE}, 400, "only text"),
    (CHAT, {"messages": [{"role": "user", "content": None}]}, 400, "'user' has no content"),
    (
        CHAT,
        {"messages": [{"role": "user", "content": 7}]},
        400,
        "messages.0.content: Input should be a valid string; or",
    ),
    (CHAT, {"messages": [{"role": "user", "content": "\ud800"}]}, 400, r"'\ud800' in it is half of a character"),
    (CHAT, {"messages": HI, "model": "\ud800"}, 404, "there is no model"),
    (CHAT, {"messages": [{"role": "wizard", "content": "hi"}]}, 400, "who is wizard?"),
    (CHAT, {"messages": HI, "n": 0}, 400, "n:"),
    (CHAT, {"messages": HI, "n": 10_000}, 400, "at most"),
    (CHAT, {"messages": HI, "stop": ["x"] * 99}, 400, "stop strings"),
    (CHAT, {"messages": HI, "temperature": -1}, 400, "temperature"),
    (CHAT, {"messages": HI, "top_p": 0}, 400, "top_p"),
    (CHAT, {"messages": HI, "min_p": 1.5}, 400, "min_p"),
    (CHAT, {"messages": HI, "frequency_penalty": 2.1}, 400, "frequency_penalty"),
    (CHAT, {"messages": HI, "repetition_penalty": 0}, 400, "repetition_penalty"),
    (CHAT, {"messages": HI, "logit_bias": {"1": 101}}, 400, "logit_bias.1: Input"),
    (CHAT, {"messages": HI, "logit_bias": {"-1": 1}}, 400, "logit_bias.-1: Input"),
    (CHAT, {"messages": HI, "temperature": float("nan")}, 400, "temperature"),
    (CHAT, {"messages": HI, "top_k": 1 << 40}, 400, "top_k"),
    (CHAT, {"messages": HI, "top_logprobs": 3}, 400, "logprobs: true"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "text"}]}]}, 400, "'text' has no text"),
    (CHAT, {"messages": HI, "logit_bias": {"512": 1}}, 400, "vocabulary"),
    (CHAT, {"messages": HI, "logit_bias": {"hen": 1}}, 400, "logit_bias"),
    (CHAT, {"messages": HI, "logprobs": True, "top_logprobs": 21}, 400, "logprobs"),
    (CHAT, {"messages": HI, "response_format": {"type": "xml"}}, 400, "response format"),
    (CHAT, {"messages": HI, "response_format": {"type": "json_schema"}}, 400, "with a schema"),
    (CHAT, {"messages": HI, "response_format": formatted({"type": "objct"})}, 400, "Invalid type"),
    (CHAT, {"messages": HI, "response_format": formatted({"type": "string", "pattern": "(a"})}, 400, "unclosed group"),
    (CHAT, {"messages": HI, "response_format": formatted({"enum": ["x" * 9999] * 2})}, 400, "16384 bytes"),
    (CHAT, {"messages": HI, "grammar": "start: ("}, 400, "grammar"),
    (
        CHAT,
        {"messages": HI, "response_format": formatted({"patternProperties": {"a": {}, "b": {}}})},
        400,
        "not disjoint",
    ),
    (TEXT, {"prompt": "hi", "response_format": formatted({"patternProperties": {"^(?!x)": {}}})}, 400, "look-ahead"),
    (
        RESPONSES,
        {"input": "hi", "text": {"format": {"type": "json_schema", "name": "s", "schema": OVERLAPPING}}},
        400,
        "not disjoint",
    ),
    (
        MESSAGES,
        {"messages": HI, "max_tokens": 9, "output_config": {"format": {"type": "json_schema", "schema": OVERLAPPING}}},
        400,
        "not disjoint",
    ),
    (
        CHAT,
        {
            "messages": HI,
            "tool_choice": "required",
            "tools": [{"type": "function", "function": {"name": "f", "parameters": OVERLAPPING}}],
        },
        400,
        "not disjoint",
    ),
    (CHAT, {"messages": HI, "tool_choice": "required"}, 400, "tool_choice"),
    (CHAT, {"messages": HI, "max_tokens": 0}, 400, "max_tokens: Input"),
    (CHAT, {"messages": HI, "max_tokens": 1 << 40}, 400, "max_tokens: Input"),
    (CHAT, {"messages": HI, "tools": [TOOL], "tool_choice": "perhaps"}, 400, "tool_choice"),
    (CHAT, {"messages": HI, "tools": [TOOL], "tool_choice": {"function": "count"}}, 400, "tool_choice"),
    (CHAT, {"messages": HI, "tools": [TOOL], "tool_choice": {"function": {"name": "x"}}}, 400, "tool_choice"),
    (CHAT, {"messages": HI, "tools": [{"type": "retrieval"}]}, 400, "tools"),
    (CHAT, {"messages": HI, "tools": [{"function": {"name": "x", "parameters": 7}}]}, 400, "tools"),
    (CHAT, {"messages": [{"role": "tool", "content": "4", "tool_call_id": "x"}]}, 400, "belongs to no earlier call"),
    (CHAT, {"messages": HI, "chat_template_kwargs": {"chat_template": "{{ 1 }}"}}, 400, "no variable"),
    (CHAT, {"messages": HI, "chat_template_kwargs": {"messages": []}}, 400, "chat template"),
    (RESPONSES, {"input": []}, 400, "1 to 4096 items"),
    (RESPONSES, {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, 400, "only text"),
    (RESPONSES, {"input": [{"type": "item_reference", "id": "x"}]}, 404, "item_reference"),
    (RESPONSES, {"input": [{"type": "function_call", "name": "x", "arguments": "{"}]}, 400, "not JSON"),
    (RESPONSES, {"input": "hi", "tools": [{"type": "web_search"}]}, 400, "web_search"),
    (RESPONSES, {"input": "hi", "previous_response_id": "x"}, 404, "'x' not found"),
    (
        RESPONSES,
        {"input": "hi", "conversation": {"id": "x"}},
        400,
        "conversation is not supported: use previous_response_id",
    ),
    (RESPONSES, {"input": "hi", "prompt": {"id": "x"}}, 400, "prompt is not supported"),
    (
        RESPONSES,
        {"input": "hi", "background": True},
        400,
        "background is not supported: wait for the answer",
    ),
    (RESPONSES, {"input": None}, 400, "input: Input should be a valid string"),
    (MESSAGES, {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, 400, "only text"),
    (MESSAGES, {"messages": HI, "tools": [{"type": "bash_20250124", "name": "bash"}]}, 400, "bash_20250124"),
    (MESSAGES, {"messages": HI, "tool_choice": {"type": "tool"}}, 400, "tool with a name"),
    (MESSAGES, {"messages": HI, "tool_choice": {"type": "any"}}, 400, "tool_choice"),
    (TEXT, {"prompt": ""}, 400, "no tokens"),
    (TEXT, {"prompt": []}, 400, "no tokens"),
    (TEXT, {"prompt": [511, 512]}, 400, "vocabulary"),
    (TEXT, {"prompt": [-1]}, 400, "negative"),
    (TEXT, {"prompt": {"a": 1}}, 400, "prompt: Input should be a valid string; or: Input should be a valid list"),
    (TEXT, {"prompt": "hens \udfff"}, 400, "half of a character"),
    (TEXT, {"prompt": "hi", "suffix": "!"}, 400, "suffix"),
    (TEXT, "{", 400, "the body is not JSON"),
    (TEXT, '{"prompt": "hi', 400, "not JSON: Unterminated string starting at character 11"),
    (TEXT, "{}x", 400, "not JSON: Extra data at character 2"),
    (TEXT, "[" * 10_000, 400, "the request nests more than 128"),
    (TEXT, "[" * 100_000, 413, "15,000 objects and lists"),
    (TEXT, "1," * 300_000, 413, "150,000 values"),
    (TEXT, "{\xff", 400, "the body cannot be read: 'utf-8' codec"),
    ("/v1/audio/speech", {}, 404, "Not Found"),
    ("/tokenize", {}, 400, "either"),
    ("/detokenize", {"tokens": [9999]}, 400, "vocabulary"),
]


async def refused(served: Served, path: str, body: Any) -> tuple[int, str]:
    content = body if isinstance(body, str) else json.dumps(body)
    answer = await served.http.post(
        path, content=content.encode("latin-1"), headers={"content-type": "application/json"}
    )
    error = answer.json()["error"]
    assert answer.json()["type"] == "error" and set(error) == {"message", "type", "param", "code"}
    return answer.status_code, error["message"]


@in_virtual_time
async def test_what_cannot_be_is_refused_before_anything_is_computed(founded: Founded, tmp_path: Path) -> None:
    async with serving(founded, tmp_path) as served:
        before = served.computed()
        for path, body, status, words in BAD:
            told = await refused(served, path, body)
            assert (told[0], words in told[1]) == (status, True), (path, body, told)
        assert (served.computed(), served.sessions()) == (before, 0)
        with pytest.raises(openai.NotFoundError):
            await served.openai.chat.completions.create(model="gpt-4", messages=HI)


@in_virtual_time
async def test_a_conversation_longer_than_the_model_is_refused_before_any_prefill(
    founded: Founded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def limits() -> ModelLimits:
        return ModelLimits(vocabulary=512, positions=64)

    async with serving(founded, tmp_path) as served:
        monkeypatch.setattr(served.client, "limits", limits)  # a model with a table of positions
        before = served.computed()
        with pytest.raises(openai.BadRequestError, match="64 positions") as refusal:
            await served.openai.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "q" * 80}])
        assert refusal.value.code == "context_length_exceeded" and served.computed() == before
        with pytest.raises(openai.BadRequestError, match="ask for at most"):
            await served.openai.responses.create(model=MODEL, input="hi", max_output_tokens=100_000)
        assert served.computed() == before
        rest = await served.openai.chat.completions.create(model=MODEL, messages=HI)
        assert rest.usage.total_tokens == 65, "the last token takes no position"


@in_virtual_time
async def test_of_several_models_one_has_to_be_named(founded: Founded, tmp_path: Path) -> None:
    async with serving(founded, tmp_path) as served:
        gateway = Gateway({"hens": served.client, "foxes": served.client})
        with pytest.raises(ApiError, match="the request names no model: choose one of hens, foxes"):
            gateway.model("")
        with pytest.raises(ApiError, match="there is no model 'wolves' here: choose one of hens, foxes"):
            gateway.model("wolves")


@in_virtual_time
async def test_a_model_without_a_template_says_so(tmp_path: Path) -> None:
    model = tmp_path / "model"
    save_speaking_llama(model, chat_template=None)
    async with serving(found_on(model, tmp_path / "founded"), tmp_path) as served:
        with pytest.raises(openai.BadRequestError, match="has no chat template") as refusal:
            await served.openai.chat.completions.create(model=MODEL, messages=HI)
        assert refusal.value.code == "no_chat_template"
        assert (await served.openai.completions.create(model=MODEL, prompt="hi", max_tokens=2)).usage.total_tokens == 3


@in_virtual_time
async def test_a_full_swarm_says_when_to_come_again(founded: Founded, tmp_path: Path) -> None:
    async with serving(founded, tmp_path, stage=FULL, patience_s=1.0) as served:
        stream = await served.openai.completions.create(model=MODEL, prompt="hens", max_tokens=1000, stream=True)
        with pytest.raises(openai.RateLimitError) as refusal:
            await served.openai.completions.create(model=MODEL, prompt="hens", max_tokens=1000)
        assert int(refusal.value.response.headers["retry-after"]) >= 1
        await stream.close()
        with pytest.raises(openai.BadRequestError, match="no machine") as refusal:
            await served.openai.completions.create(model=MODEL, prompt="hens", max_tokens=4000)
        assert refusal.value.code == "context_length_exceeded"
        assert (await served.openai.completions.create(model=MODEL, prompt="hens", max_tokens=8)).choices[0].text


@in_virtual_time
async def test_heads_alone_and_methods_that_are_not_there(founded: Founded, tmp_path: Path) -> None:
    async with serving(founded, tmp_path) as served:
        assert [(await served.http.head(path)).status_code for path in ("/health", "/v1/models", "/v1/x")] == [
            200,
            200,
            404,
        ]
        told = await served.http.get(CHAT)
        assert (told.status_code, told.headers["allow"]) == (405, "POST") and told.json()["error"]["message"]


@in_virtual_time
async def test_without_a_key_of_the_file_nobody_asks(founded: Founded, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    alice, bob = new_key(file, "alice"), new_key(file, "bob")
    assert file.stat().st_mode & 0o777 == 0o600 and alice not in file.read_text()
    file.write_text(file.read_text().strip() + " per_minute=2\n")
    async with serving(founded, tmp_path, keys=KeyFile(file), api_key=alice) as served:
        assert (await served.openai.models.list()).data[0].id == MODEL
        for key in ("", "sk-swarmnode-wrong"):
            with pytest.raises(openai.AuthenticationError):
                await served.openai.with_options(api_key=key or "none").models.list()
        for _ in range(2):
            await served.openai.with_options(api_key=bob).models.list()
        with pytest.raises(openai.RateLimitError, match="2 requests a minute"):
            await served.openai.with_options(api_key=bob).models.list()
        assert (await served.http.get("/v1/models", headers={"x-api-key": alice})).status_code == 200
        assert [(await served.http.get(path)).status_code for path in ("/health", "/metrics")] == [200, 401]


@in_virtual_time
async def test_bodies_are_bounded_and_pages_kept_out(founded: Founded, tmp_path: Path) -> None:
    async with serving(founded, tmp_path, max_body_bytes=10_000, origins=("https://chat.example",)) as served:

        async def pieces() -> Any:
            for _ in range(20):
                yield b" " * 1000

        for content in (b" " * 10_001, pieces()):
            assert (await served.http.post(TEXT, content=content)).status_code == 413
        assert (await served.http.get("/v1/models", headers={"host": "evil.example"})).status_code == 403
        assert (await served.http.get("/v1/models", headers={"origin": "https://evil.example"})).status_code == 403
        asks = {"origin": "https://chat.example", "access-control-request-method": "POST"}
        allowed = await served.http.options(CHAT, headers=asks)
        assert (allowed.status_code, allowed.headers["access-control-allow-origin"]) == (200, "https://chat.example")
        packed = await served.http.post(TEXT, content=b"\x1f\x8b", headers={"content-encoding": "gzip"})
        assert packed.status_code == 415 and "Content-Encoding: gzip" in packed.json()["error"]["message"]
        told = await served.http.post(TEXT, content=b'{"prompt": "hi"}', headers={"content-type": "text/plain"})
        assert told.status_code == 400 and "Content-Type: application/json" in told.json()["error"]["message"]
        answer = await served.http.get("/v1/models", headers={"origin": "https://chat.example"})
        assert answer.headers["access-control-allow-origin"] == "https://chat.example"
        assert "access-control-allow-origin" not in (await served.http.get("/v1/models")).headers


@in_virtual_time
async def test_no_answer_is_taken_for_another_kind_than_it_says(founded: Founded, tmp_path: Path) -> None:
    async with serving(founded, tmp_path) as served:
        for path in (
            "/v1/models",
            "/health",
            "/metrics",
            "/",
            "/page/none",
            "/api/v1/swarms",
            "/openapi.json",
            "/v1/x",
        ):
            assert (await served.http.get(path)).headers["x-content-type-options"] == "nosniff", path
        for body in ("{", json.dumps({"prompt": "hens", "max_tokens": 2, "stream": True})):
            answer = await served.http.post(TEXT, content=body, headers={"content-type": "application/json"})
            assert answer.headers["x-content-type-options"] == "nosniff"
        refused = await served.http.get("/v1/models", headers={"host": "evil.example"})
        assert (refused.status_code, refused.headers["x-content-type-options"]) == (403, "nosniff")


@in_virtual_time
async def test_a_grammar_that_takes_too_long_is_the_request_s_fault_and_says_so(
    founded: Founded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(founded, tmp_path) as served:
        monkeypatch.setattr("swarmnode.compute.serving.grammar.BURST_S", -1.0)
        answer = await served.http.post(CHAT, json={"messages": HI, "max_tokens": 9, "grammar": 'start: "hen"+'})
        assert answer.status_code == 400, answer.text
        assert "grammar" in answer.json()["error"]["message"], answer.text
        assert await served.freed()
