"""Conversations as Anthropic's clients write them: a message is a row of blocks, of which calls and their results are some."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from pydantic import BaseModel

from swarmnode.gateway.openai.conversation import ContentPart, check_results, not_text, template_call, text_of


class ContentBlock(BaseModel):
    """Text, what the model thought, a call of a tool, or what it gave."""

    type: str
    text: str | None = None
    thinking: str | None = None
    id: str = ""
    name: str = ""
    input: dict[str, Any] = {}
    tool_use_id: str = ""
    content: str | list[ContentPart] | None = None
    is_error: bool | None = None


class MessageParam(BaseModel):
    """What one side of a conversation said."""

    role: str
    content: str | list[ContentBlock]

    def turns(self) -> list[dict[str, Any]]:
        """As chat templates expect it, in which each result of a tool is a turn of its own. Raises ApiError."""
        if isinstance(self.content, str):
            return [{"role": self.role, "content": self.content}]
        results = [_result(block) for block in self.content if block.type == "tool_result"]
        said = [block for block in self.content if block.type != "tool_result"]
        return [*results, self._turn(said)] if said or not results else results

    def _turn(self, blocks: Sequence[ContentBlock]) -> dict[str, Any]:
        text, thought, calls = "", "", []
        for block in blocks:
            if block.type == "tool_use":
                calls.append(template_call(block.id, block.name, block.input))
            elif block.type == "thinking":
                thought += block.thinking or ""
            elif block.type == "text" and block.text is not None:
                text += block.text
            elif block.type != "redacted_thinking":  # which only its writer can read
                raise not_text(block.type)
        told: dict[str, Any] = {"role": self.role, "content": text}
        return told | {key: said for key, said in (("tool_calls", calls), ("reasoning_content", thought)) if said}


def _result(block: ContentBlock) -> dict[str, Any]:
    text = text_of(block.content)
    return {"role": "tool", "content": f"Error: {text}" if block.is_error else text, "tool_call_id": block.tool_use_id}


def templated_blocks(messages: Iterable[MessageParam]) -> list[dict[str, Any]]:
    """A conversation as chat templates expect it. Raises ApiError."""
    turns = [turn for message in messages for turn in message.turns()]
    check_results(turns)
    return turns
