"""OpenAI's own client against a gateway, in virtual time."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import jsonschema
import pytest

from tests.gateway.conftest import HALVES, MODEL, serving
from tests.net.virtual import in_virtual_time
from tests.node.conftest import Founded

SAID = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "How are the hens?"}]
WRITTEN = "<|system|>Be short.<|end|><|user|>How are the hens?<|end|><|assistant|>"
GREEDY = {"temperature": 0, "max_tokens": 24}


@in_virtual_time
async def test_a_chat_says_what_the_swarm_says_to_the_templates_text(founded: Founded, tmp_path: Path) -> None:
    async with serving(founded, tmp_path) as served:
        expected = await served.client.generate(WRITTEN, max_new_tokens=24)
        answer = await served.openai.chat.completions.create(model=MODEL, messages=SAID, **GREEDY)
        assert answer.choices[0].message.content == expected.text
        assert answer.choices[0].message.role == "assistant" and answer.choices[0].finish_reason == "length"
        tokens = await served.http.post("/tokenize", json={"messages": SAID})
        assert (
            answer.usage.prompt_tokens
            == tokens.json()["count"]
            == len((await served.client.tokenizer()).encode(WRITTEN))
        )
        assert (answer.usage.completion_tokens, answer.usage.total_tokens) == (24, 24 + answer.usage.prompt_tokens)
        assert len(answer.id.split("-")[-1]) == len(expected.trace)
        told = [*SAID, answer.choices[0].message.model_dump(include={"role", "content"}), *SAID]
        later = await served.openai.chat.completions.create(model=MODEL, messages=told, **GREEDY)
        assert later.usage.prompt_tokens_details.cached_tokens > 0 and later.id != answer.id


@in_virtual_time
async def test_a_stream_is_the_same_text_in_pieces(founded: Founded, tmp_path: Path) -> None:
    async with serving(founded, tmp_path) as served:
        whole = await served.openai.chat.completions.create(model=MODEL, messages=SAID, **GREEDY)
        stream = await served.openai.chat.completions.create(
            model=MODEL, messages=SAID, stream=True, stream_options={"include_usage": True}, **GREEDY
        )
        chunks = [chunk async for chunk in stream]
    *said, last = chunks
    assert "".join(chunk.choices[0].delta.content or "" for chunk in said) == whole.choices[0].message.content
    assert said[0].choices[0].delta.role == "assistant" and said[-1].choices[0].finish_reason == "length"
    assert len(said) > 5 and last.choices == []
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (whole.usage.prompt_tokens, 24)
    cached = [usage.prompt_tokens_details.cached_tokens for usage in (whole.usage, last.usage)]
    assert cached == [0, whole.usage.prompt_tokens - 1], "what was asked before is not computed again"
    assert len({chunk.id for chunk in chunks}) == 1


@in_virtual_time
async def test_requests_of_one_key_that_begin_alike_and_come_at_once_share_the_beginning(
    founded: Founded, tmp_path: Path
) -> None:
    """Several choices of one request, and several requests; all prompts here have their first 400 tokens in common."""
    said = "Once upon a time there was a hen. " * 16
    async with serving(founded, tmp_path, nodes=HALVES) as served:
        ids = (await served.http.post("/tokenize", json={"prompt": said})).json()["count"]
        alone = [(await served.client.generate(said + end, max_new_tokens=5)).text for end in ("a", "b")]
        before, asking = served.computed(), served.openai.completions.create
        answers = await asyncio.gather(
            asking(model=MODEL, prompt=said + "a", n=3, max_tokens=5, temperature=0),
            asking(model=MODEL, prompt=said + "b", max_tokens=5, temperature=0),
        )
        assert [[one.text for one in answer.choices] for answer in answers] == [[alone[0]] * 3, alone[1:]]
        cached = [answer.usage.prompt_tokens_details.cached_tokens for answer in answers]
        assert ids >= 400 and max(cached) >= ids - 1, "of whichever did not come first"
        assert served.computed() - before <= 2 * (ids + 4 * 8), "at both nodes once, and what each says"


@in_virtual_time
async def test_the_wire_is_as_openais(founded: Founded, tmp_path: Path) -> None:
    async with serving(founded, tmp_path) as served:
        body = {"prompt": "hens", "max_tokens": 3, "temperature": 0, "stream": True, "no_such_field": 1}
        answer = await served.http.post("/v1/completions", json=body)
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert answer.text.endswith("data: [DONE]\n\n") and answer.text.startswith("data: {")
    assert len(answer.headers["x-request-id"]) == 32


@in_virtual_time
async def test_a_text_ends_before_the_first_stop_string(founded: Founded, tmp_path: Path) -> None:
    async with serving(founded, tmp_path) as served:
        text = (await served.client.generate("hens", max_new_tokens=24)).text or ""
        for begin, length in ((0, 1), (3, 4), (7, 9)):
            stop = text[begin : begin + length]
            answer = await served.openai.completions.create(model=MODEL, prompt="hens", stop=["no", stop], **GREEDY)
            assert (answer.choices[0].text, answer.choices[0].finish_reason) == (text[: text.index(stop)], "stop")
        assert await served.freed(), "what is not said any more is not computed"


@in_virtual_time
async def test_a_text_ends_with_the_models_end_token(
    founded: Founded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(founded, tmp_path) as served:
        ids = (await served.client.generate("hens", max_new_tokens=24)).ids
        end = next(number for number in range(5, 24) if ids[number] not in ids[:number])

        async def stop_ids(_adapter: str = "") -> tuple[int, ...]:
            return (ids[end],)

        monkeypatch.setattr(served.client, "stop_ids", stop_ids)
        answer = await served.openai.completions.create(model=MODEL, prompt="hens", **GREEDY)
        tokenizer = await served.client.tokenizer()
    assert answer.choices[0].text == tokenizer.decode(ids[:end])
    assert answer.choices[0].finish_reason == "stop" and answer.usage.completion_tokens == end + 1


@in_virtual_time
async def test_several_choices_are_drawn_from_seeds_of_their_own(founded: Founded, tmp_path: Path) -> None:
    async with serving(founded, tmp_path) as served:
        options = {"model": MODEL, "prompt": ["hens", "eggs"], "max_tokens": 8, "temperature": 1.2, "top_p": 0.9}
        both = await served.openai.completions.create(n=2, seed=-7, **options)
        again = await served.openai.completions.create(n=1, seed=-6, **options)
        stream = await served.openai.completions.create(n=2, seed=-7, stream=True, **options)
        streamed = ["", "", "", ""]
        async for chunk in stream:
            streamed[chunk.choices[0].index] += chunk.choices[0].text
    texts = [choice.text for choice in both.choices]
    assert [choice.index for choice in both.choices] == [0, 1, 2, 3] and len(set(texts)) == 4
    assert texts == streamed and texts[1::2] == [choice.text for choice in again.choices]


@in_virtual_time
async def test_models_and_what_watches(founded: Founded, tmp_path: Path) -> None:
    async with serving(founded, tmp_path) as served:
        [model] = (await served.openai.models.list()).data
        assert (model.id, model.object) == (MODEL, "model") and model.model_dump()["max_model_len"] is None
        assert (await served.openai.models.retrieve(MODEL)).id == MODEL
        tokens = (await served.http.post("/tokenize", json={"prompt": "in the end"})).json()["tokens"]
        assert (await served.http.post("/detokenize", json={"tokens": tokens})).json() == {"prompt": "in the end"}
        await served.openai.completions.create(model=MODEL, prompt="hens", max_tokens=2)
        metrics = (await served.http.get("/metrics")).text
        assert 'swarmnode_client_sessions_total{result="done",swarm="virtual"} 1.0' in metrics
        assert (await served.http.get("/ready")).json() == {"ready": True, "missing": {}, "loading": []}
        await served.swarm.members["a"].kill()
        while served.client.status()["covered"]:
            await served.client.changed()
        answer = await served.http.get("/ready")
        assert (answer.status_code, answer.json()["missing"]) == (503, {MODEL: [0, 1, 2, 3]})
        assert (await served.http.get("/health")).status_code == 200


@in_virtual_time
async def test_what_a_draw_is_asked_to_heed_reaches_the_last_hop(founded: Founded, tmp_path: Path) -> None:
    options = {"frequency_penalty": 1.5, "presence_penalty": 0.5, "temperature": 0.8, "seed": 3, "top_p": 1.0}
    extra = {"min_p": 0.05, "repetition_penalty": 1.2, "top_k": 0}  # else a model that says nothing has 40
    bias = {"100": 4.0, "7": -100.0}
    async with serving(founded, tmp_path) as served:
        expected = await served.client.generate(
            "hens", max_new_tokens=24, logit_bias={int(token): by for token, by in bias.items()}, **options, **extra
        )
        answer = await served.openai.completions.create(
            model=MODEL, prompt="hens", max_tokens=24, logit_bias=bias, extra_body=extra, **options
        )
        assert answer.choices[0].text == expected.text
        plain = await served.client.generate("hens", max_new_tokens=24, temperature=0.8, seed=3)
        assert plain.ids != expected.ids


@in_virtual_time
async def test_logprobs_are_told_with_every_token(founded: Founded, tmp_path: Path) -> None:
    asked = {"model": MODEL, "messages": SAID, "logprobs": True, "top_logprobs": 2, **GREEDY}
    async with serving(founded, tmp_path) as served:
        whole = (await served.openai.chat.completions.create(**asked)).choices[0]
        chunks = [chunk async for chunk in await served.openai.chat.completions.create(stream=True, **asked)]
        text = await served.openai.completions.create(model=MODEL, prompt="hens", logprobs=1, **GREEDY)
    told = whole.logprobs.content
    assert len(told) == 24 and [len(one.top_logprobs) for one in told] == [2] * 24
    assert all(one.logprob == one.top_logprobs[0].logprob >= one.top_logprobs[1].logprob for one in told), "greedy"
    streamed = [
        one for chunk in chunks for choice in chunk.choices if choice.logprobs for one in choice.logprobs.content
    ]
    assert [one.token for one in streamed] == [one.token for one in told]
    assert [one.logprob for one in streamed] == pytest.approx([one.logprob for one in told], abs=1e-4)
    spelled = text.choices[0].logprobs
    assert len(spelled.tokens) == len(spelled.token_logprobs) == len(spelled.top_logprobs) == 24
    assert spelled.text_offset[:2] == [0, len(spelled.tokens[0])]


PERSON = {
    "type": "object",
    "properties": {"name": {"enum": ["Ada", "Bea"]}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"place": {"$ref": "#/$defs/place"}},
            "required": ["place"],
            "additionalProperties": False,
            "$defs": {"place": {"enum": ["Ulm", "Rome"]}},
        },
    },
}


@in_virtual_time
async def test_an_answer_fits_its_schema_behind_a_free_one_to_the_same_words(founded: Founded, tmp_path: Path) -> None:
    """What is kept of the free text has no matcher: it is not gone on with."""
    schema = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}
    asked = {"model": MODEL, "messages": SAID, "max_tokens": 64, "seed": 5}
    async with serving(founded, tmp_path) as served:
        alone = (await served.openai.chat.completions.create(response_format=schema, **asked)).choices[0]
        await served.openai.chat.completions.create(**asked | {"max_tokens": 4})
        choice = (await served.openai.chat.completions.create(response_format=schema, **asked)).choices[0]
        jsonschema.validate(json.loads(choice.message.content), PERSON)
        assert choice.message.content == alone.message.content


@in_virtual_time
async def test_an_answer_fits_the_schema_that_it_is_asked_for(founded: Founded, tmp_path: Path) -> None:
    """Which the model by itself would never write; and a machine that takes over goes on in the middle of it."""
    schema = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}
    asked = {"model": MODEL, "messages": SAID, "max_tokens": 64, "seed": 5, "response_format": schema}
    async with serving(founded, tmp_path, nodes={"a": "0:2", "b1": "2:4", "b2": "2:4"}) as served:
        choice = (await served.openai.chat.completions.create(**asked)).choices[0]
        jsonschema.validate(json.loads(choice.message.content), PERSON)
        assert choice.finish_reason == "stop"
        stream = await served.openai.chat.completions.create(stream=True, **asked)
        text, struck = "", False
        async for chunk in stream:
            text += chunk.choices[0].delta.content or ""
            if text and not struck:
                struck = True
                await served.swarm.members["b1"].kill()
        assert text == choice.message.content
        called = (
            await served.openai.chat.completions.create(
                model=MODEL, messages=SAID, max_tokens=64, seed=1, tools=[WEATHER], tool_choice="required"
            )
        ).choices[0]
        assert called.finish_reason == "tool_calls" and called.message.tool_calls[0].function.name == "weather"
        assert json.loads(called.message.tool_calls[0].function.arguments)["place"] in ("Ulm", "Rome")
        said = await served.openai.responses.create(
            model=MODEL, input="hens", text={"format": {"type": "json_schema", "name": "person", "schema": PERSON}}
        )
        jsonschema.validate(json.loads(said.output_text), PERSON)
        lark = await served.openai.completions.create(
            model=MODEL, prompt="hens", extra_body={"grammar": 'start: "hen" | "duck"'}
        )
        assert lark.choices[0].text in ("hen", "duck")
