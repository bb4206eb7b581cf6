"""OpenAI's responses and Anthropic's messages, asked by their own clients."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gateway.conftest import MODEL, serving
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
