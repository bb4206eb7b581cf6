"""Conversations: from the format of OpenAI's clients to that of chat templates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

from pydantic import BaseModel

from swarmnode.data.conversation import call_arguments, chat_messages, check_results, content_text
from swarmnode.errors import UsageError
from swarmnode.gateway.http.api_error import ApiError, bad_request
from swarmnode.gateway.http.json_bound import Items

MAX_MESSAGES = 4096
Read = TypeVar("Read")


class ContentPart(BaseModel):
    """Part of a message. Models here read only text."""

    type: str
    text: str | None = None
    refusal: str | None = None


def _read(read: Callable[[Any], Read], given: Any) -> Read:
    """Return what `read` makes of a part of the conversation. Raises ApiError for its UsageError."""
    try:
        return read(given)
    except UsageError as error:
        raise bad_request(str(error), "messages") from None


def text_of(content: str | Sequence[ContentPart] | None) -> str:
    """Return the text of a message's content; empty if `content` is None. Raises ApiError if a part is neither text nor a
    refusal."""
    return _read(content_text, content if content is None or isinstance(content, str) else _fields(content))


def _fields(parts: Sequence[BaseModel]) -> list[dict[str, Any]]:
    return [part.model_dump(exclude_none=True) for part in parts]


def not_text(kind: str) -> ApiError:
    """Return the error for a part of type `kind` that is no text, such as a picture, a sound or a file."""
    return bad_request(f"this model reads only text: leave out the part of type {kind!r}", "messages")


def arguments_of(name: str, text: str) -> Any:
    """Return the arguments of a call of the tool `name`. Raises ApiError if `text` is not JSON."""
    return _read(partial(call_arguments, name), text)


def check_turns(turns: Sequence[dict[str, Any]]) -> None:
    """Raise ApiError if a message has a tool's result, but no earlier message has the call."""
    _read(check_results, turns)


class CalledFunction(BaseModel):
    """Function that was called; `arguments` is JSON text."""

    name: str
    arguments: str = "{}"


class CalledTool(BaseModel):
    """Earlier tool call of the model."""

    id: str = ""
    function: CalledFunction


class Message(BaseModel):
    """Message of a conversation."""

    role: str
    content: str | Items[ContentPart] | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    name: str | None = None
    tool_calls: Items[CalledTool] | None = None
    tool_call_id: str | None = None
    function_call: Any = None
    audio: Any = None


def templated(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return a conversation in the format of chat templates. Raises ApiError if a message is unsupported, or a result has no call
    before it."""
    if any(message.function_call is not None or message.audio is not None for message in messages):
        raise bad_request("function_call and audio are not supported: send calls as tool_calls, and text", "messages")
    return _read(chat_messages, _fields(messages))
