"""What OpenAI's clients are told. Every field that they look for is there, also where it is null."""

from __future__ import annotations

from pydantic import BaseModel, Field

from swarmnode.gateway.logprobs import ChatLogprobs, TextLogprobs


class PromptTokens(BaseModel):
    """`cached_tokens`: of the prompt's, those that were not computed again."""

    cached_tokens: int = 0


class Usage(BaseModel):
    """How many tokens a request was."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokens = Field(default_factory=PromptTokens)


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
    """One of the texts, in a stream a piece of it."""

    index: int
    text: str
    finish_reason: str | None = None
    logprobs: TextLogprobs | None = None


class CompletionReply(BaseModel):
    """A completion, or an event of a stream."""

    id: str
    object: str = "text_completion"
    created: int
    model: str
    choices: list[TextChoice]
    usage: Usage | None = None


class ModelCard(BaseModel):
    """A swarm. `max_model_len`: positions that it has, as vLLM tells them."""

    id: str
    object: str = "model"
    created: int
    owned_by: str = "swarmnode"
    max_model_len: int | None = None


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


class TextBlock(BaseModel):
    """Text in a message of Anthropic's API."""

    type: str = "text"
    text: str


class MessageUsage(BaseModel):
    """How many tokens a message was."""

    input_tokens: int
    output_tokens: int
    cache_read_input_tokens: int = 0
    cache_creation_input_tokens: int = 0


class MessageReply(BaseModel):
    """A message of Anthropic's API."""

    id: str
    type: str = "message"
    role: str = "assistant"
    model: str
    content: list[TextBlock]
    stop_reason: str | None
    stop_sequence: str | None
    usage: MessageUsage


class TokenCount(BaseModel):
    """POST /v1/messages/count_tokens"""

    input_tokens: int


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
    def of(cls, usage: Usage) -> ResponseUsage:
        """The same in this API's words."""
        return cls(
            input_tokens=usage.prompt_tokens,
            input_tokens_details=usage.prompt_tokens_details,
            output_tokens=usage.completion_tokens,
            total_tokens=usage.total_tokens,
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
