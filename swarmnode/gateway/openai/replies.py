"""What OpenAI's clients are told. Every field that they look for is there, also where it is null."""

from __future__ import annotations

from pydantic import BaseModel

from swarmnode.gateway.generation.logprobs import ChatLogprobs, TextLogprobs
from swarmnode.gateway.generation.parts import TokenUsage


class PromptTokens(BaseModel):
    """`cached_tokens`: of the prompt's, those that were not computed again."""

    cached_tokens: int = 0


class CompletionTokens(BaseModel):
    """`reasoning_tokens`: of the completion's, those before the answer."""

    reasoning_tokens: int = 0


class Usage(BaseModel):
    """How many tokens a request was."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokens
    completion_tokens_details: CompletionTokens

    @classmethod
    def of(cls, usage: TokenUsage) -> Usage:
        """The same in this API's words."""
        return cls(
            prompt_tokens=usage.prompt,
            completion_tokens=usage.completion,
            total_tokens=usage.prompt + usage.completion,
            prompt_tokens_details=PromptTokens(cached_tokens=usage.cached),
            completion_tokens_details=CompletionTokens(reasoning_tokens=usage.reasoning),
        )


class FunctionCall(BaseModel):
    """`arguments` is JSON."""

    name: str
    arguments: str


class ToolCallReply(BaseModel):
    """A call that the model makes."""

    index: int | None = None
    id: str
    type: str = "function"
    function: FunctionCall


class ChatMessage(BaseModel):
    """What the model says; in a stream a piece of it."""

    role: str | None = None
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCallReply] | None = None


class ChatChoice(BaseModel):
    """One of the answers: `message`, in a stream `delta`."""

    index: int
    message: ChatMessage | None = None
    delta: ChatMessage | None = None
    finish_reason: str | None = None
    logprobs: ChatLogprobs | None = None


class ChatReply(BaseModel):
    """An answer, or an event of a stream."""

    id: str
    object: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage | None = None


class TextChoice(BaseModel):
    """One of the texts, in a stream a piece of it; `token_ids` where they are wanted, or where there is no tokenizer."""

    index: int
    text: str
    finish_reason: str | None = None
    logprobs: TextLogprobs | None = None
    token_ids: list[int] | None = None


class CompletionReply(BaseModel):
    """A completion, or an event of a stream."""

    id: str
    object: str = "text_completion"
    created: int
    model: str
    choices: list[TextChoice]
    usage: Usage | None = None


class ModelCard(BaseModel):
    """A swarm. `max_model_len`: positions that it has, as vLLM tells them; `task`: what may be asked of it (generate, embed,
    classify; infer of another module, train where it only trains one). `parent`: of an adapter the model that it changes, as vLLM
    tells it. `system_prompt` and `tool_prompt`: where the model's chat template has no place for what the system says or for
    tools, where they are put instead; null without a template, and before it is loaded."""

    id: str
    object: str = "model"
    created: int
    owned_by: str = "swarmnode"
    max_model_len: int | None = None
    task: str
    parent: str | None = None
    system_prompt: str | None = None
    tool_prompt: str | None = None


class ModelList(BaseModel):
    """GET /v1/models"""

    object: str = "list"
    data: list[ModelCard]


class TokenizeReply(BaseModel):
    """The ids of a text, as vLLM tells them."""

    count: int
    max_model_len: int | None
    tokens: list[int]


class DetokenizeReply(BaseModel):
    """The text of ids."""

    prompt: str
