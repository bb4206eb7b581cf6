"""Requests to /v1/responses. A conversation is a list of items; a tool call and its result are two items."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, Field

from swarmnode.data.conversation import ASSISTANT, ROLES, template_call
from swarmnode.gateway.generation.request_fields import (
    AUTO,
    MAX_TOOLS,
    REQUIRED,
    NewTokens,
    ResponseFormat,
    SamplingFields,
    ToolUse,
    check_type,
    function_tool,
)
from swarmnode.gateway.http.api_error import bad_request
from swarmnode.gateway.http.body_route import Items
from swarmnode.gateway.openai.kept_responses import Item, ItemPart
from swarmnode.gateway.openai.requests import MAX_MESSAGES, ContentPart, arguments_of, check_turns, text_of

LOGPROBS = "message.output_text.logprobs"
COMPLETED = "completed"
REFERENCE = "item_reference"
SPOKEN_BY = {True: "output_text", False: "input_text"}  # types of text parts, by whether the model wrote them
ID_BYTES = 12
MAX_PAIRS, MAX_NAME_CHARS, MAX_VALUE_CHARS = 16, 64, 512  # of metadata, as at OpenAI


def _checked_metadata(pairs: Any) -> Any:
    """Raise ValueError unless metadata are few short texts by short names."""
    if isinstance(pairs, dict) and (
        len(pairs) > MAX_PAIRS
        or any(len(name) > MAX_NAME_CHARS for name in pairs)
        or any(not isinstance(value, str) or len(value) > MAX_VALUE_CHARS for value in pairs.values())
    ):
        raise ValueError(
            f"metadata are at most {MAX_PAIRS} texts of {MAX_VALUE_CHARS} characters, with names of {MAX_NAME_CHARS}"
        )
    return pairs


Metadata = Annotated[dict[str, Any], BeforeValidator(_checked_metadata)]


class InputItem(BaseModel):
    """Item of a conversation: a message, a tool call, a tool's result, reasoning of the model, or a reference to an item of a kept
    response by its id."""

    type: str = "message"
    id: str | None = None
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
    """Body of POST /v1/responses. `previous_response_id` continues a kept response; `store` false keeps nothing of this one."""

    input: str | Items[InputItem]
    kept_conversation: Any = Field(None, alias="conversation")
    prompt: Any = None
    background: bool | None = None
    include: Items[str] | None = None
    top_logprobs: int | None = None
    instructions: str | None = None
    store: bool | None = None
    metadata: Metadata | None = None
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

    @property
    def form(self) -> ResponseFormat:
        return (self.text and self.text.format) or ResponseFormat.model_validate({"type": "text"})

    @property
    def template_variables(self) -> dict[str, Any]:
        """Further variables of the chat template."""
        hints = {
            "reasoning_effort": self.reasoning and self.reasoning.effort,
            "verbosity": self.text and self.text.verbosity,
        }
        return {name: hint for name, hint in hints.items() if hint is not None}

    def check_supported(self) -> None:
        """Raise ApiError if the request refers to a prompt or conversation at OpenAI, is to run in the background, or asks for
        log-probabilities."""
        for field, told in (("conversation", self.kept_conversation), ("prompt", self.prompt)):
            if told is not None:
                raise bad_request(f"{field} is not supported: use previous_response_id, or send the whole input", field)
        if self.background:
            raise bad_request("background is not supported: wait for the answer, or stream it", "background")
        if self.top_logprobs or LOGPROBS in (self.include or ()):
            raise bad_request(
                "logprobs are not supported here: use /v1/chat/completions or /v1/completions", "top_logprobs"
            )

    def items(self) -> list[Item]:
        """Return the input as items, with references as they are. Raises ApiError if there are none or too many, or one is not
        supported."""
        if isinstance(self.input, str):
            return [_item(InputItem(role="user", content=self.input))]
        if not 0 < len(self.input) <= MAX_MESSAGES:
            raise bad_request(f"input must be a text, or 1 to {MAX_MESSAGES} items", "input")
        return list(map(_item, self.input))


def _item(item: InputItem) -> Item:
    """Return an item of a request in the form that is kept. Raises ApiError if it is not supported."""
    if item.type == REFERENCE:
        return Item(item.id or "", REFERENCE, COMPLETED)
    random = secrets.token_hex(ID_BYTES)
    if item.type == "function_call":
        return Item(
            f"fc_{random}", item.type, COMPLETED, call_id=item.call_id, name=item.name, arguments=item.arguments
        )
    if item.type == "function_call_output":
        return Item(f"fco_{random}", item.type, COMPLETED, call_id=item.call_id, output=text_of(item.output))
    if item.type == "reasoning":
        parts = item.content if isinstance(item.content, list) else []
        content = [ItemPart("reasoning_text", part.text or "") for part in parts]
        return Item(f"rs_{random}", item.type, COMPLETED, content=content, summary=[])
    if item.type != "message" or not item.role:
        raise bad_request(
            f"an item of type {item.type!r} is not supported, or lacks a role: leave it out, or add the role", "input"
        )
    text_of(item.content)  # raises ApiError if a part is no text
    kind = SPOKEN_BY[item.role == ASSISTANT]
    parts = [ContentPart(type=kind, text=item.content)] if isinstance(item.content, str) else item.content or []
    content = [
        ItemPart(part.type, refusal=part.refusal) if part.type == "refusal" else ItemPart(kind, part.text)
        for part in parts
    ]
    return Item(f"msg_{random}", item.type, COMPLETED, item.role, content)


def turns_of(items: Sequence[Item], instructions: str | None) -> list[dict[str, Any]]:
    """Return a conversation in the format of chat templates. Raises ApiError if it has too many items, a call's arguments are no
    JSON, or a tool's result has no call before it."""
    if len(items) > MAX_MESSAGES:
        raise bad_request(f"the conversation has {len(items)} items, and at most {MAX_MESSAGES} are allowed", "input")
    turns = [{"role": "system", "content": instructions}] if instructions else []
    for item in items:
        # In the format of chat templates, the model's reasoning, text and calls are one turn.
        if item.type == "function_call":
            name = item.name or ""
            call = template_call(item.call_id or "", name, arguments_of(name, item.arguments or ""))
            _answer(turns, without=()).setdefault("tool_calls", []).append(call)
        elif item.type == "function_call_output":
            turns.append({"role": "tool", "content": item.output or "", "tool_call_id": item.call_id or ""})
        elif item.type == "reasoning":
            _answer(turns, without=("content", "tool_calls", "reasoning_content"))["reasoning_content"] = item.text
        elif item.role == ASSISTANT:
            _answer(turns, without=("content", "tool_calls"))["content"] = item.text
        else:
            turns.append({"role": ROLES.get(item.role or "", item.role or ""), "content": item.text})
    check_turns(turns)
    return turns


def _answer(turns: list[dict[str, Any]], *, without: tuple[str, ...]) -> dict[str, Any]:
    """Return the last turn if it is the model's and lacks all fields of `without`; else append a new turn of the model and return
    it."""
    if not turns or turns[-1]["role"] != ASSISTANT or any(turns[-1].get(field) for field in without):
        turns.append({"role": ASSISTANT, "content": ""})
    return turns[-1]
