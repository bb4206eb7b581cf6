"""Tools: the model is shown them by its template, and what it says is told as calls, however it came."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnode.gateway.generation.response_parser import CallPart, Parsed, ToolCallParser
from tests.gateway.conftest import MODEL, serving
from tests.gateway.scripted import says
from tests.net.virtual import in_virtual_time
from tests.node.conftest import Founded

HENS = '{"name": "count", "arguments": {"what": "hens"}}'
WANTED = {"what": "hens"}
SAID = [  # text of the model, text of the answer, number of calls
    (f"Let me see. <tool_call>{HENS}</tool_call>\n<tool_call>{HENS}</tool_call>", "Let me see. ", 2),
    (HENS.replace("arguments", "parameters"), "", 1),
    (HENS.replace('{"what": "hens"}', json.dumps('{"what": "hens"}')), "", 1),
    (f"{HENS}; {HENS}\n", "", 2),
    (
        f"<tool_call>\n{HENS}\n</tool_call> Now the ducks. <tool_call>{HENS}</tool_call> Done.",
        " Now the ducks.  Done.",
        2,
    ),
    (f"{HENS} That is all.", " That is all.", 1),
    (
        f"<tool_call>{{broken</tool_call>, again: <tool_call>{HENS}</tool_call>",
        "<tool_call>{broken</tool_call>, again: ",
        1,
    ),
    (f"<tool_call>{HENS.replace('hens', '</tool_call>')}</tool_call>", "", 1),
    ("Four. <tool", "Four. <tool", 0),
    ("<tool_call>{broken</tool_call>", "<tool_call>{broken</tool_call>", 0),
    (f"<tool_call>{HENS.replace('count', 'launch')}</tool_call>", None, 0),
    (f"<tool_call>{HENS[:-6]}", None, 0),
    ('{"four": "hens"}', '{"four": "hens"}', 0),
    ('{"name": "hens"} ', '{"name": "hens"} ', 0),
    ("", "", 0),
]
TOOLS = [{"type": "function", "function": {"name": "count", "parameters": {"type": "object"}}}]
ASKED = {"model": MODEL, "messages": [{"role": "user", "content": "How many?"}], "tools": TOOLS}


def read(parser: ToolCallParser, text: str, cuts: list[int], *, cut: bool = False) -> list[Parsed]:
    """All parts of `text`, however it came."""
    parts: list[Parsed] = []
    for size in cuts:
        parts += parser.push(text[:size])
        text = text[size:]
    return [*parts, *parser.push(text), *parser.finish(cut=cut)]


@given(st.sampled_from(SAID), st.lists(st.integers(1, 9)))
def test_calls_are_found_however_they_come(said: tuple[str, str | None, int], cuts: list[int]) -> None:
    text, told, count = said
    parts = read(ToolCallParser({"count"}), text, cuts)
    assert "".join(part.text for part in parts) == (text if told is None else told)
    calls = [part.call for part in parts if part.call is not None]
    assert [(call.number, call.name) for call in calls] == [(number, "count") for number in range(count)]
    expected = {"what": "</tool_call>"} if 'what": "</tool' in text else WANTED
    assert all(json.loads(call.arguments) == expected for call in calls)


ARGUMENTS = st.dictionaries(st.text(), st.recursive(st.none() | st.booleans() | st.text(), st.lists, max_leaves=4))


@given(
    ARGUMENTS, st.sampled_from([{"count"}, {"count", "weigh"}]), st.sampled_from([None, 1]), st.lists(st.integers(1, 9))
)
def test_a_forced_call_comes_in_parts(
    arguments: dict[str, object], names: set[str], indent: int | None, cuts: list[int]
) -> None:
    body = json.dumps({"name": "count", "arguments": arguments}, indent=indent)
    parser = ToolCallParser(names, names)
    first = parser.push(body[:1])
    assert (first == [Parsed(call=CallPart(0, "count"))]) is (len(names) == 1), "a name that is known comes at once"
    parts = [part.call for part in [*first, *read(parser, body[1:], cuts)] if any(part)]
    assert all(part is not None and (part.number, part.name, part.cut) == (0, "count", False) for part in parts)
    assert json.loads("".join(part.arguments for part in parts if part)) == arguments


@given(ARGUMENTS, st.integers(1, 200), st.sampled_from([(), ("count",)]), st.booleans())
def test_a_cut_call_is_a_call_with_its_arguments_so_far(
    arguments: dict[str, object], length: int, forced: tuple[str, ...], tagged: bool
) -> None:
    body = json.dumps({"name": "count", "arguments": arguments})
    cut = body[: min(length, len(body) - 2)]
    begin = len('{"name": "count", "arguments": ')
    parts = read(
        ToolCallParser({"count"}, forced), ("<tool_call>" if tagged and not forced else "") + cut, [], cut=True
    )
    calls = [part.call for part in parts if part.call is not None]
    if forced or len(cut) >= len('{"name": "count"'):
        assert "".join(part.text for part in parts) == "" and calls[-1].cut
        assert "".join(call.arguments for call in calls) == cut[begin:]
    elif tagged:
        assert not any(map(any, parts)), "no tool is known yet"


@given(
    st.integers(0, 2),
    st.integers(1, 80),
    st.sampled_from([{"count"}, {"count", "weigh"}]),
    st.sampled_from(["", " ", "\n "]),
)
def test_forced_calls_that_are_cut_anywhere_are_never_text(
    before: int, length: int, names: set[str], space: str
) -> None:
    body = f"{space}{HENS}"
    cut = body[: min(length, len(body) - 1)]
    parts = read(ToolCallParser(names, names), f"{HENS}; " * before + cut, [5, 1, 9], cut=True)
    assert not "".join(part.text for part in parts).strip()
    calls = [part.call for part in parts if part.call is not None]
    told = {n: "".join(call.arguments for call in calls if call.number == n) for n in {call.number for call in calls}}
    assert all(json.loads(told[number]) == WANTED for number in range(before))
    if before in told:
        begin = body.index('{"what"')
        assert told[before] == cut[begin : len(body) - 1] and (calls[-1].cut or len(cut) == len(body) - 1)
    else:
        assert before or len(names) > 1, "the only name is known from the beginning"


@in_virtual_time
async def test_a_stop_string_cuts_a_forced_call_as_the_limit_does(
    founded: Founded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In two choices at once, whole and streamed."""
    begin = HENS.index('{"what"')
    async with serving(founded, tmp_path) as served:
        says(served.client, monkeypatch, HENS)
        for stop in ('"name"', "oun", '": {', '"what', "hens", "}}"):
            chat = {**ASKED, "tool_choice": "required", "stop": [stop], "n": 2}
            arguments = HENS[begin : max(begin, HENS.index(stop))]
            for choice in (await served.openai.chat.completions.create(**chat)).choices:
                [call] = choice.message.tool_calls
                told = (call.function.name, call.function.arguments, choice.message.content, choice.finish_reason)
                assert told == ("count", arguments, None, "stop")
            chunks = [chunk async for chunk in await served.openai.chat.completions.create(stream=True, **chat)]
            for index in range(2):
                own = [choice for chunk in chunks for choice in chunk.choices if choice.index == index]
                calls = [call for choice in own for call in choice.delta.tool_calls or ()]
                assert calls[0].function.name == "count" and not any(choice.delta.content for choice in own)
                assert "".join(call.function.arguments for call in calls) == arguments
                assert own[-1].finish_reason == "stop"


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
        called = [call for chunk in chunks for call in chunk.delta.tool_calls or ()]
        assert [call.function.name for call in called] == ["count", "count"] and [call.index for call in called] == [
            0,
            1,
        ]
        assert chunks[-1].finish_reason == "tool_calls"
        answer = {"role": "tool", "content": "4", "tool_call_id": whole.message.tool_calls[0].id}
        heard = [*ASKED["messages"], whole.message.model_dump(exclude_none=True), answer]
        await served.openai.chat.completions.create(**{**ASKED, "messages": heard, "tool_choice": "none"})
    assert "parameters" in tokenizer.decode(prompts[0]) and "parameters" not in tokenizer.decode(prompts[2])
    assert tokenizer.decode(prompts[2]).endswith("4\n</tool_response>")


@in_virtual_time
async def test_a_forced_call_streams_and_a_cut_one_keeps_its_arguments(
    founded: Founded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the three APIs of chats, by their own clients."""
    import anthropic

    tool = TOOLS[0]["function"]
    flat = {"model": MODEL, "input": "How many?", "tools": [{"type": "function", **tool}], "tool_choice": "required"}
    theirs = {"model": MODEL, "messages": ASKED["messages"], "max_tokens": 64, "tool_choice": {"type": "any"}}
    theirs["tools"] = [{"name": "count", "input_schema": tool["parameters"]}]
    async with serving(founded, tmp_path) as served:
        claude = anthropic.AsyncAnthropic(api_key="none", base_url="http://localhost", http_client=served.http)
        for said, ending in ((HENS, "tool_calls"), (HENS[:-5], "length")):
            arguments = said[len('{"name": "count", "arguments": ') :].removesuffix("}}") + "}" * (said == HENS)
            says(served.client, monkeypatch, said)
            chat = {**ASKED, "tool_choice": "required"}
            deltas = [e.choices[0] async for e in await served.openai.chat.completions.create(stream=True, **chat)]
            calls = [call for each in deltas for call in each.delta.tool_calls or ()]
            assert (calls[0].function.name, calls[0].function.arguments) == ("count", "") and len(calls) > 4
            assert calls[0].id and not any(call.id or call.function.name for call in calls[1:])
            assert "".join(call.function.arguments for call in calls) == arguments
            assert deltas[-1].finish_reason == ending and not any(each.delta.content for each in deltas)
            [whole] = (await served.openai.chat.completions.create(**chat)).choices
            [call] = whole.message.tool_calls
            assert (call.function.arguments, whole.finish_reason, whole.message.content) == (arguments, ending, None)
            events = [event async for event in await served.openai.responses.create(stream=True, **flat)]
            parts = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
            [item] = events[-1].response.output
            assert len(parts) > 4 and "".join(parts) == arguments == item.arguments
            assert events[-1].response.status == ("completed" if said == HENS else "incomplete")
            async with claude.messages.stream(**theirs) as stream:
                pieces = [event.partial_json async for event in stream if event.type == "input_json"]
                told = await stream.get_final_message()
            assert "".join(pieces) == arguments and len(pieces) > 4
            block = (await claude.messages.create(**theirs)).content[0]
            assert block.name == told.content[0].name == "count"
            assert told.stop_reason == ("tool_use" if said == HENS else "max_tokens")
            assert said != HENS or block.input == told.content[0].input == WANTED


@in_virtual_time
async def test_a_stream_is_not_silent_while_a_call_is_held_back(
    founded: Founded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(founded, tmp_path) as served:
        says(served.client, monkeypatch, HENS * 2, pause_s=1.0)
        async with served.http.stream("POST", "/v1/chat/completions", json={**ASKED, "stream": True}) as answer:
            pieces = [piece async for piece in answer.aiter_text()]
    assert "".join(pieces).count(": waiting\n\n") >= 2
    lines = "".join(pieces).replace(": waiting\n\n", "").split("\n\n")
    assert all(line.startswith("data: ") for line in lines if line), "comments stand between events"
