"""Conversations as OpenAI's clients write them, and as chat templates take them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pydantic import BaseModel

from swarmnode.gateway.http.api_error import ApiError, bad_request
from swarmnode.gateway.http.json_bound import Items

ASSISTANT = "assistant"
MAX_MESSAGES = 4096
TEXT_PARTS = frozenset({"text", "input_text", "output_text"})


class ContentPart(BaseModel):
    """A part of a message. Models here read text."""

    type: str
    text: str | None = None
    refusal: str | None = None


def text_of(content: str | Sequence[ContentPart] | None) -> str:
    """Its text. Raises ApiError where there is anything else in it."""
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(part.refusal or "" if part.type == "refusal" else _text_in(part) for part in content)


def _text_in(part: ContentPart) -> str:
    if part.type not in TEXT_PARTS:
        raise not_text(part.type)
    if part.text is None:
        raise bad_request(f"a part of type {part.type!r} has no text", "messages")
    return part.text


def not_text(kind: str) -> ApiError:
    """For a part of this type, be it a picture, a sound or a file."""
    return bad_request(f"this model reads text only: a part of type {kind!r} says nothing to it", "messages")


def template_call(id: str, name: str, arguments: Any) -> dict[str, Any]:
    """A call that the model made before, as chat templates expect it, in which arguments are values."""
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def arguments_of(name: str, text: str) -> Any:
    """The arguments of a call of this tool. Raises ApiError where the text is no JSON."""
    try:
        return json.loads(text or "{}")
    except (ValueError, RecursionError):
        raise bad_request(f"the arguments of a call of {name} are not JSON", "messages") from None


def check_results(messages: Iterable[Mapping[str, Any]]) -> None:
    """Raises ApiError where one tells what a tool gave that no message before it has called."""
    called: set[str] = set()
    for message in messages:
        called.update(call["id"] for call in message.get("tool_calls", ()))
        answered = message.get("tool_call_id")
        if answered is not None and answered not in called:
            raise bad_request(f"no call before it has the id {answered!r} of this result", "messages")


class CalledFunction(BaseModel):
    """`arguments` is JSON."""

    name: str
    arguments: str = "{}"


class CalledTool(BaseModel):
    """A call that the model made before."""

    id: str = ""
    function: CalledFunction

    def as_template_takes_it(self) -> dict[str, Any]:
        """As chat templates expect it. Raises ApiError."""
        name = self.function.name
        return template_call(self.id, name, arguments_of(name, self.function.arguments))


class Message(BaseModel):
    """What one side of a conversation said."""

    role: str
    content: str | Items[ContentPart] | None = None
    reasoning_content: str | None = None
    name: str | None = None
    tool_calls: Items[CalledTool] | None = None
    tool_call_id: str | None = None
    function_call: Any = None
    audio: Any = None

    def as_template_takes_it(self) -> dict[str, Any]:
        """As chat templates expect it, in which content is one text. Raises ApiError where there is anything but text, or nothing
        although no calls say what the model did."""
        if self.content is None and self.role != ASSISTANT:
            raise bad_request(f"a message of the role {self.role!r} needs content", "messages")
        if self.function_call is not None or self.audio is not None:
            raise bad_request("a message says its calls by tool_calls, and has no audio", "messages")
        told: dict[str, Any] = {"role": template_role(self.role), "content": text_of(self.content)}
        if self.tool_calls:
            told["tool_calls"] = [call.as_template_takes_it() for call in self.tool_calls]
        optional = ("reasoning_content", "name", "tool_call_id")
        return told | {key: value for key in optional if (value := getattr(self, key)) is not None}


def template_role(role: str) -> str:
    """As templates know it: developer is the system's newer name."""
    return "system" if role == "developer" else role


def templated(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """A conversation as chat templates expect it. Raises ApiError."""
    told = [message.as_template_takes_it() for message in messages]
    check_results(told)
    return told
