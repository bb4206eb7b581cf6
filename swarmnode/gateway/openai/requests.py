"""What OpenAI's clients ask of chats and completions."""

from __future__ import annotations

from typing import Any, Literal, cast

from pydantic import BaseModel, Field

from swarmnode.gateway.generation.sampling_fields import Logprobs, NewTokens, SamplingFields
from swarmnode.gateway.generation.tool_use import AUTO, MAX_TOOLS, REQUIRED, ToolUse
from swarmnode.gateway.http.api_error import bad_request
from swarmnode.gateway.http.json_bound import Items, WholeNumber
from swarmnode.gateway.openai.conversation import MAX_MESSAGES, Message, templated

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

    @property
    def texts(self) -> int:
        return self.n or 1


class OfferedFunction(BaseModel, extra="allow"):
    """A function by its name, with its description and the JSON schema of its parameters for the template."""

    name: str
    parameters: dict[str, Any] | None = None


class OfferedTool(BaseModel):
    """A tool that the model may call."""

    type: Literal["function"] = "function"
    function: OfferedFunction


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
    chat_template_kwargs: dict[str, Any] | None = None
    logprobs: bool = False
    top_logprobs: Logprobs | None = None

    @property
    def told_logprobs(self) -> int | None:
        if self.top_logprobs and not self.logprobs:
            raise bad_request("top_logprobs are told with logprobs only: say logprobs: true", "top_logprobs")
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def tool_use(self) -> ToolUse:
        tools = [tool.model_dump(exclude_unset=True) | {"type": tool.type} for tool in self.tools or ()]
        parallel = self.parallel_tool_calls is not False
        if isinstance(self.tool_choice, NamedTool):
            return ToolUse.choose(tools, REQUIRED, self.tool_choice.function.name, parallel=parallel)
        return ToolUse.choose(tools, self.tool_choice or AUTO, parallel=parallel)

    @property
    def new_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def conversation(self) -> list[dict[str, Any]]:
        """As chat templates expect it. Raises ApiError."""
        return templated(self.messages)

    @property
    def template_variables(self) -> dict[str, Any]:
        """What else the template is told."""
        effort = {} if self.reasoning_effort is None else {"reasoning_effort": self.reasoning_effort}
        return {**effort, **(self.chat_template_kwargs or {})}


class CompletionRequest(CompletionFields):
    """POST /v1/completions: a text, token ids, or several of one of these."""

    prompt: Texts
    echo: bool = False
    suffix: str | None = None
    logprobs: Logprobs | None = None
    return_token_ids: bool = False

    @property
    def told_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """Each of them."""
        return each_of(self.prompt)


class TokenizeRequest(BaseModel):
    """POST /tokenize: a text, or a conversation as the model's chat template writes it."""

    model: str = ""
    prompt: str | None = None
    messages: Items[Message] | None = Field(None, max_length=MAX_MESSAGES)


class DetokenizeRequest(BaseModel):
    """POST /detokenize"""

    model: str = ""
    tokens: Items[WholeNumber]
