"""Requests for chats and completions in the format of OpenAI's API.

Conversations: from the format of OpenAI's clients to that of chat templates.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated, Any, Literal, TypeVar, cast

from pydantic import AfterValidator, BaseModel, Field

from swarmnode.codec.body import MAX_POSITIONS
from swarmnode.data.conversation import (
    ASSISTANT,
    ChatEnding,
    call_arguments,
    chat_messages,
    chat_tool,
    check_results,
    content_text,
)
from swarmnode.errors import UsageError
from swarmnode.gateway.generation.request_fields import (
    AUTO,
    MAX_TOOLS,
    REQUIRED,
    Logprobs,
    NewTokens,
    SamplingFields,
    Tool,
    ToolUse,
)
from swarmnode.gateway.http.api_error import ApiError, bad_request
from swarmnode.gateway.http.body_route import Items, WholeNumber

MAX_MESSAGES = 4096
Read = TypeVar("Read")


class ContentPart(BaseModel):
    """Part of a message. Models here read only text."""

    type: str
    text: str | None = None
    refusal: str | None = None


def _read(read: Callable[[Any], Read], value: Any) -> Read:
    """Return what `read` makes of a part of the conversation. Raises ApiError for its UsageError."""
    try:
        return read(value)
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


Texts = str | Items[WholeNumber] | Items[str] | Items[Items[WholeNumber]]
"""Text or row of token ids, or a list of either."""


def each_of(texts: Texts) -> list[str] | list[list[int]]:
    """Return all texts or rows of token ids as a list."""
    if isinstance(texts, str):
        return [texts]
    if all(isinstance(one, int) for one in texts):
        return [cast("list[int]", texts)]
    return cast("list[str] | list[list[int]]", texts)


class CompletionFields(SamplingFields):
    """Fields that chats and completions share."""

    n: int | None = Field(None, ge=1)
    best_of: int | None = Field(None, ge=1)

    @property
    def texts(self) -> int:
        if self.best_of not in (None, self.n or 1):
            raise bad_request("best_of is not supported: every text is returned, so use n", "best_of")
        return self.n or 1


def _checked_function(function: dict[str, Any]) -> dict[str, Any]:
    """Return the function of a tool as it is, because templates write its fields in their order. Raises ValueError unless it has a
    name, and perhaps a schema of its parameters."""
    if not isinstance(function.get("name"), str) or not isinstance(function.get("parameters") or {}, dict):
        raise ValueError("a function has a name, and its parameters are a JSON schema")
    return function


class OfferedTool(BaseModel):
    """Tool that the model may call."""

    type: Literal["function"] = "function"
    function: Annotated[dict[str, Any], AfterValidator(_checked_function)]


def offered_tools(tools: Sequence[OfferedTool] | None) -> list[Tool]:
    """Return `tools` in the format of chat templates; empty if `tools` is None."""
    return [chat_tool({"function": tool.function}) for tool in tools or ()]


class NamedFunction(BaseModel):
    """Name of a function."""

    name: str


class NamedTool(BaseModel):
    """Tool that the model must call."""

    type: Literal["function"] = "function"
    function: NamedFunction


class ChatRequest(CompletionFields):
    """Body of POST /v1/chat/completions."""

    messages: Items[Message] = Field(min_length=1, max_length=MAX_MESSAGES)
    max_completion_tokens: NewTokens | None = None
    tools: Items[OfferedTool] | None = Field(None, max_length=MAX_TOOLS)
    tool_choice: str | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    verbosity: str | None = None
    echo: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    logprobs: bool = False
    top_logprobs: Logprobs | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False

    @property
    def logprob_count(self) -> int | None:
        if self.top_logprobs and not self.logprobs:
            raise bad_request("top_logprobs works only with logprobs: true", "top_logprobs")
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def tool_use(self) -> ToolUse:
        tools = offered_tools(self.tools)
        parallel = self.parallel_tool_calls is not False
        if isinstance(self.tool_choice, NamedTool):
            return ToolUse.choose(tools, REQUIRED, self.tool_choice.function.name, parallel=parallel)
        return ToolUse.choose(tools, self.tool_choice or AUTO, parallel=parallel)

    @property
    def new_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def conversation(self) -> list[dict[str, Any]]:
        """Return the conversation in the format of chat templates. Raises ApiError if a message is unsupported."""
        if self.echo:
            raise bad_request("echo is not supported in a chat: use /v1/completions", "echo")
        return templated(self.messages)

    @property
    def ending(self) -> ChatEnding:
        """Ending of the conversation: its last message is answered, continued or closed. Raises ApiError."""
        return chat_ending(
            self.messages, continues=self.continue_final_message, begins_answer=self.add_generation_prompt
        )

    @property
    def template_variables(self) -> dict[str, Any]:
        """Further variables of the chat template."""
        hints = {"reasoning_effort": self.reasoning_effort, "verbosity": self.verbosity}
        return {name: hint for name, hint in hints.items() if hint is not None} | (self.chat_template_kwargs or {})


class CompletionRequest(CompletionFields):
    """Body of POST /v1/completions. `prompt` is a text, a row of token ids, or a list of either."""

    prompt: Texts
    max_tokens: Annotated[int, Field(ge=0, le=MAX_POSITIONS)] | None = None
    echo: bool = False
    suffix: str | None = None
    logprobs: Logprobs | None = None
    return_token_ids: bool = False
    add_special_tokens: bool = True

    @property
    def logprob_count(self) -> int | None:
        return self.logprobs

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """All prompts as a list."""
        return each_of(self.prompt)


def chat_ending(messages: Sequence[Message], *, continues: bool, begins_answer: bool | None) -> ChatEnding:
    """Return how a conversation ends, by the fields of vLLM's clients. Raises ApiError if both fields are true, or if the message
    to continue is not the assistant's."""
    if not continues:
        return ChatEnding.CLOSED if begins_answer is False else ChatEnding.ANSWER
    if begins_answer:
        sentence = "an answer cannot begin while the last message is continued: set only one of add_generation_prompt"
        raise bad_request(f"{sentence} and continue_final_message", "continue_final_message")
    if not messages or messages[-1].role != ASSISTANT:
        raise bad_request(
            "only a message of the assistant can be continued: end the messages with one", "continue_final_message"
        )
    return ChatEnding.CONTINUED


class TokenizeRequest(BaseModel):
    """Body of POST /tokenize: a text, or a conversation that the model's chat template turns into a text."""

    model: str = ""
    prompt: str | None = None
    messages: Items[Message] | None = Field(None, max_length=MAX_MESSAGES)
    tools: Items[OfferedTool] | None = Field(None, max_length=MAX_TOOLS)
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    add_special_tokens: bool = True

    @property
    def ending(self) -> ChatEnding:
        """Ending of the conversation: its last message is answered, continued or closed. Raises ApiError."""
        messages = self.messages or ()
        return chat_ending(messages, continues=self.continue_final_message, begins_answer=self.add_generation_prompt)


class DetokenizeRequest(BaseModel):
    """Body of POST /detokenize."""

    model: str = ""
    tokens: Items[WholeNumber]
