"""OpenAI's responses and Anthropic's messages, asked by their own clients."""

from __future__ import annotations

import json
from pathlib import Path

import openai
import pytest

from tests.gateway.conftest import MODEL, found_on, serving
from tests.gateway.scripted import says
from tests.llama import save_llama
from tests.net.virtual import in_virtual_time
from tests.node.conftest import Founded

SAID = [{"role": "user", "content": "How are the hens?"}]
GREEDY = {"temperature": 0}  # which its newest clients have no argument for
CHAT = {"model": MODEL, "messages": [{"role": "system", "content": "Be short."}, *SAID], "temperature": 0}


@in_virtual_time
async def test_responses(founded: Founded, tmp_path: Path) -> None:
    async with serving(founded, tmp_path) as served:
        chat = await served.openai.chat.completions.create(max_tokens=24, **CHAT)
        asked = {"model": MODEL, "instructions": "Be short.", "input": SAID, "max_output_tokens": 24, "temperature": 0}
        whole = await served.openai.responses.create(**asked)
        assert whole.output_text == chat.choices[0].message.content
        assert (whole.status, whole.incomplete_details.reason) == ("incomplete", "max_output_tokens")
        assert (whole.usage.input_tokens, whole.usage.output_tokens) == (chat.usage.prompt_tokens, 24)
        events = [event async for event in await served.openai.responses.create(stream=True, **asked)]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == whole.output_text
    assert events[-1].type == "response.incomplete" and events[-1].response.output_text == whole.output_text
    [done] = [event.item for event in events if event.type == "response.output_item.done"]
    assert done == events[-1].response.output[0] and done.status == "incomplete"


@in_virtual_time
async def test_messages(founded: Founded, tmp_path: Path) -> None:
    import anthropic  # not where tests are collected: that takes a second in every worker

    async with serving(founded, tmp_path) as served:
        chat = await served.openai.chat.completions.create(max_tokens=24, **CHAT)
        text = chat.choices[0].message.content
        client = anthropic.AsyncAnthropic(
            api_key="none", base_url="http://localhost", http_client=served.http, max_retries=0
        )
        asked = {"model": MODEL, "system": "Be short.", "messages": SAID, "max_tokens": 24, "extra_body": GREEDY}
        whole = await client.messages.create(**asked)
        assert (whole.content[0].text, whole.stop_reason) == (text, "max_tokens")
        read, usage = whole.usage.cache_read_input_tokens, whole.usage
        assert (usage.input_tokens + read, usage.output_tokens) == (chat.usage.prompt_tokens, 24) and read > 0
        stopped = await client.messages.create(stop_sequences=[text[3:7]], **asked)
        assert (stopped.content[0].text, stopped.stop_reason, stopped.stop_sequence) == (
            text[: text.index(text[3:7])],
            "stop_sequence",
            text[3:7],
        )
        async with client.messages.stream(**asked) as stream:
            assert "".join([piece async for piece in stream.text_stream]) == text
            assert (await stream.get_final_message()).usage.output_tokens == 24
        counted = await client.messages.count_tokens(model=MODEL, system="Be short.", messages=SAID)
        assert counted.input_tokens == chat.usage.prompt_tokens
        with pytest.raises(anthropic.NotFoundError, match="there is no model"):
            await client.messages.create(**{**asked, "model": "claude"})


HENS = '{"name": "count", "arguments": {"what": "hens"}}'
COUNT = {"type": "object", "properties": {"what": {"type": "string"}}}
SAYS_CALLS = f"Let me see. <tool_call>{HENS}</tool_call><tool_call>{HENS}</tool_call>"


@in_virtual_time
async def test_tools_in_responses(founded: Founded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tools = [{"type": "function", "name": "count", "parameters": COUNT, "strict": False}]
    asked = {"model": MODEL, "input": SAID, "tools": tools}
    async with serving(founded, tmp_path) as served:
        tokenizer = await served.client.tokenizer()
        prompts = says(served.client, monkeypatch, SAYS_CALLS)
        whole = await served.openai.responses.create(**asked)
        assert [item.type for item in whole.output] == ["message", "function_call", "function_call"]
        assert whole.output_text == "Let me see. " and whole.status == "completed"
        call = whole.output[1]
        assert (call.name, call.arguments) == ("count", '{"what": "hens"}') and call.call_id != whole.output[2].call_id
        async with served.openai.responses.stream(**asked) as stream:
            events = [event async for event in stream]
            final = await stream.get_final_response()
        assert [item.type for item in final.output] == ["message", "function_call", "function_call"]
        assert final.output[2].arguments == '{"what": "hens"}'
        assert [event.sequence_number for event in events] == list(range(len(events)))
        single = await served.openai.responses.create(**asked, parallel_tool_calls=False)
        assert [item.type for item in single.output] == ["message", "function_call"]
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "4 hens"}
        heard = [*SAID, *(item.model_dump(exclude_none=True) for item in whole.output[:2]), result]
        await served.openai.responses.create(**{**asked, "input": heard, "tool_choice": "none"})
        with pytest.raises(openai.BadRequestError, match="the id 'x' of a tool's result belongs to no earlier call"):
            await served.openai.responses.create(**{**asked, "input": [*SAID, {**result, "call_id": "x"}]})
    heard = tokenizer.decode(prompts[-1])
    assert "parameters" in tokenizer.decode(prompts[0]) and "parameters" not in heard, "no tool is offered any more"
    assert heard.endswith("4 hens\n</tool_response>") and HENS in heard, "the template has no place for calls"


@in_virtual_time
async def test_tools_in_messages(founded: Founded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import anthropic

    tools = [{"name": "count", "description": "Hens.", "input_schema": COUNT}]
    asked = {"model": MODEL, "messages": SAID, "max_tokens": 64, "tools": tools}
    async with serving(founded, tmp_path) as served:
        tokenizer = await served.client.tokenizer()
        client = anthropic.AsyncAnthropic(
            api_key="none", base_url="http://localhost", http_client=served.http, max_retries=0
        )
        prompts = says(served.client, monkeypatch, SAYS_CALLS)
        whole = await client.messages.create(**asked)
        assert [block.type for block in whole.content] == ["text", "tool_use", "tool_use"]
        assert (whole.content[1].name, whole.content[1].input, whole.stop_reason) == (
            "count",
            {"what": "hens"},
            "tool_use",
        )
        async with client.messages.stream(**asked) as stream:
            final = await stream.get_final_message()
        assert [block.type for block in final.content] == ["text", "tool_use", "tool_use"]
        assert final.content[2].input == {"what": "hens"} and final.stop_reason == "tool_use"
        one = {"type": "auto", "disable_parallel_tool_use": True}
        assert len((await client.messages.create(**asked, tool_choice=one)).content) == 2
        results = [
            {"type": "tool_result", "tool_use_id": block.id, "content": [{"type": "text", "text": text}]}
            for block, text in zip(whole.content[1:], ("4 hens", "5 hens"), strict=True)
        ]
        turns = [*SAID, whole.model_dump(include={"role", "content"}), {"role": "user", "content": results}]
        await client.messages.create(**{**asked, "messages": turns, "tool_choice": {"type": "none"}})
        with pytest.raises(anthropic.BadRequestError, match="of a tool's result belongs to no earlier call"):
            await client.messages.create(**{**asked, "messages": [*SAID, turns[-1]]})
    heard = tokenizer.decode(prompts[-1])
    assert heard.endswith("5 hens\n</tool_response>") and "4 hens" in heard and "parameters" not in heard


@in_virtual_time
async def test_a_call_is_forced_in_every_api(founded: Founded, tmp_path: Path) -> None:
    import anthropic

    pytest.importorskip("llguidance")
    short = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    short["additionalProperties"] = False
    async with serving(founded, tmp_path) as served:
        tools = [{"type": "function", "name": name, "parameters": short} for name in ("yes", "no")]
        one = {"type": "function", "name": "no"}
        asked = {"model": MODEL, "input": SAID, "tools": tools, "tool_choice": one, "temperature": 0}
        [call] = (await served.openai.responses.create(max_output_tokens=200, **asked)).output
        assert call.name == "no" and set(json.loads(call.arguments)) == {"ok"}
        client = anthropic.AsyncAnthropic(api_key="none", base_url="http://localhost", http_client=served.http)
        theirs = [{"name": tool["name"], "input_schema": short} for tool in tools]
        said = await client.messages.create(
            model=MODEL, messages=SAID, max_tokens=200, tools=theirs, tool_choice={"type": "any"}, extra_body=GREEDY
        )
        assert said.stop_reason == "tool_use" and set(said.content[0].input) == {"ok"}


@in_virtual_time
async def test_a_swarm_without_a_tokenizer_completes_token_ids(tmp_path: Path) -> None:
    save_llama(tmp_path / "model", layers=2)
    async with serving(found_on(tmp_path / "model", tmp_path / "founded"), tmp_path) as served:
        asked = {"model": MODEL, "prompt": [3, 1, 4], "max_tokens": 6, "temperature": 0, "logprobs": 1}
        whole = await served.openai.completions.create(**asked)
        [choice] = whole.choices
        told = await served.client.generate([3, 1, 4], max_new_tokens=6)
        assert (choice.text, choice.token_ids, whole.usage.completion_tokens) == ("", told.ids, 6)
        assert choice.logprobs.tokens[0] == f"token_id:{told.ids[0]}"
        chunks = [chunk async for chunk in await served.openai.completions.create(stream=True, **asked)]
        assert [id for chunk in chunks for id in chunk.choices[0].token_ids] == told.ids and len(chunks) > 6
        for refused in ({"prompt": "hens"}, {"stop": "!"}):
            with pytest.raises(openai.BadRequestError, match="no tokenizer"):
                await served.openai.completions.create(**{**asked, **refused})
        with pytest.raises(openai.BadRequestError, match="no tokenizer"):
            await served.openai.chat.completions.create(model=MODEL, messages=SAID)
