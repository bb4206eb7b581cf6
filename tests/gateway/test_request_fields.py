"""Fields of other servers' requests do what they say, or are refused; and the model's own files say what a request does not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import openai
import pytest

from swarmnode.client.model_files import generation_defaults, positions_of
from swarmnode.codec.sampling import USUAL
from swarmnode.gateway.generation.request_fields import REFUSED
from swarmnode.serving.client.generation import GenerateOptions
from tests.gateway.conftest import MODEL, Served, found_on, serving
from tests.gateway.speaking import save_speaking_llama
from tests.net.virtual import in_virtual_time
from tests.node.conftest import Founded

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]
PATHS: dict[str, dict[str, Any]] = {
    TEXT: {"prompt": "hens", "max_tokens": 2},
    CHAT: {"messages": HI, "max_tokens": 2},
    "/v1/responses": {"input": "hi", "max_output_tokens": 2},
    "/v1/messages": {"messages": HI, "max_tokens": 2},
}
# As vllm 0.11's bench serve, guidellm 0.8.1 and lm_eval 0.4.13 make them; what lm_eval sent is in test_evaluation.py, too.
RECORDED: list[tuple[str, dict[str, Any]]] = [
    (
        TEXT,
        {
            "model": MODEL,
            "prompt": "hens and eggs",
            "temperature": 0.0,
            "repetition_penalty": 1.0,
            "max_tokens": 8,
            "logprobs": None,
            "stream": True,
            "stream_options": {"include_usage": True},
            "ignore_eos": True,
        },
    ),
    (
        CHAT,
        {
            "model": MODEL,
            "messages": [{"role": "user", "content": [{"type": "text", "text": "hens"}]}],
            "temperature": 0.0,
            "max_completion_tokens": 8,
            "stream": True,
            "stream_options": {"include_usage": True},
            "ignore_eos": True,
        },
    ),
    (
        TEXT,
        {
            "model": MODEL,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            "max_tokens": 8,
            "stop": None,
            "ignore_eos": True,
            "prompt": "hens and eggs",
        },
    ),
    (
        CHAT,
        {
            "model": MODEL,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            "max_completion_tokens": 8,
            "stop": None,
            "ignore_eos": True,
            "messages": [{"role": "user", "content": [{"type": "text", "text": "hens"}]}],
        },
    ),
    (
        "/v1/responses",
        {
            "model": MODEL,
            "stream": True,
            "max_output_tokens": 8,
            "stop": None,
            "ignore_eos": True,
            "input": [{"role": "user", "content": [{"type": "input_text", "text": "hens"}]}],
        },
    ),
    (
        TEXT,
        {
            "model": MODEL,
            "prompt": [[5, 6, 7, 8]],
            "temperature": 0,
            "max_tokens": 1,
            "logprobs": 1,
            "seed": 1234,
            "echo": True,
        },
    ),
    (
        TEXT,
        {
            "prompt": [[5, 6, 7, 8]],
            "model": MODEL,
            "max_tokens": 8,
            "temperature": 0,
            "stop": ["\n\n", "<|end|>"],
            "seed": 1234,
        },
    ),
]


@in_virtual_time
async def test_what_is_not_done_is_refused_in_every_api(founded: Founded, tmp_path: Path) -> None:
    async with serving(founded, tmp_path) as served:
        before = served.computed()
        wishes = {field: 7 if 7 not in anyway else 8 for field, (anyway, _) in REFUSED.items()}
        for path, body in PATHS.items():
            for field, wish in {**wishes, "min_tokens": 2}.items():
                answer = await served.http.post(path, json={**body, field: wish})
                error = answer.json()["error"]
                assert (answer.status_code, error["param"]) == (400, field), (path, field, error)
                assert field in error["message"] and error["message"].count(". ") == 0
        for path, wish in (
            (TEXT, {"best_of": 3}),
            (CHAT, {"best_of": 3}),
            (CHAT, {"echo": True}),
            (TEXT, {"max_tokens": 0}),
            ("/v1/responses", {"top_logprobs": 2}),
            ("/v1/responses", {"include": ["message.output_text.logprobs"]}),
        ):
            answer = await served.http.post(path, json={**PATHS[path], **wish})
            assert answer.status_code == 400, (path, wish)
        assert served.computed() == before
        neutral = {field: None if not anyway else anyway[0] for field, (anyway, _) in REFUSED.items()}
        for path, body in PATHS.items():
            answer = await served.http.post(path, json={**body, **neutral, "user": "me", "metadata": {}, "store": True})
            assert answer.status_code == 200, (path, answer.text)


@in_virtual_time
async def test_recorded_requests_are_answered(founded: Founded, tmp_path: Path) -> None:
    async with serving(founded, tmp_path) as served:
        for path, body in RECORDED:
            answer = await served.http.post(path, json=body)
            assert answer.status_code == 200, answer.text
            if body.get("ignore_eos"):
                events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
                usage = events[-1].get("usage") or events[-1]["response"]["usage"]
                assert usage.get("completion_tokens", usage.get("output_tokens")) == 8


@in_virtual_time
async def test_end_tokens_are_ignored_or_added(
    founded: Founded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(founded, tmp_path) as served:
        ids = (await served.client.generate("hens", max_new_tokens=24)).ids
        end = next(number for number in range(5, 24) if ids[number] not in ids[:number])

        async def stop_ids(_adapter: str = "") -> tuple[int, ...]:
            return (ids[end],)

        async def tokens(**asked: Any) -> tuple[int, str]:
            body = {"prompt": "hens", "max_tokens": 24, "temperature": 0, **asked}
            told = (await served.http.post(TEXT, json=body)).json()
            return told["usage"]["completion_tokens"], told["choices"][0]["finish_reason"]

        assert await tokens(stop_token_ids=[ids[end]]) == (end + 1, "stop")
        monkeypatch.setattr(served.client, "stop_ids", stop_ids)
        assert await tokens() == (end + 1, "stop")
        assert await tokens(ignore_eos=True) == (24, "length")
        assert await tokens(ignore_eos=True, min_tokens=24) == (24, "length")
        assert await tokens(ignore_eos=True, stop_token_ids=[ids[2]]) == (ids.index(ids[2]) + 1, "stop")
        body = {"prompt": "hens", "max_tokens": 24, "temperature": 0, "logprobs": 0, "echo": True}
        told = (await served.http.post(TEXT, json=body)).json()["choices"][0]
        assert told["logprobs"]["text_offset"][-1] == len(told["text"]), "the end's logprob is told, its text is not"
        assert len(told["logprobs"]["tokens"]) == len((await served.client.tokenizer()).encode("hens")) + end + 1


@pytest.mark.parametrize(
    ("config", "positions"),
    [
        ({"max_position_embeddings": 8192}, 8192),
        ({"n_positions": 1024}, 1024),
        ({}, None),
        ({"max_position_embeddings": 32768, "rope_scaling": {"type": "yarn", "factor": 4.0}}, 131072),
        (
            {
                "max_position_embeddings": 163840,
                "rope_scaling": {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096},
            },
            163840,
        ),
        (
            {
                "max_position_embeddings": 32768,
                "rope_parameters": {"rope_type": "yarn", "factor": 4, "original_max_position_embeddings": 32768},
            },
            131072,
        ),
        ({"max_position_embeddings": 4096, "rope_scaling": {"type": "linear", "factor": 2.0}}, 8192),
        ({"max_position_embeddings": 131072, "rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, 131072),
        ({"max_position_embeddings": 2048, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, 2048),
        ({"max_position_embeddings": "many"}, None),
    ],
)
def test_positions_are_those_of_the_config_as_far_as_rotary_embeddings_are_stretched(
    config: dict[str, Any], positions: int | None
) -> None:
    assert positions_of(config) == positions


@in_virtual_time
async def test_the_context_of_the_config_bounds_what_is_asked(tmp_path: Path) -> None:
    save_speaking_llama(tmp_path / "model", max_position_embeddings=64)
    founded = found_on(tmp_path / "model", tmp_path / "founded")
    async with serving(founded, tmp_path) as served:
        assert (await served.client.limits()).positions == 64
        before = served.computed()
        assert (await served.openai.models.list()).data[0].max_model_len == 64
        assert served.client.status()["max_model_len"] == 64
        for body in ({"prompt": "q" * 80}, {"prompt": list(range(65))}, {"prompt": "q" * 60, "max_tokens": 30}):
            answer = await served.http.post(TEXT, json=body)
            error = answer.json()["error"]
            assert (answer.status_code, error["code"]) == (400, "context_length_exceeded")
            assert "64" in error["message"]
        answer = await served.http.post(TEXT, json={"prompt": "q" * 64 * 200})
        assert "12,800 characters" in answer.json()["error"]["message"]
        for path in (CHAT, "/v1/messages"):
            answer = await served.http.post(path, json={"messages": [{"role": "user", "content": "q" * 80}]})
            assert answer.json()["error"]["code"] == "context_length_exceeded"
        assert served.computed() == before


@in_virtual_time
async def test_whoever_asks_through_swarmnode_may_lift_the_context(tmp_path: Path) -> None:
    save_speaking_llama(tmp_path / "model", max_position_embeddings=64)
    founded = found_on(tmp_path / "model", tmp_path / "founded")
    async with serving(founded, tmp_path) as served:
        served.client._files._most_positions = 128
        assert (await served.client.limits()).positions == 128
        told = await served.http.post(TEXT, json={"prompt": "q" * 80, "max_tokens": 4})
        assert told.json()["usage"]["total_tokens"] > 64


def test_defaults_are_what_texts_can_be_drawn_by(tmp_path: Path) -> None:
    told = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "repetition_penalty": 1.1, "do_sample": True, "min_p": None}
    (tmp_path / "generation_config.json").write_text(json.dumps({**told, "frequency_penalty": 99, "top_h": 3}))
    assert generation_defaults(tmp_path) == {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "repetition_penalty": 1.1}
    (tmp_path / "generation_config.json").write_text("[]")
    assert generation_defaults(tmp_path) == USUAL
    for told, drawn in (
        ({"top_k": 20}, {"top_k": 20}),
        ({"temperature": 0}, {"temperature": 0}),
        ({"min_p": 0.1}, {"min_p": 0.1}),
        ({"temperature": -1, "top_p": "x"}, USUAL),
        ({"repetition_penalty": 1.1, "eos_token_id": 2}, {**USUAL, "repetition_penalty": 1.1}),
    ):
        (tmp_path / "generation_config.json").write_text(json.dumps(told))
        assert generation_defaults(tmp_path) == drawn, told


@in_virtual_time
async def test_what_a_request_does_not_say_the_models_generation_config_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_speaking_llama(tmp_path / "model")
    defaults = {"temperature": 0.25, "top_p": 0.5, "top_k": 7, "repetition_penalty": 1.25}
    (tmp_path / "model" / "generation_config.json").write_text(json.dumps(defaults))
    async with serving(found_on(tmp_path / "model", tmp_path / "founded"), tmp_path) as served:
        drawn = await options_of(served, monkeypatch)
        for path, body in PATHS.items():
            assert (await served.http.post(path, json=body)).status_code == 200
            assert {name: getattr(drawn[-1], name) for name in defaults} == defaults, path
        said = {"temperature": 0, "top_k": -1, "top_p": 1, "repetition_penalty": 1}
        await served.http.post(TEXT, json={**PATHS[TEXT], **said})
        assert {name: getattr(drawn[-1], name) for name in defaults} == {**said, "top_k": 0}
        await served.client.generate("hens", max_new_tokens=1)
        assert drawn[-1].temperature == 0, "Python asks as it always did"


async def options_of(served: Served, monkeypatch: pytest.MonkeyPatch) -> list[GenerateOptions]:
    """With what texts are asked for from now on."""
    asked: list[GenerateOptions] = []
    stream = served.client.stream

    async def told(prompt: Any, options: Any = None, **named: Any) -> Any:
        asked.append(options or GenerateOptions())
        return await stream(prompt, options, **named)

    monkeypatch.setattr(served.client, "stream", told)
    return asked


@in_virtual_time
async def test_without_a_generation_config_all_apis_draw_as_is_usual(
    founded: Founded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(founded, tmp_path) as served:
        drawn = await options_of(served, monkeypatch)
        for path, body in PATHS.items():
            assert (await served.http.post(path, json=body)).status_code == 200
            assert {name: getattr(drawn[-1], name) for name in USUAL} == USUAL, path
            for field, value, name in (("temperature", 1, "temperature"), ("top_p", 1, "top_p")):
                await served.http.post(path, json={**body, field: value})
                assert {each: getattr(drawn[-1], each) for each in USUAL} == {**USUAL, name: value}, path
        assert (await served.http.get("/v1/models")).json()["data"][0]["sampling"] == USUAL
        await served.openai.completions.create(model=MODEL, prompt="hens", max_tokens=1, temperature=0)
        assert drawn[-1].temperature == 0
        with pytest.raises(openai.BadRequestError, match="temperature"):
            await served.openai.completions.create(model=MODEL, prompt="hens", temperature=-1)
