"""What OpenAI's clients are told by /v1/responses. Every field that they look for is there, also where it is null."""

from __future__ import annotations

from pydantic import BaseModel, Field

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


class OutputTokens(BaseModel):
    """`reasoning_tokens`: of the output's, those before the answer."""

    reasoning_tokens: int = 0


class ResponseUsage(BaseModel):
    """How many tokens a response was."""

    input_tokens: int
    input_tokens_details: PromptTokens
    output_tokens: int
    output_tokens_details: OutputTokens = Field(default_factory=OutputTokens)
    total_tokens: int

    @classmethod
    def of(cls, usage: TokenUsage) -> ResponseUsage:
        """The same in this API's words."""
        return cls(
            input_tokens=usage.prompt,
            input_tokens_details=PromptTokens(cached_tokens=usage.cached),
            output_tokens=usage.completion,
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
    output: list[OutputMessage]
    parallel_tool_calls: bool = False
    temperature: float | None
    tool_choice: str = "none"
    tools: list[str] = []
    top_p: float | None
    usage: ResponseUsage | None
    store: bool = False
