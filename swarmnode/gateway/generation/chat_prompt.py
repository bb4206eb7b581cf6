"""Conversations in the form that a model's chat template accepts: system texts and tools that it has no place for are put
elsewhere."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from swarmnode.client.tokenizer import GREETING, PARAGRAPH, SYSTEM, USER, ChatEnding, Tokenizer, without_system
from swarmnode.gateway.generation.response_parser import CALL_BEGIN, CALL_END
from swarmnode.gateway.generation.tool_use import ToolUse
from swarmnode.gateway.http.api_error import bad_request

Turn = dict[str, Any]
ASSISTANT, TOOL = "assistant", "tool"
BY_TEMPLATE = "template"
MAX_ROLES, MAX_ROLE_CHARS = 8, 64  # of roles that only the model's template may know
USUAL = frozenset({SYSTEM, USER, ASSISTANT, TOOL})
TOOLS = (
    "You may call functions to help with the user's request. These are their signatures, as JSON:\n<tools>\n{tools}\n</tools>\n"
    f"To call one, write a JSON object with its name and its arguments, and nothing else:\n{CALL_BEGIN}\n"
    f'{{{{"name": <name>, "arguments": <arguments>}}}}\n{CALL_END}'
)


class ChatPrompter:
    """Encoder of conversations by the chat template of `tokenizer`. Trials show whether the template has places for a system text
    and for tools."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.shows_system = tokenizer.shows_system
        self.shows_tools = tokenizer.shows(lambda text: ([GREETING], [_trial_tool(text)]))

    def __repr__(self) -> str:
        return (
            f"<ChatPrompter, {'' if self.shows_system else 'no '}system role, {'' if self.shows_tools else 'no '}tools>"
        )

    @property
    def system_place(self) -> str:
        """Place of system texts: the template's own, or before the first user message."""
        return system_place(shows_system=self.shows_system)

    @property
    def tool_place(self) -> str:
        """Place of the tools' descriptions: the template's own, or a system text."""
        return BY_TEMPLATE if self.shows_tools else "as a system text"

    def encode(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: ToolUse = ToolUse(),
        variables: Mapping[str, Any] = MappingProxyType({}),
        ending: ChatEnding = ChatEnding.ANSWER,
        check_text: Callable[[int], None] | None = None,
    ) -> list[int]:
        """Return the token ids of a conversation: `messages`, the `tools` on offer, and further `variables` of the template. Before
        it tokenizes the whole prompt, it calls `check_text` with its number of characters. Raises ApiError for a role that the
        template ignores, CheckpointError if the template cannot be used."""
        turns, offered = list(map(dict, messages)), list(tools.offered)
        self._check_roles(turns)
        if offered and not self.shows_tools:
            turns, offered = with_system(turns, _described(offered)), []
        if not self.shows_tools:
            turns = with_calls_as_text(turns)
        if not self.shows_system:
            turns = without_system(turns)
        return self._tokenizer.encode_messages(turns, offered, variables, ending=ending, check_text=check_text)

    def _check_roles(self, turns: Sequence[Turn]) -> None:
        unusual = {turn["role"] for turn in turns} - USUAL
        if len(unusual) > MAX_ROLES or any(
            len(role) > MAX_ROLE_CHARS for role in unusual
        ):  # each is tried by three prompts
            raise bad_request(
                f"the messages have more than {MAX_ROLES} other roles than {', '.join(sorted(USUAL))}, or one of more than "
                f"{MAX_ROLE_CHARS} characters: use the usual ones",
                "messages",
            )
        for role in unusual:

            def said(text: str, role: str = role) -> tuple[list[Turn], Sequence[Turn]]:
                return [GREETING, {"role": role, "content": text}], ()

            self._tokenizer.encode_messages(*said(""))  # raises CheckpointError if the template refuses the role
            if not self._tokenizer.shows(said):
                raise bad_request(f"the model's chat template shows no messages of the role {role!r}", "messages")


def system_place(*, shows_system: bool) -> str:
    """Return the place of system texts for a template that shows them or not: "template", or "before the first user message"."""
    return BY_TEMPLATE if shows_system else "before the first user message"


def with_calls_as_text(turns: Sequence[Turn]) -> list[Turn]:
    """Return the conversation with tool calls written into the assistant's texts and their results into user messages. Consecutive
    results, and the user's message after them, become one message."""
    told: list[Turn] = []
    answered = False  # the last message holds results
    for turn in turns:
        if turn["role"] == TOOL:
            turn = {"role": USER, "content": f"<tool_response>\n{turn['content']}\n</tool_response>"}
        elif turn["role"] != USER:
            answered = False
        if calls := turn.get("tool_calls"):
            written = [f"{CALL_BEGIN}\n{json.dumps(_called(call))}\n{CALL_END}" for call in calls]
            content = "\n".join(filter(None, [turn["content"], *written]))
            turn = {"role": turn["role"], "content": content}
        if answered and turn["role"] == USER:
            told[-1] = {**told[-1], "content": f"{told[-1]['content']}\n{turn['content']}"}
        else:
            told.append(turn)
        answered = turn["role"] == USER and turn["content"].startswith("<tool_response>")
    return told


def _called(call: Mapping[str, Any]) -> dict[str, Any]:
    return {"name": call["function"]["name"], "arguments": call["function"]["arguments"]}


def with_system(turns: Sequence[Turn], text: str) -> list[Turn]:
    """Return the conversation with the system text `text` at its beginning, joined with the system text that is already there."""
    if turns and turns[0]["role"] == SYSTEM:
        return [{**turns[0], "content": PARAGRAPH.join([text, turns[0]["content"]])}, *turns[1:]]
    return [{"role": SYSTEM, "content": text}, *turns]


def _described(tools: Sequence[Mapping[str, Any]]) -> str:
    return TOOLS.format(tools="\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools))


def _trial_tool(name: str) -> Turn:
    function = {"name": name, "description": name, "parameters": {"type": "object", "properties": {}}}
    return {"type": "function", "function": function}
