"""What Anthropic's clients are told."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from swarmnode.gateway.generation.usage import TokenUsage


class TextBlock(BaseModel):
    """Text in a message of Anthropic's API."""

    type: str = "text"
    text: str


class ThinkingBlock(BaseModel):
    """What the model thinks before it answers. Nobody signs it here."""

    type: str = "thinking"
    thinking: str
    signature: str = ""


class ToolUseBlock(BaseModel):
    """A call that the model makes."""

    type: str = "tool_use"
    id: str
    name: str
    input: Any


ReplyBlock = TextBlock | ThinkingBlock | ToolUseBlock


class MessageUsage(BaseModel):
    """How many tokens a message was."""

    input_tokens: int
    output_tokens: int
    cache_read_input_tokens: int = 0
    cache_creation_input_tokens: int = 0

    @classmethod
    def of(cls, usage: TokenUsage) -> MessageUsage:
        """The same in this API's words, in which what was cached is no input."""
        return cls(
            input_tokens=usage.prompt - usage.cached,
            output_tokens=usage.completion,
            cache_read_input_tokens=usage.cached,
        )


class MessageReply(BaseModel):
    """A message of Anthropic's API."""

    id: str
    type: str = "message"
    role: str = "assistant"
    model: str
    content: list[ReplyBlock]
    stop_reason: str | None
    stop_sequence: str | None
    usage: MessageUsage


class TokenCount(BaseModel):
    """POST /v1/messages/count_tokens"""

    input_tokens: int
