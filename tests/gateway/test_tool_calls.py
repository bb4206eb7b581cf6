"""Tools: the model is shown them by its template, and what it says is told as calls, however it came."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnode.gateway.generation.response_parser import ToolCall, ToolCallParser
from tests.gateway.conftest import MODEL, serving
from tests.gateway.scripted import says
from tests.net.virtual import in_virtual_time
from tests.node.conftest import Founded

HENS = '{"name": "count", "arguments": {"what": "hens"}}'
CALL = ToolCall("count", '{"what": "hens"}')
SAID = [
    (f"Let me see. <tool_call>{HENS}</tool_call>\n<tool_call>{HENS}</tool_call>", "Let me see. ", (CALL, CALL)),
    (HENS.replace("arguments", "parameters"), "", (CALL,)),
    ("Four. <tool", "Four. <tool", ()),
    ("<tool_call>{broken</tool_call>", "<tool_call>{broken</tool_call>", ()),
    (f"<tool_call>{HENS.replace('count', 'launch')}</tool_call>", None, ()),
    ('{"four": "hens"}', '{"four": "hens"}', ()),
    ("", "", ()),
]
TOOLS = [{"type": "function", "function": {"name": "count", "parameters": {"type": "object"}}}]
ASKED = {"model": MODEL, "messages": [{"role": "user", "content": "How many?"}], "tools": TOOLS}


@given(st.sampled_from(SAID), st.lists(st.integers(1, 9)))
def test_calls_are_found_however_they_come(said: tuple[str, str | None, tuple[ToolCall, ...]], cuts: list[int]) -> None:
    text, told, calls = said
    parser, rest, shown = ToolCallParser({"count"}), text, ""
    for cut in cuts:
        shown += parser.push(rest[:cut])
        rest = rest[cut:]
    shown += parser.push(rest)
    held, found = parser.finish()
    assert (shown + held, found) == (text if told is None else told, calls)


@in_virtual_time
async def test_a_model_calls_tools_and_hears_of_them(
    founded: Founded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(founded, tmp_path) as served:
        tokenizer = await served.client.tokenizer()
        prompts = says(served.client, monkeypatch, SAID[0][0])
        [whole] = (await served.openai.chat.completions.create(**ASKED)).choices
        assert whole.finish_reason == "tool_calls" and len(whole.message.tool_calls) == 2
        assert json.loads(whole.message.tool_calls[0].function.arguments) == {"what": "hens"}
        chunks = [chunk.choices[0] async for chunk in await served.openai.chat.completions.create(stream=True, **ASKED)]
        assert "".join(chunk.delta.content or "" for chunk in chunks) == "Let me see. "
        [called] = [chunk.delta.tool_calls for chunk in chunks if chunk.delta.tool_calls]
        assert [call.function.name for call in called] == ["count", "count"] and chunks[
            -1
        ].finish_reason == "tool_calls"
        answer = {"role": "tool", "content": "4", "tool_call_id": whole.message.tool_calls[0].id}
        heard = [*ASKED["messages"], whole.message.model_dump(exclude_none=True), answer]
        await served.openai.chat.completions.create(**{**ASKED, "messages": heard, "tool_choice": "none"})
    assert "count" in tokenizer.decode(prompts[0]) and "count" not in tokenizer.decode(prompts[2])
    assert tokenizer.decode(prompts[2]).endswith("4")
