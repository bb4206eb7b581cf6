"""Conversations as OpenAI's clients write them, and as chat templates take them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel

from swarmnode.gateway.http.api_error import ApiError

MAX_MESSAGES = 4096


class ContentPart(BaseModel):
    """A part of a message. Models here read text."""

    type: str
    text: str | None = None


def text_of(content: str | Sequence[ContentPart] | None) -> str:
    """Its text. Raises ApiError where there is anything else in it."""
    if content is None or isinstance(content, str):
        return content or ""
    for part in content:
        if part.text is None:
            raise ApiError(
                400,
                f"this model reads text only: a part of type {part.type!r} says nothing to it",
                parameter="messages",
            )
    return "".join(part.text or "" for part in content)


class CalledFunction(BaseModel):
    """`arguments` is JSON."""

    name: str
    arguments: str = "{}"


class CalledTool(BaseModel):
    """A call that the model made before."""

    id: str = ""
    function: CalledFunction

    def as_template_takes_it(self) -> dict[str, Any]:
        """As chat templates expect it, in which arguments are values. Raises ApiError where they are no JSON."""
        try:
            arguments = json.loads(self.function.arguments)
        except (ValueError, RecursionError):
            raise ApiError(
                400, f"the arguments of a call of {self.function.name} are not JSON", parameter="messages"
            ) from None
        return {"id": self.id, "type": "function", "function": {"name": self.function.name, "arguments": arguments}}


class Message(BaseModel):
    """What one side of a conversation said."""

    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[CalledTool] | None = None
    tool_call_id: str | None = None

    def as_template_takes_it(self) -> dict[str, Any]:
        """As chat templates expect it, in which content is one text. Raises ApiError where there is anything but text."""
        role = "system" if self.role == "developer" else self.role  # its newer name, which templates do not know
        told: dict[str, Any] = {"role": role, "content": text_of(self.content)}
        if self.tool_calls:
            told["tool_calls"] = [call.as_template_takes_it() for call in self.tool_calls]
        return told | {key: value for key in ("name", "tool_call_id") if (value := getattr(self, key)) is not None}
