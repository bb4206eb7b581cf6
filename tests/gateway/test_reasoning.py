"""What a model thinks is told apart from its answer, by the common tags and by transformers' response templates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnode.gateway.generation.request_fields import ToolUse, function_tool
from swarmnode.gateway.generation.response_parser import (
    CallPart,
    CommonParser,
    Parsed,
    ReasoningParser,
    ResponseParser,
    TemplateParser,
)
from tests.gateway.conftest import MODEL, found_on, serving
from tests.gateway.scripted import says
from tests.gateway.speaking import TEMPLATE, save_speaking_llama
from tests.net.virtual import in_virtual_time

COUNT = ToolUse([function_tool("count", None, {"type": "object", "properties": {"what": {"type": "string"}}})])
HENS = '{"name": "count", "arguments": {"what": "hens"}}'
CALL = CallPart(0, "count", '{"what": "hens"}')
THOUGHTS: list[tuple[bool, str, Parsed]] = [
    (False, "<think>\nFour?\n</think>\n\nFour.", Parsed("Four.", "\nFour?\n".lstrip())),
    (True, "Four?</think>Four.", Parsed("Four.", "Four?")),
    (False, f"<think>Hm</think><tool_call>{HENS}</tool_call>", Parsed("", "Hm", CALL)),
    (False, f"<think>{HENS}</think>", Parsed("", HENS)),
    (False, "  <thin", Parsed("  <thin")),
    (False, "No <think>tags</think>", Parsed("No <think>tags</think>")),
    (True, "never ends </thi", Parsed("", "never ends </thi")),
    (False, "", Parsed()),
]
RESPONSE_TEMPLATE = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|assistant|>",
    "fields": {
        "content": {"close": "<|end|>"},
        "thinking": {"open": "<|system|>", "close": "<|user|>"},
        "tool_calls": {
            "open": "<|tool|>",
            "close": "<|end|>",
            "content": "json",
            "repeats": True,
            "transform": {"type": "function", "function": "{content}"},
        },
    },
}


def parsed(parser: ResponseParser, text: str, cuts: list[int]) -> Parsed:
    """All of it, however it came."""
    pieces: list[Parsed] = []
    for cut in cuts:
        pieces += parser.push(text[:cut])
        text = text[cut:]
    pieces += [*parser.push(text), *parser.finish(cut=False)]
    calls = [piece.call for piece in pieces if piece.call is not None]
    assert [call.number for call in calls] == list(range(len(calls)))
    return Parsed(
        "".join(piece.text for piece in pieces),
        "".join(piece.reasoning for piece in pieces),
        calls[-1] if calls else None,
    )


@given(st.sampled_from(THOUGHTS), st.lists(st.integers(1, 9)))
def test_thoughts_are_found_however_they_come(said: tuple[bool, str, Parsed], cuts: list[int]) -> None:
    begun, text, wanted = said
    assert parsed(CommonParser(COUNT, ReasoningParser(begun=begun)), text, cuts) == wanted


SAID: list[tuple[str, Parsed]] = [
    ("<|system|>Hm<|user|>Four.<|end|>", Parsed("Four.", "Hm")),
    (f"Let me see. <|tool|>{HENS}<|end|>", Parsed("Let me see. ", "", CALL)),
    (f"<|tool|>{HENS}<|end|><|tool|>{HENS}", Parsed("", "", CALL._replace(number=1))),
    (f"<|tool|>{HENS.replace('count', 'launch')}<|end|>", Parsed(HENS.replace("count", "launch"))),
    ("<|tool|>{broken<|end|>", Parsed("<|tool|>{broken<|end|>")),
    ("", Parsed()),
]


@given(st.sampled_from(SAID), st.lists(st.integers(1, 9)))
def test_a_response_template_is_read_however_it_comes(said: tuple[str, Parsed], cuts: list[int]) -> None:
    chat_parsing = pytest.importorskip("transformers.utils.chat_parsing")
    theirs = chat_parsing.ResponseParser(RESPONSE_TEMPLATE, prefix="<|user|>How many?<|end|><|assistant|>")
    assert parsed(TemplateParser(theirs, COUNT), said[0], cuts) == said[1]


@given(st.integers(len('{"name": "count", "arguments": '), len(HENS) - 1), st.lists(st.integers(1, 9)))
def test_a_response_templates_call_that_the_limit_cuts_is_a_call(length: int, cuts: list[int]) -> None:
    chat_parsing = pytest.importorskip("transformers.utils.chat_parsing")
    theirs = chat_parsing.ResponseParser(RESPONSE_TEMPLATE, prefix="<|user|>How many?<|end|><|assistant|>")
    parser, text, pieces = TemplateParser(theirs, COUNT), f"Hm. <|tool|>{HENS[:length]}", []
    for cut in cuts:
        pieces += parser.push(text[:cut])
        text = text[cut:]
    pieces += [*parser.push(text), *parser.finish(cut=True)]
    assert "".join(piece.text for piece in pieces) == "Hm. "
    arguments = HENS[len('{"name": "count", "arguments": ') : length]
    assert [piece.call for piece in pieces if piece.call] == [CallPart(0, "count", arguments, cut=True)]


CHAT: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "How many?"}]}


@in_virtual_time
async def test_every_api_tells_what_the_model_thinks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import anthropic

    save_speaking_llama(tmp_path / "model", chat_template=TEMPLATE + "{% if think %}<think>{% endif %}{# </think> #}")
    async with serving(found_on(tmp_path / "model", tmp_path / "founded"), tmp_path) as served:
        says(served.client, monkeypatch, "Hens, hm.</think>\n\nFour.")
        begun = {"chat_template_kwargs": {"think": True}}
        whole = await served.openai.chat.completions.create(**CHAT, extra_body=begun)
        message = whole.choices[0].message
        assert (message.content, message.reasoning_content) == ("Four.", "Hens, hm.")
        assert 0 < whole.usage.completion_tokens_details.reasoning_tokens < whole.usage.completion_tokens
        plain = await served.openai.chat.completions.create(**CHAT)
        assert plain.choices[0].message.content == "Hens, hm.</think>\n\nFour.", "the prompt did not open it"
        says(served.client, monkeypatch, "<think>Hens, hm.</think>\n\nFour.")
        response = await served.openai.responses.create(model=MODEL, input="How many?")
        assert [item.type for item in response.output] == ["reasoning", "message"]
        assert (response.output[0].content[0].text, response.output_text) == ("Hens, hm.", "Four.")
        events = [e async for e in await served.openai.responses.create(model=MODEL, input="How many?", stream=True)]
        thought = [event.delta for event in events if event.type == "response.reasoning_text.delta"]
        assert "".join(thought) == "Hens, hm." and events[-1].response.output_text == "Four."
        client = anthropic.AsyncAnthropic(api_key="none", base_url="http://localhost", http_client=served.http)
        async with client.messages.stream(max_tokens=64, **CHAT) as stream:
            told = await stream.get_final_message()
        assert [(block.type) for block in told.content] == ["thinking", "text"]
        assert (told.content[0].thinking, told.content[1].text) == ("Hens, hm.", "Four.")
        heard = [*CHAT["messages"], told.model_dump(include={"role", "content"}), CHAT["messages"][0]]
        await client.messages.create(model=MODEL, max_tokens=8, messages=heard)
