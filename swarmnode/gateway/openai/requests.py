"""What OpenAI's clients ask of chats and completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, cast

from pydantic import BaseModel, Field

from swarmnode.client.tokenizer import ChatEnding
from swarmnode.codec.body import MAX_POSITIONS
from swarmnode.gateway.generation.sampling_fields import Logprobs, NewTokens, SamplingFields
from swarmnode.gateway.generation.tool_use import AUTO, MAX_TOOLS, REQUIRED, Tool, ToolUse
from swarmnode.gateway.http.api_error import bad_request
from swarmnode.gateway.http.json_bound import Items, WholeNumber
from swarmnode.gateway.openai.conversation import ASSISTANT, MAX_MESSAGES, Message, templated

Texts = str | Items[WholeNumber] | Items[str] | Items[Items[WholeNumber]]
"""A text, token ids, or several of one of these"""


def each_of(given: Texts) -> list[str] | list[list[int]]:
    """Return each of the texts or rows of token ids."""
    if isinstance(given, str):
        return [given]
    if all(isinstance(one, int) for one in given):
        return [cast("list[int]", given)]
    return cast("list[str] | list[list[int]]", given)


class CompletionFields(SamplingFields):
    """What chats and completions have in common."""

    n: int | None = Field(None, ge=1)
    best_of: int | None = Field(None, ge=1)

    @property
    def texts(self) -> int:
        if self.best_of not in (None, self.n or 1):
            raise bad_request(
                "best_of is not possible here: all texts that are drawn are told, so ask for n", "best_of"
            )
        return self.n or 1


class OfferedFunction(BaseModel, extra="allow"):
    """A function by its name, with its description and the JSON schema of its parameters for the template."""

    name: str
    parameters: dict[str, Any] | None = None


class OfferedTool(BaseModel):
    """A tool that the model may call."""

    type: Literal["function"] = "function"
    function: OfferedFunction


def offered_tools(tools: Sequence[OfferedTool] | None) -> list[Tool]:
    """Return them as chat templates take them."""
    return [tool.model_dump(exclude_unset=True) | {"type": tool.type} for tool in tools or ()]


class NamedFunction(BaseModel):
    """A function by its name alone."""

    name: str


class NamedTool(BaseModel):
    """The tool that the model must call."""

    type: Literal["function"] = "function"
    function: NamedFunction


class ChatRequest(CompletionFields):
    """POST /v1/chat/completions"""

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
            raise bad_request("top_logprobs are told with logprobs only: say logprobs: true", "top_logprobs")
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
        """As chat templates expect it. Raises ApiError."""
        if self.echo:
            raise bad_request("echo is not possible in a chat: it is of /v1/completions", "echo")
        return templated(self.messages)

    @property
    def ending(self) -> ChatEnding:
        """Whether the last message is answered or continued. Raises ApiError."""
        return chat_ending(
            self.messages, continues=self.continue_final_message, begins_answer=self.add_generation_prompt
        )

    @property
    def template_variables(self) -> dict[str, Any]:
        """What else the template is told."""
        hints = {"reasoning_effort": self.reasoning_effort, "verbosity": self.verbosity}
        return {name: hint for name, hint in hints.items() if hint is not None} | (self.chat_template_kwargs or {})


class CompletionRequest(CompletionFields):
    """POST /v1/completions: a text, token ids, or several of one of these."""

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
        """Each of them."""
        return each_of(self.prompt)


def chat_ending(messages: Sequence[Message], *, continues: bool, begins_answer: bool | None) -> ChatEnding:
    """Return what a conversation ends with, as vLLM's clients say it. Raises ApiError where they say both."""
    if not continues:
        return ChatEnding.CLOSED if begins_answer is False else ChatEnding.ANSWER
    if begins_answer:
        sentence = "either an answer begins or the last message goes on: not both, add_generation_prompt"
        raise bad_request(f"{sentence} and continue_final_message", "continue_final_message")
    if not messages or messages[-1].role != ASSISTANT:
        raise bad_request("only a last message of the assistant can go on", "continue_final_message")
    return ChatEnding.CONTINUED


class TokenizeRequest(BaseModel):
    """POST /tokenize: a text, or a conversation as the model's chat template writes it."""

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
        """Whether the last message is answered or continued. Raises ApiError."""
        messages = self.messages or ()
        return chat_ending(messages, continues=self.continue_final_message, begins_answer=self.add_generation_prompt)


class DetokenizeRequest(BaseModel):
    """POST /detokenize"""

    model: str = ""
    tokens: Items[WholeNumber]
