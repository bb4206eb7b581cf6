"""What OpenAI's clients are told by /v1/responses. Every field that they look for is there, also where it is null."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from swarmnode.gateway.generation.usage import TokenUsage
from swarmnode.gateway.openai.replies import PromptTokens


class OutputText(BaseModel):
    """Text in a response."""

    type: str = "output_text"
    text: str
    annotations: list[str] = []
    logprobs: list[str] = []


class OutputMessage(BaseModel):
    """What the model says in a response."""

    id: str
    type: str = "message"
    role: str = "assistant"
    status: str
    content: list[OutputText]


class ReasoningText(BaseModel):
    """What the model thinks."""

    type: str = "reasoning_text"
    text: str


class ReasoningItem(BaseModel):
    """What the model thinks before it answers."""

    id: str
    type: str = "reasoning"
    status: str
    summary: list[str] = []
    content: list[ReasoningText]


class FunctionCallItem(BaseModel):
    """A call that the model makes; `arguments` is JSON."""

    id: str
    type: str = "function_call"
    status: str
    call_id: str
    name: str
    arguments: str


OutputItem = OutputMessage | ReasoningItem | FunctionCallItem


class OutputTokens(BaseModel):
    """`reasoning_tokens`: of the output's, those before the answer."""

    reasoning_tokens: int = 0


class ResponseUsage(BaseModel):
    """How many tokens a response was."""

    input_tokens: int
    input_tokens_details: PromptTokens
    output_tokens: int
    output_tokens_details: OutputTokens
    total_tokens: int

    @classmethod
    def of(cls, usage: TokenUsage) -> ResponseUsage:
        """The same in this API's words."""
        return cls(
            input_tokens=usage.prompt,
            input_tokens_details=PromptTokens(cached_tokens=usage.cached),
            output_tokens=usage.completion,
            output_tokens_details=OutputTokens(reasoning_tokens=usage.reasoning),
            total_tokens=usage.prompt + usage.completion,
        )


class ResponseReply(BaseModel):
    """POST /v1/responses"""

    id: str
    object: str = "response"
    created_at: int
    status: str
    error: None = None
    incomplete_details: dict[str, str] | None
    instructions: str | None
    metadata: dict[str, str] = {}
    model: str
    output: list[OutputItem]
    parallel_tool_calls: bool = True
    temperature: float | None
    tool_choice: str | dict[str, Any] = "auto"
    tools: list[dict[str, Any]] = []
    top_p: float | None
    usage: ResponseUsage | None
    store: bool = False
