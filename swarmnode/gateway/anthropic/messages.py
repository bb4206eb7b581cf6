"""Anthropic's endpoints: POST /v1/messages and POST /v1/messages/count_tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Request
from pydantic import BaseModel, Field
from pydantic_core import from_json
from starlette.responses import Response

from swarmnode.data.conversation import ASSISTANT, ChatEnding, template_call
from swarmnode.gateway.gateway import ServedModel, gateway_of, key_of
from swarmnode.gateway.generation.api_answer import ApiAnswer, Text
from swarmnode.gateway.generation.choice_stream import LENGTH, TOOL_CALLS, Piece
from swarmnode.gateway.generation.request_fields import (
    AUTO,
    MAX_TOOLS,
    NONE,
    REQUIRED,
    ResponseFormat,
    SamplingFields,
    ToolUse,
    check_type,
    checked_stops,
    function_tool,
)
from swarmnode.gateway.generation.response_parser import AnswerPart, PartEvent, PartKind, Parts, PartStep
from swarmnode.gateway.http.api_error import bad_request
from swarmnode.gateway.http.body_route import BodyRoute, Items
from swarmnode.gateway.http.event_stream import NamedEvent
from swarmnode.gateway.openai.requests import MAX_MESSAGES, ContentPart, check_turns, not_text, text_of

router = APIRouter(route_class=BodyRoute)
DELTAS = {  # by kind of block: the type of its deltas, and the field that holds their text
    PartKind.TEXT: ("text_delta", "text"),
    PartKind.REASONING: ("thinking_delta", "thinking"),
    PartKind.CALL: ("input_json_delta", "partial_json"),
}
CHOICES = {"auto": AUTO, "any": REQUIRED, "tool": REQUIRED, "none": NONE}


class ContentBlock(BaseModel):
    """Block of a message: text, reasoning of the model, a tool call, or a tool's result."""

    type: str
    text: str | None = None
    thinking: str | None = None
    id: str = ""
    name: str = ""
    input: dict[str, Any] = {}
    tool_use_id: str = ""
    content: str | Items[ContentPart] | None = None
    is_error: bool | None = None


class MessageParam(BaseModel):
    """Message of a conversation."""

    role: str
    content: str | Items[ContentBlock]

    def turns(self) -> list[dict[str, Any]]:
        """Return the message in the format of chat templates: each result of a tool is a turn of its own. Raises ApiError
        if a block is neither text, reasoning, a call nor a result."""
        if isinstance(self.content, str):
            return [{"role": self.role, "content": self.content}]
        results: list[dict[str, Any]] = []
        text, thought, calls = "", "", []
        for block in self.content:
            if block.type == "tool_result":
                result = text_of(block.content)
                content = f"Error: {result}" if block.is_error else result
                results.append({"role": "tool", "content": content, "tool_call_id": block.tool_use_id})
            elif block.type == "tool_use":
                calls.append(template_call(block.id, block.name, block.input))
            elif block.type == "thinking":
                thought += block.thinking or ""
            elif block.type == "text" and block.text is not None:
                text += block.text
            elif block.type != "redacted_thinking":  # encrypted; only Anthropic can read it
                raise not_text(block.type)
        if results and len(results) == len(self.content):
            return results
        turn: dict[str, Any] = {"role": self.role, "content": text}
        turn |= {key: said for key, said in (("tool_calls", calls), ("reasoning_content", thought)) if said}
        return [*results, turn]


class CustomTool(BaseModel):
    """Tool that the model may call."""

    type: str | None = "custom"
    name: str
    description: str | None = None
    input_schema: dict[str, Any] | None = None


class ToolChoice(BaseModel):
    """Choice of tools: `type` is auto, any, none, or tool, which needs the tool's `name`."""

    type: str
    name: str | None = None
    disable_parallel_tool_use: bool = False


class ThinkingOptions(BaseModel):
    """Reasoning: `type` disabled turns it off, any other turns it on, if the model's chat template has that setting."""

    type: str


class OutputConfig(BaseModel):
    """Options of the answer: the effort of reasoning, if the model's chat template has that setting, and a JSON schema."""

    effort: str | None = None
    format: ResponseFormat | None = None


class MessagesRequest(SamplingFields):
    """Body of POST /v1/messages."""

    messages: Items[MessageParam] = Field(min_length=1, max_length=MAX_MESSAGES)
    system: str | Items[ContentPart] | None = None
    stop_sequences: Items[str] | None = None
    thinking: ThinkingOptions | None = None
    output_config: OutputConfig | None = None
    output_format: ResponseFormat | None = None
    tools: Items[CustomTool] | None = Field(None, max_length=MAX_TOOLS)
    tool_choice: ToolChoice | None = None

    @property
    def stops(self) -> tuple[str, ...]:
        return checked_stops(self.stop_sequences or ())

    @property
    def tool_use(self) -> ToolUse:
        for tool in self.tools or ():
            check_type(tool.type, (None, "custom"), "custom tools")
        tools = [function_tool(tool.name, tool.description, tool.input_schema) for tool in self.tools or ()]
        choice = self.tool_choice or ToolChoice(type="auto")
        if choice.type not in CHOICES or (choice.type == "tool") != (choice.name is not None):
            raise bad_request("tool_choice must be auto, any, none, or tool with a name", "tool_choice")
        parallel = not choice.disable_parallel_tool_use
        return ToolUse.choose(tools, CHOICES[choice.type], choice.name, parallel=parallel)

    @property
    def template_variables(self) -> dict[str, Any]:
        """Further variables of the chat template."""
        thinks = {} if self.thinking is None else {"enable_thinking": self.thinking.type != "disabled"}
        effort = self.output_config and self.output_config.effort
        return thinks if effort is None else {**thinks, "reasoning_effort": effort}

    @property
    def form(self) -> ResponseFormat | None:
        return self.output_format or (None if self.output_config is None else self.output_config.format)

    @property
    def ending(self) -> ChatEnding:
        """Ending of the conversation: a last message of the assistant is continued, any other one is answered."""
        return ChatEnding.CONTINUED if self.messages[-1].role == ASSISTANT else ChatEnding.ANSWER

    def conversation(self) -> list[dict[str, Any]]:
        """Return the conversation in the format of chat templates. Raises ApiError if a block is unsupported, or a result has no
        call before it."""
        begin = [{"role": "system", "content": text_of(self.system)}] if self.system else []
        turns = [turn for message in self.messages for turn in message.turns()]
        check_turns(turns)
        return [*begin, *turns]


class TextBlock(BaseModel):
    """Text in a message of Anthropic's API."""

    type: str = "text"
    text: str


class ThinkingBlock(BaseModel):
    """Reasoning of the model before its answer. The signature is empty."""

    type: str = "thinking"
    thinking: str
    signature: str = ""


class ToolUseBlock(BaseModel):
    """Tool call by the model."""

    type: str = "tool_use"
    id: str
    name: str
    input: Any


ReplyBlock = TextBlock | ThinkingBlock | ToolUseBlock


class MessageUsage(BaseModel):
    """Token counts of a message. Cached tokens do not count as input in this API."""

    input_tokens: int
    output_tokens: int
    cache_read_input_tokens: int = 0
    cache_creation_input_tokens: int = 0


class MessageReply(BaseModel):
    """Response: a message of Anthropic's API."""

    id: str
    type: str = "message"
    role: str = "assistant"
    model: str
    content: list[ReplyBlock]
    stop_reason: str | None
    stop_sequence: str | None
    usage: MessageUsage


class TokenCount(BaseModel):
    """Response of POST /v1/messages/count_tokens."""

    input_tokens: int


@router.post("/v1/messages", response_model=MessageReply)
async def messages(asked: MessagesRequest, request: Request) -> Response:
    """Generate the next message of a conversation."""
    model = gateway_of(request).model(asked.model)
    prompt = await _prompt(model, asked)
    answer = ApiAnswer("msg_", model.name, [prompt], await model.choices([prompt], asked, key_of(request)))
    return await answer.respond(request, _MessageStyle(answer), stream=asked.stream)


@router.post("/v1/messages/count_tokens")
async def count_tokens(asked: MessagesRequest, request: Request) -> TokenCount:
    """Count the tokens of a conversation."""
    return TokenCount(input_tokens=len(await _prompt(gateway_of(request).model(asked.model), asked)))


async def _prompt(model: ServedModel, asked: MessagesRequest) -> list[int]:
    return await model.encode_chat(asked.conversation(), asked.tool_use, asked.template_variables, asked.ending)


class _MessageStyle:
    def __init__(self, answer: ApiAnswer) -> None:
        self._answer = answer
        self._parts = Parts()
        self._begun = False

    async def whole(self, texts: Sequence[Text]) -> MessageReply:
        [text] = texts
        return self._message([self._block(part) for part in text.parts.all], self._reason(text.finish_reason))

    def events(self, piece: Piece) -> list[NamedEvent]:
        events, over = [], piece.finish_reason is not None
        if not self._begun:
            self._begun = True
            events.append(NamedEvent.of("message_start", message=self._message([], None).model_dump()))
        events += map(self._step, self._parts.push(piece.reasoning, piece.text, piece.call, over=over))
        if over:
            delta = {"stop_reason": self._reason(piece.finish_reason), "stop_sequence": piece.choice.stop_string}
            events.append(NamedEvent.of("message_delta", delta=delta, usage=self._usage().model_dump()))
        return events

    async def ending(self) -> Sequence[BaseModel | str]:
        return [NamedEvent.of("message_stop")]

    def _step(self, event: PartEvent) -> NamedEvent:
        step, part, text = event
        if step is PartStep.BEGIN:
            return NamedEvent.of("content_block_start", index=part.index, content_block=self._block(part).model_dump())
        if step is PartStep.DELTA:
            kind, field = DELTAS[part.kind]
            delta: dict[str, Any] = {"type": kind, field: text}
            return NamedEvent.of("content_block_delta", index=part.index, delta=delta)
        return NamedEvent.of("content_block_stop", index=part.index)

    def _block(self, part: AnswerPart) -> ReplyBlock:
        if part.kind is PartKind.TEXT:
            return TextBlock(text=part.text)
        if part.kind is PartKind.REASONING:
            return ThinkingBlock(thinking=part.text)
        assert part.call is not None
        id = f"toolu_{self._answer.stem}_{part.index}"
        return ToolUseBlock(id=id, name=part.call.name, input=from_json(part.text or "{}", allow_partial=True))

    def _message(self, content: list[ReplyBlock], reason: str | None) -> MessageReply:
        answer = self._answer
        return MessageReply(
            id=answer.id,
            model=answer.model,
            content=content,
            stop_reason=reason,
            stop_sequence=answer.choices[0].stop_string,
            usage=self._usage(),
        )

    def _usage(self) -> MessageUsage:
        usage = self._answer.usage()
        return MessageUsage(
            input_tokens=usage.prompt - usage.cached,
            output_tokens=usage.completion,
            cache_read_input_tokens=usage.cached,
        )

    def _reason(self, finish_reason: str | None) -> str:
        if finish_reason == LENGTH:
            return "max_tokens"
        if finish_reason == TOOL_CALLS:
            return "tool_use"
        return "stop_sequence" if self._answer.choices[0].stop_string is not None else "end_turn"
