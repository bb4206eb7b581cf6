"""What OpenAI's clients ask for. Fields that are not here are ignored, as the API's servers do; None is as if it were not there."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, cast

from pydantic import BaseModel, Field

from swarmnode.codec.body import MAX_SEED
from swarmnode.codec.sampling import Grammar, GrammarKind
from swarmnode.gateway.api_error import ApiError
from swarmnode.gateway.response_format import ResponseFormat, tool_call_grammar

MAX_STOPS = 16
MAX_STOP_CHARS = 1024
MAX_MESSAGES = 4096
MAX_TOOLS = 256


def checked_stops(stops: Sequence[str]) -> tuple[str, ...]:
    """The same. Raises ApiError where there are too many, or too long ones."""
    if len(stops) > MAX_STOPS or any(len(stop) > MAX_STOP_CHARS for stop in stops):
        raise ApiError(
            400, f"at most {MAX_STOPS} stop strings of {MAX_STOP_CHARS} characters are possible", parameter="stop"
        )
    return tuple(stops)


class StreamOptions(BaseModel):
    """`include_usage`: a last event tells how many tokens it was."""

    include_usage: bool = False


class SamplingFields(BaseModel):
    """How to draw, as chats and completions have it in common."""

    model: str = ""
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    response_format: ResponseFormat | None = None
    grammar: str | None = None
    seed: int | None = None
    max_tokens: int | None = None
    stop: str | list[str] | None = None
    n: int | None = Field(None, ge=1)
    stream: bool = False
    stream_options: StreamOptions | None = None

    @property
    def new_tokens(self) -> int | None:
        """How many at most; None where it is not said."""
        return self.max_tokens

    @property
    def stops(self) -> tuple[str, ...]:
        """The strings that end a text. Raises ApiError where there are too many, or too long ones."""
        return checked_stops((self.stop,) if isinstance(self.stop, str) else self.stop or ())

    @property
    def tool_names(self) -> frozenset[str]:
        """Of the tools that the model may call."""
        return frozenset()

    @property
    def tells_usage(self) -> bool:
        """Whether a stream ends by saying how many tokens it was."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def told_logprobs(self) -> int | None:
        """Of how many tokens beside the drawn one the logarithms of their probabilities are told; None where of none."""
        return None

    def followed_grammar(self) -> Grammar | None:
        """What the text must follow: `grammar` is Lark's. Raises ApiError."""
        if self.grammar is not None:
            return Grammar(GrammarKind.LARK, self.grammar)
        return None if self.response_format is None else self.response_format.grammar()

    def drawing(self, choice: int) -> dict[str, Any]:
        """GenerateOptions' fields for one of the texts that are asked for: each has a seed of its own."""
        seed = None if self.seed is None else (self.seed + choice) & MAX_SEED
        return {
            "temperature": 1.0 if self.temperature is None else self.temperature,
            "top_p": 1.0 if self.top_p is None else self.top_p,
            "top_k": max(0, self.top_k or 0),  # vLLM's -1 is off, too
            "min_p": self.min_p or 0.0,
            "frequency_penalty": self.frequency_penalty or 0.0,
            "presence_penalty": self.presence_penalty or 0.0,
            "repetition_penalty": 1.0 if self.repetition_penalty is None else self.repetition_penalty,
            "logit_bias": self.logit_bias or {},
            "logprobs": self.told_logprobs,
            "grammar": self.followed_grammar(),
            "seed": seed,
        }


class ContentPart(BaseModel):
    """A part of a message. Models here read text."""

    type: str
    text: str | None = None


def text_of(content: str | Sequence[ContentPart] | None) -> str:
    """Its text. Raises ApiError where there is anything else in it."""
    if content is None or isinstance(content, str):
        return content or ""
    for part in content:
        if part.text is None:
            raise ApiError(
                400,
                f"this model reads text only: a part of type {part.type!r} says nothing to it",
                parameter="messages",
            )
    return "".join(part.text or "" for part in content)


class CalledFunction(BaseModel):
    """`arguments` is JSON."""

    name: str
    arguments: str = "{}"


class CalledTool(BaseModel):
    """A call that the model made before."""

    id: str = ""
    function: CalledFunction

    def as_template_takes_it(self) -> dict[str, Any]:
        """As chat templates expect it, in which arguments are values. Raises ApiError where they are no JSON."""
        try:
            arguments = json.loads(self.function.arguments)
        except (ValueError, RecursionError):
            raise ApiError(
                400, f"the arguments of a call of {self.function.name} are not JSON", parameter="messages"
            ) from None
        return {"id": self.id, "type": "function", "function": {"name": self.function.name, "arguments": arguments}}


class OfferedFunction(BaseModel, extra="allow"):
    """A function by its name, with its description and the JSON schema of its parameters for the template."""

    name: str


class OfferedTool(BaseModel):
    """A tool that the model may call."""

    type: str = "function"
    function: OfferedFunction


class Message(BaseModel):
    """What one side of a conversation said."""

    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[CalledTool] | None = None
    tool_call_id: str | None = None

    def as_template_takes_it(self) -> dict[str, Any]:
        """As chat templates expect it, in which content is one text. Raises ApiError where there is anything but text."""
        role = "system" if self.role == "developer" else self.role  # its newer name, which templates do not know
        told: dict[str, Any] = {"role": role, "content": text_of(self.content)}
        if self.tool_calls:
            told["tool_calls"] = [call.as_template_takes_it() for call in self.tool_calls]
        return told | {key: value for key in ("name", "tool_call_id") if (value := getattr(self, key)) is not None}


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


class MessagesRequest(SamplingFields):
    """POST /v1/messages"""

    messages: list[Message] = Field(min_length=1, max_length=MAX_MESSAGES)
    system: str | list[ContentPart] | None = None
    stop_sequences: list[str] | None = None

    @property
    def stops(self) -> tuple[str, ...]:
        return checked_stops(self.stop_sequences or ())

    def conversation(self) -> list[dict[str, Any]]:
        """As chat templates expect it."""
        begin = [{"role": "system", "content": text_of(self.system)}] if self.system else []
        return [*begin, *(message.as_template_takes_it() for message in self.messages)]


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
