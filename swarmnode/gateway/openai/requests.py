"""What OpenAI's clients ask for."""

from __future__ import annotations

from typing import Any, cast

from pydantic import BaseModel, Field

from swarmnode.codec.sampling import Grammar
from swarmnode.gateway.generation.response_format import ResponseFormat, tool_call_grammar
from swarmnode.gateway.generation.sampling_fields import SamplingFields
from swarmnode.gateway.http.api_error import ApiError
from swarmnode.gateway.openai.conversation import MAX_MESSAGES, Message

MAX_TOOLS = 256


class OfferedFunction(BaseModel, extra="allow"):
    """A function by its name, with its description and the JSON schema of its parameters for the template."""

    name: str


class OfferedTool(BaseModel):
    """A tool that the model may call."""

    type: str = "function"
    function: OfferedFunction


class ChatRequest(SamplingFields):
    """POST /v1/chat/completions"""

    messages: list[Message] = Field(min_length=1, max_length=MAX_MESSAGES)
    max_completion_tokens: int | None = None
    tools: list[OfferedTool] = Field(default=[], max_length=MAX_TOOLS)
    tool_choice: str | dict[str, Any] | None = None
    logprobs: bool = False
    top_logprobs: int | None = None

    @property
    def told_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def offered(self) -> list[dict[str, Any]]:
        """The tools as chat templates expect them."""
        return [] if self.tool_choice == "none" else [tool.model_dump() for tool in self.tools]

    def followed_grammar(self) -> Grammar | None:
        """Of a call, where the model is forced to make one."""
        if self.tool_choice in (None, "none", "auto"):
            return super().followed_grammar()
        choice = self.tool_choice
        name = choice.get("function", {}).get("name") if isinstance(choice, dict) else None
        forced = [tool for tool in self.offered if name in (None, tool["function"]["name"])]
        if not forced or (name is None and choice != "required"):
            raise ApiError(
                400,
                "tool_choice is none, auto, required, or the name of one of the tools",
                parameter="tool_choice",
            )
        return tool_call_grammar(forced)

    @property
    def tool_names(self) -> frozenset[str]:
        return frozenset(tool["function"]["name"] for tool in self.offered)

    @property
    def new_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


class CompletionRequest(SamplingFields):
    """POST /v1/completions: a text, token ids, or several of one of these."""

    prompt: str | list[int] | list[str] | list[list[int]]
    echo: bool = False
    suffix: str | None = None
    logprobs: int | None = None

    @property
    def told_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """Each of them."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if all(isinstance(one, int) for one in self.prompt):
            return [cast("list[int]", self.prompt)]
        return cast("list[str] | list[list[int]]", self.prompt)


class TokenizeRequest(BaseModel):
    """POST /tokenize: a text, or a conversation as the model's chat template writes it."""

    model: str = ""
    prompt: str | None = None
    messages: list[Message] | None = Field(None, max_length=MAX_MESSAGES)


class DetokenizeRequest(BaseModel):
    """POST /detokenize"""

    model: str = ""
    tokens: list[int]


class TextOptions(BaseModel):
    """What the text of a response is like."""

    format: ResponseFormat | None = None


class ResponsesRequest(SamplingFields):
    """POST /v1/responses"""

    text: TextOptions | None = None

    input: str | list[Message] = Field(max_length=1 << 24)
    instructions: str | None = None
    max_output_tokens: int | None = None
    previous_response_id: str | None = None

    @property
    def new_tokens(self) -> int | None:
        return self.max_output_tokens

    def followed_grammar(self) -> Grammar | None:
        return None if self.text is None or self.text.format is None else self.text.format.grammar()

    def conversation(self) -> list[dict[str, Any]]:
        """As chat templates expect it. Raises ApiError where it goes on from an answer that nobody keeps."""
        if self.previous_response_id is not None:
            raise ApiError(
                400, "answers are not kept here: send the whole conversation", parameter="previous_response_id"
            )
        begin = [{"role": "system", "content": self.instructions}] if self.instructions else []
        if isinstance(self.input, str):
            return [*begin, {"role": "user", "content": self.input}]
        return [*begin, *(message.as_template_takes_it() for message in self.input)]
