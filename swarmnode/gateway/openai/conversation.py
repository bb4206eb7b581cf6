"""Conversations: from the format of OpenAI's clients to that of chat templates."""

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
    """Part of a message. Models here read only text."""

    type: str
    text: str | None = None
    refusal: str | None = None


def text_of(content: str | Sequence[ContentPart] | None) -> str:
    """Return the text of a message's content; empty if `content` is None. Raises ApiError if a part is neither text nor a
    refusal."""
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(part.refusal or "" if part.type == "refusal" else _text_in(part) for part in content)


def _text_in(part: ContentPart) -> str:
    if part.type not in TEXT_PARTS:
        raise not_text(part.type)
    if part.text is None:
        raise bad_request(f"a part of type {part.type!r} has no text: send its text in the field text", "messages")
    return part.text


def not_text(kind: str) -> ApiError:
    """Return the error for a part of type `kind` that is no text, such as a picture, a sound or a file."""
    return bad_request(f"this model reads only text: leave out the part of type {kind!r}", "messages")


def template_call(id: str, name: str, arguments: Any) -> dict[str, Any]:
    """Return an earlier tool call of the model in the format of chat templates: there `arguments` are values, not JSON text."""
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def arguments_of(name: str, text: str) -> Any:
    """Return the arguments of a call of the tool `name`. Raises ApiError if `text` is not JSON."""
    try:
        return json.loads(text or "{}")
    except (ValueError, RecursionError):
        raise bad_request(
            f"the arguments of a call of {name} are not JSON: send them as the model wrote them", "messages"
        ) from None


def check_results(messages: Iterable[Mapping[str, Any]]) -> None:
    """Raise ApiError if a message has a tool's result, but no earlier message has the call."""
    called: set[str] = set()
    for message in messages:
        called.update(call["id"] for call in message.get("tool_calls", ()))
        answered = message.get("tool_call_id")
        if answered is not None and answered not in called:
            raise bad_request(
                f"the id {answered!r} of a tool's result belongs to no earlier call: send the message with the call, too",
                "messages",
            )


class CalledFunction(BaseModel):
    """Function that was called; `arguments` is JSON text."""

    name: str
    arguments: str = "{}"


class CalledTool(BaseModel):
    """Earlier tool call of the model."""

    id: str = ""
    function: CalledFunction

    def as_template_takes_it(self) -> dict[str, Any]:
        """Return the call in the format of chat templates. Raises ApiError if its arguments are not JSON."""
        name = self.function.name
        return template_call(self.id, name, arguments_of(name, self.function.arguments))


class Message(BaseModel):
    """Message of a conversation."""

    role: str
    content: str | Items[ContentPart] | None = None
    reasoning_content: str | None = None
    name: str | None = None
    tool_calls: Items[CalledTool] | None = None
    tool_call_id: str | None = None
    function_call: Any = None
    audio: Any = None

    def as_template_takes_it(self) -> dict[str, Any]:
        """Return the message in the format of chat templates: there content is one text. Raises ApiError if a part is not text,
        or if the content is missing and the role is not assistant."""
        if self.content is None and self.role != ASSISTANT:
            raise bad_request(f"a message of the role {self.role!r} has no content: send its text", "messages")
        if self.function_call is not None or self.audio is not None:
            raise bad_request(
                "function_call and audio are not supported: send calls as tool_calls, and text", "messages"
            )
        told: dict[str, Any] = {"role": template_role(self.role), "content": text_of(self.content)}
        if self.tool_calls:
            told["tool_calls"] = [call.as_template_takes_it() for call in self.tool_calls]
        optional = ("reasoning_content", "name", "tool_call_id")
        return told | {key: value for key in optional if (value := getattr(self, key)) is not None}


def template_role(role: str) -> str:
    """Return the name of a role in chat templates: "developer" is the system's newer name."""
    return "system" if role == "developer" else role


def templated(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return a conversation in the format of chat templates. Raises ApiError if a message is unsupported, or a result has no call
    before it."""
    told = [message.as_template_takes_it() for message in messages]
    check_results(told)
    return told
