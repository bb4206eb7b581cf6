"""What a chat template has no place for is put where it has one, and what goes on is not begun anew."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest
from transformers import PreTrainedTokenizerBase

from swarmnode.cli.use.chat import Conversation
from swarmnode.client.model_files import CachedTokenizer
from swarmnode.data.conversation import with_calls_as_text, without_system
from tests.gateway.conftest import MODEL, Served, found_on, serving
from tests.gateway.scripted import says
from tests.gateway.speaking import save_speaking_llama
from tests.net.virtual import in_virtual_time
from tests.node.conftest import Founded

CHAT, MESSAGES = "/v1/chat/completions", "/v1/messages"
TURNS = "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
BEGIN = "{% if add_generation_prompt %}<|assistant|>{% endif %}"
REFUSES_SYSTEM = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}" + TURNS + BEGIN
)
SKIPS_SYSTEM = TURNS.replace(" in messages", " in messages if message.role in ('user', 'assistant')") + BEGIN
ASKED = [{"role": "user", "content": "How are the hens?"}]
BEGUN = [*ASKED, {"role": "assistant", "content": "The hens are"}]
TOOL = {
    "type": "function",
    "function": {"name": "count", "parameters": {"type": "object", "properties": {"of": {"type": "string"}}}},
}


async def prompt_of(served: Served, prompts: list[list[int]], path: str, body: dict[str, Any]) -> str:
    """What the model is given for a request."""
    answer = await served.http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    tokenizer = await served.client.tokenizer()
    return str(tokenizer.decode(prompts[-1], special_tokens=True))


def found_with(template: str, folder: Path) -> Founded:
    save_speaking_llama(folder / "model", chat_template=template)
    return found_on(folder / "model", folder / "founded")


@in_virtual_time
async def test_a_last_message_of_the_assistant_goes_on(
    founded: Founded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(founded, tmp_path) as served:
        prompts = says(served.client, monkeypatch, " well.")
        goes_on = "<|user|>How are the hens?<|end|><|assistant|>The hens are"
        assert await prompt_of(served, prompts, MESSAGES, {"messages": BEGUN, "max_tokens": 5}) == goes_on
        blocks = [*ASKED, {"role": "assistant", "content": [{"type": "text", "text": "The hens are"}]}]
        assert await prompt_of(served, prompts, MESSAGES, {"messages": blocks, "max_tokens": 5}) == goes_on
        asked = {"messages": BEGUN, "continue_final_message": True, "add_generation_prompt": False}
        assert await prompt_of(served, prompts, CHAT, asked) == goes_on
        assert await prompt_of(served, prompts, CHAT, {"messages": BEGUN, "continue_final_message": True}) == goes_on
        closed = f"{goes_on}<|end|>"
        assert await prompt_of(served, prompts, CHAT, {"messages": BEGUN}) == f"{closed}<|assistant|>"
        assert await prompt_of(served, prompts, CHAT, {"messages": BEGUN, "add_generation_prompt": False}) == closed
        told = await served.http.post(MESSAGES, json={"messages": BEGUN, "max_tokens": 5})
        assert told.json()["content"] == [{"type": "text", "text": " well."}]
        tokens = (await served.http.post("/tokenize", json=asked)).json()["tokens"]
        counted = await served.http.post(f"{MESSAGES}/count_tokens", json={"messages": BEGUN})
        assert counted.json()["input_tokens"] == len(tokens) == len(prompts[0])


@in_virtual_time
async def test_what_cannot_go_on_is_refused(founded: Founded, tmp_path: Path) -> None:
    async with serving(founded, tmp_path) as served:
        called = {"id": "x", "name": "count", "input": {}, "type": "tool_use"}
        for path, body, words in (
            (CHAT, {"messages": ASKED, "continue_final_message": True}, "of the assistant"),
            (CHAT, {"messages": BEGUN, "continue_final_message": True, "add_generation_prompt": True}, "set only one"),
            (MESSAGES, {"messages": [*ASKED, {"role": "assistant", "content": [called]}]}, "send the tools' results"),
        ):
            answer = await served.http.post(path, json=body)
            assert answer.status_code == 400 and words in answer.json()["error"]["message"]


@pytest.mark.parametrize("template", [REFUSES_SYSTEM, SKIPS_SYSTEM])
@in_virtual_time
async def test_without_a_system_role_its_text_is_before_the_first_user_message(
    template: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(found_with(template, tmp_path), tmp_path) as served:
        prompts = says(served.client, monkeypatch, "Well.")
        expected = "<|user|>Be short.\n\nHow are the hens?<|end|><|assistant|>"
        system = {"role": "system", "content": "Be short."}
        assert await prompt_of(served, prompts, CHAT, {"messages": [system, *ASKED]}) == expected
        developer = {"role": "developer", "content": "Be short."}
        assert await prompt_of(served, prompts, CHAT, {"messages": [developer, *ASKED]}) == expected
        assert await prompt_of(served, prompts, MESSAGES, {"system": "Be short.", "messages": ASKED}) == expected
        asked = {"instructions": "Be short.", "input": "How are the hens?"}
        assert await prompt_of(served, prompts, "/v1/responses", asked) == expected
        card = (await served.http.get(f"/v1/models/{MODEL}")).json()
        assert card["system_prompt"] == "before the first user message"
        async for _ in await Conversation(served.client, system="Be short.").ask("How are the hens?"):
            pass
        assert (await served.client.tokenizer()).decode(prompts[-1], special_tokens=True) == expected


@in_virtual_time
async def test_tools_that_the_template_does_not_show_are_described(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(found_with(TURNS + BEGIN, tmp_path), tmp_path) as served:
        prompts = says(
            served.client, monkeypatch, '<tool_call>\n{"name": "count", "arguments": {"of": "hens"}}\n</tool_call>'
        )
        asked = {"messages": [{"role": "system", "content": "Be short."}, *ASKED], "tools": [TOOL]}
        prompt = await prompt_of(served, prompts, CHAT, asked)
        assert prompt.startswith("<|system|>You may call functions") and prompt.count("<|system|>") == 1
        assert json.dumps(TOOL["function"]) in prompt and "\n\nBe short.<|end|><|user|>" in prompt
        answer = await served.openai.chat.completions.create(model=MODEL, **asked)
        (call,) = answer.choices[0].message.tool_calls
        assert (call.function.name, json.loads(call.function.arguments)) == ("count", {"of": "hens"})
        results = [answer.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": "4"}]
        turns = [message if isinstance(message, dict) else message.model_dump() for message in results]
        after = await prompt_of(served, prompts, CHAT, {**asked, "messages": [*ASKED, *turns]})
        called = '<|assistant|><tool_call>\n{"name": "count", "arguments": {"of": "hens"}}\n</tool_call><|end|>'
        assert f"{called}<|user|><tool_response>\n4\n</tool_response><|end|><|assistant|>" in after
        card = (await served.http.get(f"/v1/models/{MODEL}")).json()
        assert (card["tool_prompt"], card["system_prompt"]) == ("as a system text", "template")


@in_virtual_time
async def test_a_card_tells_that_the_template_shows_all(founded: Founded, tmp_path: Path) -> None:
    async with serving(founded, tmp_path) as served:
        assert (await served.http.post("/tokenize", json={"messages": ASKED})).status_code == 200  # it is loaded by now
        card = (await served.http.get(f"/v1/models/{MODEL}")).json()
        assert (card["tool_prompt"], card["system_prompt"]) == ("template", "template")


@in_virtual_time
async def test_a_role_that_the_template_leaves_out_is_refused(tmp_path: Path) -> None:
    async with serving(found_with(SKIPS_SYSTEM, tmp_path), tmp_path) as served:
        messages = [*ASKED, {"role": "wizard", "content": "hi"}]
        with pytest.raises(openai.BadRequestError, match="shows no messages of the role 'wizard'"):
            await served.openai.chat.completions.create(model=MODEL, messages=messages)


def test_texts_of_the_system_wait_for_the_user() -> None:
    system, user = {"role": "system", "content": "s"}, {"role": "user", "content": "u"}
    answer = {"role": "assistant", "content": "a"}
    assert without_system([system, user, answer, system, user]) == [
        {"role": "user", "content": "s\n\nu"},
        answer,
        {"role": "user", "content": "s\n\nu"},
    ]
    assert without_system([user, answer, system]) == [user, answer, {"role": "user", "content": "s"}]
    assert without_system([user]) == [user]


def test_results_of_tools_are_one_message_with_what_the_user_says() -> None:
    called = {"role": "assistant", "content": "So.", "tool_calls": [{"function": {"name": "f", "arguments": {}}}] * 2}
    results = [{"role": "tool", "content": each, "tool_call_id": each} for each in "12"]
    user = {"role": "user", "content": "And?"}
    first, second = with_calls_as_text([called, *results, user])
    assert first["content"].count("<tool_call>") == 2 and first["content"].startswith("So.\n<tool_call>")
    assert second["content"] == ("<tool_response>\n1\n</tool_response>\n<tool_response>\n2\n</tool_response>\nAnd?")


LONG = "q" * 100_000
SHOWS_ALL = (
    "{{ tools | tojson if tools else '' }}{{ extra or '' }}{% for message in messages %}<|{{ message.role }}|>"
    "{{ message.name or '' }}{{ message.content }}{{ message.tool_calls | tojson if message.tool_calls else '' }}<|end|>"
    "{% endfor %}" + BEGIN
)


def openai_tool(**changes: Any) -> dict[str, Any]:
    return {"type": "function", "function": {**TOOL["function"], **changes}}


def called(arguments: str, result: str) -> list[dict[str, Any]]:
    call = {"id": "c1", "type": "function", "function": {"name": "count", "arguments": arguments}}
    turns = [*ASKED, {"role": "assistant", "content": None, "tool_calls": [call]}]
    return [*turns, {"role": "tool", "tool_call_id": "c1", "content": result}]


def long_requests() -> list[tuple[str, dict[str, Any]]]:
    """Requests with one long text each, wherever a prompt may have one, of all APIs."""
    properties = {LONG: {"type": "string"}}
    tools = [openai_tool(description=LONG), openai_tool(name=LONG), openai_tool(parameters={"properties": properties})]
    chats: list[dict[str, Any]] = [{"messages": ASKED, "tools": [tool]} for tool in tools]
    chats.append({"messages": ASKED, "tools": [openai_tool(name=f"n{number}") for number in range(250)]})
    chats += [{"messages": called(json.dumps({"of": LONG}), "1")}, {"messages": called("{}", LONG)}]
    chats += [{"messages": [{"role": "system", "content": LONG}, *ASKED]}, {"messages": [{**ASKED[0], "name": LONG}]}]
    chats += [{"messages": ASKED, "chat_template_kwargs": {"extra": LONG}}, {"messages": [{**ASKED[0], "role": LONG}]}]
    chats.append({"messages": [{**ASKED[0], "role": f"role{number}"} for number in range(100)]})
    found = [(path, chat) for path in (CHAT, "/tokenize") for chat in chats]
    call = {"type": "function_call", "call_id": "c1", "name": "count", "arguments": json.dumps({"of": LONG})}
    result = {"type": "function_call_output", "call_id": "c1", "output": LONG}
    answers: list[dict[str, Any]] = [
        {"input": "hi", "instructions": LONG},
        {"input": [call, {**result, "output": "1"}]},
    ]
    answers.append({"input": [{**call, "arguments": "{}"}, result]})
    answers += [{"input": "hi", "tools": [{"type": "function", **tool["function"]}]} for tool in tools]
    found += [("/v1/responses", answer) for answer in answers]
    use = {"type": "tool_use", "id": "c1", "name": "count", "input": {"of": LONG}}
    told = {"type": "tool_result", "tool_use_id": "c1", "content": LONG}
    turns = [({**use, "input": {"of": LONG}}, {**told, "content": "1"}), ({**use, "input": {}}, told)]
    asked: list[dict[str, Any]] = [{"messages": ASKED, "system": LONG}]
    for one, two in turns:
        messages = [*ASKED, {"role": "assistant", "content": [one]}, {"role": "user", "content": [two]}]
        asked.append({"messages": messages})
    asked += [{"messages": ASKED, "tools": [{"name": "n", "description": LONG, "input_schema": {"type": "object"}}]}]
    asked += [
        {"messages": ASKED, "tools": [{"name": "n", "input_schema": {"type": "object", "properties": properties}}]}
    ]
    return found + [
        (path, {**one, "max_tokens": 5}) for path in (MESSAGES, f"{MESSAGES}/count_tokens") for one in asked
    ]


def record_lengths(patch: Callable[[Any, str, Any], None]) -> list[int]:
    """Let all tokenizers note the length of each text that they get; the first one is 0."""
    lengths = [0]

    def noting(read: Callable[..., Any]) -> Callable[..., Any]:
        def noted(self: Any, text: Any, *arguments: Any, **options: Any) -> Any:
            lengths.append(len(text))
            return read(self, text, *arguments, **options)

        return noted

    patch(PreTrainedTokenizerBase, "__call__", noting(PreTrainedTokenizerBase.__call__))
    patch(CachedTokenizer, "_ids", noting(CachedTokenizer._ids))
    return lengths


@pytest.mark.parametrize("template", [SHOWS_ALL, TURNS + BEGIN], ids=["shows all", "shows turns"])
@in_virtual_time
async def test_the_whole_prompt_counts_before_it_is_tokenized(
    template: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_speaking_llama(tmp_path / "model", chat_template=template, max_position_embeddings=64)
    async with serving(found_on(tmp_path / "model", tmp_path / "founded"), tmp_path) as served:
        lengths = record_lengths(monkeypatch.setattr)
        short = await served.http.post(CHAT, json={"messages": ASKED, "max_tokens": 1})
        assert short.status_code == 200 and max(lengths) > len("How are the hens?")
        for path, body in long_requests():
            answer = await served.http.post(path, json=body)
            shown = (
                template == SHOWS_ALL or answer.status_code != 200
            )  # texts that the template leaves out are no prompt
            assert not shown or answer.status_code == 400, (path, str(body)[:200], answer.text[:200])
            assert max(lengths) <= 64 * 128, (path, str(body)[:200])
        assert len(lengths) < 100, "unusual roles were tried one by one"
