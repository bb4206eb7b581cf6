"""Requests to /v1/responses. A conversation is a list of items; a tool call and its result are two items."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, Field

from swarmnode.codec.sampling import Grammar
from swarmnode.gateway.generation.sampling_fields import NewTokens, SamplingFields, check_type
from swarmnode.gateway.generation.tool_use import AUTO, MAX_TOOLS, REQUIRED, ResponseFormat, ToolUse, function_tool
from swarmnode.gateway.http.api_error import bad_request
from swarmnode.gateway.http.json_bound import Items
from swarmnode.gateway.openai.conversation import (
    ASSISTANT,
    MAX_MESSAGES,
    ContentPart,
    arguments_of,
    check_results,
    template_call,
    template_role,
    text_of,
)

LOGPROBS = "message.output_text.logprobs"


class InputItem(BaseModel):
    """Item of a conversation: a message, a tool call, a tool's result, or reasoning of the model."""

    type: str = "message"
    role: str = ""
    content: str | Items[ContentPart] | None = None
    call_id: str = ""
    name: str = ""
    arguments: str = "{}"
    output: str | Items[ContentPart] = ""


class ResponseTool(BaseModel):
    """Tool that the model may call."""

    type: str
    name: str = ""
    description: str | None = None
    parameters: dict[str, Any] | None = None


class NamedResponseTool(BaseModel):
    """Tool that the model must call."""

    type: Literal["function"]
    name: str


class TextOptions(BaseModel):
    """Options of a response's text."""

    format: ResponseFormat | None = None
    verbosity: str | None = None


class ReasoningOptions(BaseModel):
    """Effort of reasoning, if the model's chat template has that setting."""

    effort: str | None = None


class ResponsesRequest(SamplingFields):
    """Body of POST /v1/responses. Fields that refer to something stored at OpenAI are refused."""

    input: str | Items[InputItem]
    kept_conversation: Any = Field(None, alias="conversation")
    prompt: Any = None
    background: bool | None = None
    include: Items[str] | None = None
    top_logprobs: int | None = None
    instructions: str | None = None
    max_output_tokens: NewTokens | None = None
    parallel_tool_calls: bool | None = None
    previous_response_id: str | None = None
    reasoning: ReasoningOptions | None = None
    text: TextOptions | None = None
    tools: Items[ResponseTool] | None = Field(None, max_length=MAX_TOOLS)
    tool_choice: str | NamedResponseTool | None = None

    @property
    def new_tokens(self) -> int | None:
        return self.max_output_tokens

    @property
    def tool_use(self) -> ToolUse:
        for tool in self.tools or ():
            check_type(tool.type, ("function",) if tool.name else (), "functions with a name")
        tools = [function_tool(tool.name, tool.description, tool.parameters) for tool in self.tools or ()]
        parallel = self.parallel_tool_calls is not False
        if isinstance(self.tool_choice, NamedResponseTool):
            return ToolUse.choose(tools, REQUIRED, self.tool_choice.name, parallel=parallel)
        return ToolUse.choose(tools, self.tool_choice or AUTO, parallel=parallel)

    def followed_grammar(self) -> Grammar | None:
        if (call := self.tool_use.grammar()) is not None:
            return call
        return None if self.text is None or self.text.format is None else self.text.format.grammar()

    @property
    def template_variables(self) -> dict[str, Any]:
        """Further variables of the chat template."""
        hints = {
            "reasoning_effort": self.reasoning and self.reasoning.effort,
            "verbosity": self.text and self.text.verbosity,
        }
        return {name: hint for name, hint in hints.items() if hint is not None}

    def conversation(self) -> list[dict[str, Any]]:
        """Return the conversation in the format of chat templates. Raises ApiError if it refers to a stored answer, prompt or
        conversation, is to run in the background, or is malformed."""
        kept = {
            "previous_response_id": self.previous_response_id,
            "conversation": self.kept_conversation,
            "prompt": self.prompt,
        }
        for field in (name for name, told in kept.items() if told is not None):
            raise bad_request(
                f"{field} is not supported, because nothing is stored here: send the whole conversation as input", field
            )
        if self.background:
            sentence = "background is not supported, because answers are not stored: wait for the answer, or stream it"
            raise bad_request(sentence, "background")
        if self.top_logprobs or LOGPROBS in (self.include or ()):
            raise bad_request(
                "logprobs are not supported here: use /v1/chat/completions or /v1/completions", "top_logprobs"
            )
        turns = [{"role": "system", "content": self.instructions}] if self.instructions else []
        if isinstance(self.input, str):
            return [*turns, {"role": "user", "content": self.input}]
        if not 0 < len(self.input) <= MAX_MESSAGES:
            raise bad_request(f"input must be a text, or 1 to {MAX_MESSAGES} items", "input")
        for item in self.input:
            _add(item, turns)
        check_results(turns)
        return turns


def _add(item: InputItem, turns: list[dict[str, Any]]) -> None:
    """Add `item` to `turns`, in the format of chat templates: there the model's reasoning, text and calls are one turn. Raises
    ApiError if the item is unsupported."""
    if item.type == "function_call":
        call = template_call(item.call_id, item.name, arguments_of(item.name, item.arguments))
        _answer(turns, without=()).setdefault("tool_calls", []).append(call)
    elif item.type == "function_call_output":
        turns.append({"role": "tool", "content": text_of(item.output), "tool_call_id": item.call_id})
    elif item.type == "reasoning":
        _answer(turns, without=("content", "tool_calls", "reasoning_content"))["reasoning_content"] = _thought(item)
    elif item.type != "message" or not item.role:
        raise bad_request(
            f"an item of type {item.type!r} is not supported, or lacks a role: leave it out, or add the role", "input"
        )
    elif item.role == ASSISTANT:
        _answer(turns, without=("content", "tool_calls"))["content"] = text_of(item.content)
    else:
        turns.append({"role": template_role(item.role), "content": text_of(item.content)})


def _answer(turns: list[dict[str, Any]], *, without: tuple[str, ...]) -> dict[str, Any]:
    """Return the last turn if it is the model's and lacks all fields of `without`; else append a new turn of the model and return
    it."""
    if not turns or turns[-1]["role"] != ASSISTANT or any(turns[-1].get(field) for field in without):
        turns.append({"role": ASSISTANT, "content": ""})
    return turns[-1]


def _thought(item: InputItem) -> str:
    parts = item.content if isinstance(item.content, list) else []
    return "".join(part.text or "" for part in parts)
