"""Requests for chats and completions in the format of OpenAI's API."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, cast

from pydantic import AfterValidator, BaseModel, Field

from swarmnode.codec.body import MAX_POSITIONS
from swarmnode.data.conversation import ASSISTANT, ChatEnding, chat_tool
from swarmnode.gateway.generation.sampling_fields import Logprobs, NewTokens, SamplingFields
from swarmnode.gateway.generation.tool_use import AUTO, MAX_TOOLS, REQUIRED, Tool, ToolUse
from swarmnode.gateway.http.api_error import bad_request
from swarmnode.gateway.http.json_bound import Items, WholeNumber
from swarmnode.gateway.openai.conversation import MAX_MESSAGES, Message, templated

Texts = str | Items[WholeNumber] | Items[str] | Items[Items[WholeNumber]]
"""Text or row of token ids, or a list of either."""


def each_of(given: Texts) -> list[str] | list[list[int]]:
    """Return all texts or rows of token ids as a list."""
    if isinstance(given, str):
        return [given]
    if all(isinstance(one, int) for one in given):
        return [cast("list[int]", given)]
    return cast("list[str] | list[list[int]]", given)


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
    def told_logprobs(self) -> int | None:
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
    def told_logprobs(self) -> int | None:
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
