"""Responses in the format of OpenAI's API. Every field that its clients look for is present, even if it is null."""

from __future__ import annotations

from pydantic import BaseModel

from swarmnode.gateway.generation.choice_stream import ChatLogprobs, TextLogprobs
from swarmnode.gateway.generation.response_parser import TokenUsage


class PromptTokens(BaseModel):
    """Details of the prompt's tokens: `cached_tokens` came from a cache."""

    cached_tokens: int = 0


class CompletionTokens(BaseModel):
    """Details of the completion's tokens: `reasoning_tokens` came before the answer."""

    reasoning_tokens: int = 0


class Usage(BaseModel):
    """Token counts of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokens
    completion_tokens_details: CompletionTokens

    @classmethod
    def of(cls, usage: TokenUsage) -> Usage:
        """Convert token counts to this API's fields."""
        return cls(
            prompt_tokens=usage.prompt,
            completion_tokens=usage.completion,
            total_tokens=usage.prompt + usage.completion,
            prompt_tokens_details=PromptTokens(cached_tokens=usage.cached),
            completion_tokens_details=CompletionTokens(reasoning_tokens=usage.reasoning),
        )


class FunctionCall(BaseModel):
    """Function that the model calls; `arguments` is JSON text. In a stream, all parts of a call but the first have no name."""

    name: str | None
    arguments: str


class ToolCallReply(BaseModel):
    """Tool call by the model. In a stream, a part of it: the id is in the first part alone."""

    index: int | None = None
    id: str | None
    type: str = "function"
    function: FunctionCall


class ChatMessage(BaseModel):
    """Message of the model; in a stream, a piece of it."""

    role: str | None = None
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCallReply] | None = None


class ChatChoice(BaseModel):
    """Answer among several, as `message`; in a stream, a piece of it, as `delta`."""

    index: int
    message: ChatMessage | None = None
    delta: ChatMessage | None = None
    finish_reason: str | None = None
    logprobs: ChatLogprobs | None = None


class ChatReply(BaseModel):
    """Answer of a chat, or an event of its stream."""

    id: str
    object: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage | None = None


class TextChoice(BaseModel):
    """Text among several; in a stream, a piece of it. `token_ids` is null unless the request asks for it or the model has no
    tokenizer."""

    index: int
    text: str
    finish_reason: str | None = None
    logprobs: TextLogprobs | None = None
    token_ids: list[int] | None = None


class CompletionReply(BaseModel):
    """Completion, or an event of its stream."""

    id: str
    object: str = "text_completion"
    created: int
    model: str
    choices: list[TextChoice]
    usage: Usage | None = None


class ModelCard(BaseModel):
    """Model of this gateway: a swarm, or one of its adapters. `max_model_len` is the number of positions, as in vLLM. `task` is
    what the model is for: generate, embed, classify, infer (any other module), or train (the swarm only trains it). `parent` is the
    model that an adapter changes, as in vLLM. `system_prompt` and `tool_prompt` tell where system texts and tools go: into the chat
    template's own place, or elsewhere if it has none. They are null if there is no chat template or it is not loaded yet.
    `sampling` has the values that a request gets if it leaves them out; null if they are not known yet, or it writes no text."""

    id: str
    object: str = "model"
    created: int
    owned_by: str = "swarmnode"
    max_model_len: int | None = None
    task: str
    parent: str | None = None
    system_prompt: str | None = None
    tool_prompt: str | None = None
    sampling: dict[str, float] | None = None


class ModelList(BaseModel):
    """Response of GET /v1/models."""

    object: str = "list"
    data: list[ModelCard]


class TokenizeReply(BaseModel):
    """Token ids of a text, in vLLM's format."""

    count: int
    max_model_len: int | None
    tokens: list[int]


class DetokenizeReply(BaseModel):
    """Text of token ids."""

    prompt: str
