"""OpenAI's endpoint POST /v1/responses. Nothing is stored: each request has the whole conversation."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Request
from pydantic import BaseModel
from starlette.responses import Response

from swarmnode.gateway.gateway import gateway_of, key_of
from swarmnode.gateway.generation.api_answer import ApiAnswer, Text
from swarmnode.gateway.generation.choice_stream import LENGTH, Piece
from swarmnode.gateway.generation.parts import AnswerPart, PartEvent, PartKind, Parts, PartStep, TokenUsage
from swarmnode.gateway.http.body_route import BodyRoute
from swarmnode.gateway.http.event_stream import NamedEvent
from swarmnode.gateway.openai.replies import PromptTokens
from swarmnode.gateway.openai.response_requests import ResponsesRequest

router = APIRouter(route_class=BodyRoute)
IN_PROGRESS, COMPLETED, INCOMPLETE = "in_progress", "completed", "incomplete"
SPOKEN = {PartKind.TEXT: "output_text", PartKind.REASONING: "reasoning_text"}


class OutputText(BaseModel):
    """Text in a response."""

    type: str = "output_text"
    text: str
    annotations: list[str] = []
    logprobs: list[str] = []


class OutputMessage(BaseModel):
    """Message of the model in a response."""

    id: str
    type: str = "message"
    role: str = "assistant"
    status: str
    content: list[OutputText]


class ReasoningText(BaseModel):
    """Text of the model's reasoning."""

    type: str = "reasoning_text"
    text: str


class ReasoningItem(BaseModel):
    """Reasoning of the model before its answer."""

    id: str
    type: str = "reasoning"
    status: str
    summary: list[str] = []
    content: list[ReasoningText]


class FunctionCallItem(BaseModel):
    """Tool call by the model; `arguments` is JSON text."""

    id: str
    type: str = "function_call"
    status: str
    call_id: str
    name: str
    arguments: str


OutputItem = OutputMessage | ReasoningItem | FunctionCallItem


class OutputTokens(BaseModel):
    """Details of the output's tokens: `reasoning_tokens` came before the answer."""

    reasoning_tokens: int = 0


class ResponseUsage(BaseModel):
    """Token counts of a response."""

    input_tokens: int
    input_tokens_details: PromptTokens
    output_tokens: int
    output_tokens_details: OutputTokens
    total_tokens: int

    @classmethod
    def of(cls, usage: TokenUsage) -> ResponseUsage:
        """Convert token counts to this API's fields."""
        return cls(
            input_tokens=usage.prompt,
            input_tokens_details=PromptTokens(cached_tokens=usage.cached),
            output_tokens=usage.completion,
            output_tokens_details=OutputTokens(reasoning_tokens=usage.reasoning),
            total_tokens=usage.prompt + usage.completion,
        )


class ResponseReply(BaseModel):
    """Response of POST /v1/responses."""

    id: str
    object: str = "response"
    created_at: int
    status: str
    error: None = None
    incomplete_details: dict[str, str] | None
    instructions: str | None
    metadata: dict[str, str] = {}
    model: str
    output: list[OutputItem]
    parallel_tool_calls: bool = True
    temperature: float | None
    tool_choice: str | dict[str, Any] = "auto"
    tools: list[dict[str, Any]] = []
    top_p: float | None
    usage: ResponseUsage | None
    store: bool = False


@router.post("/v1/responses", response_model=ResponseReply)
async def responses(asked: ResponsesRequest, request: Request) -> Response:
    """Generate the next message of a conversation."""
    model = gateway_of(request).model(asked.model)
    prompt = await model.encode_chat(asked.conversation(), asked.tool_use, asked.template_variables)
    answer = ApiAnswer("resp_", model.name, [prompt], await model.choices([prompt], asked, key_of(request)))
    return await answer.respond(request, _ResponseStyle(answer, asked), stream=asked.stream)


class _ResponseStyle:
    def __init__(self, answer: ApiAnswer, asked: ResponsesRequest) -> None:
        self._answer = answer
        self._asked = asked
        self._parts = Parts()
        self._reason: str | None = None
        self._numbers = itertools.count()
        self._begun = False

    def whole(self, texts: Sequence[Text]) -> ResponseReply:
        [text] = texts
        self._reason = text.finish_reason
        for _ in self._parts.push(text.reasoning, text.text, text.calls, over=True):
            pass
        return self._response()

    def events(self, piece: Piece) -> list[NamedEvent]:
        begins = [] if self._begun else [self._told("created"), self._told("in_progress")]
        self._begun = True
        over = piece.finish_reason is not None
        parts = self._parts.push(piece.reasoning, piece.text, piece.calls, over=over)
        events = [event for step in parts for event in self._step(step)]
        self._reason = piece.finish_reason
        return [*begins, *events]

    def ending(self) -> Sequence[BaseModel | str]:
        return [self._told(self._status)]

    # -- events

    def _step(self, event: PartEvent) -> list[NamedEvent]:
        if event.part.kind is PartKind.CALL:
            return self._call_step(event)
        step, part, text = event
        place = {"item_id": self._item_id(part), "output_index": part.index, "content_index": 0}
        spoken = SPOKEN[part.kind]
        logprobs: dict[str, list[str]] = {"logprobs": []} if part.kind is PartKind.TEXT else {}
        if step is PartStep.BEGIN:
            empty = self._item(part, IN_PROGRESS).model_dump() | {"content": []}
            return [
                self._event("output_item.added", output_index=part.index, item=empty),
                self._event("content_part.added", **place, part=self._content(part)),
            ]
        if step is PartStep.DELTA:
            return [self._event(f"{spoken}.delta", **place, delta=text, **logprobs)]
        return [
            self._event(f"{spoken}.done", **place, text=part.text, **logprobs),
            self._event("content_part.done", **place, part=self._content(part)),
            self._done(part),
        ]

    def _call_step(self, event: PartEvent) -> list[NamedEvent]:
        step, part, text = event
        place = {"item_id": self._item_id(part), "output_index": part.index}
        if step is PartStep.BEGIN:
            item = self._item(part, IN_PROGRESS).model_dump()
            return [self._event("output_item.added", output_index=part.index, item=item)]
        if step is PartStep.DELTA:
            return [self._event("function_call_arguments.delta", **place, delta=text)]
        assert part.call is not None
        told = self._event("function_call_arguments.done", **place, arguments=part.text, name=part.call.name)
        return [told, self._done(part)]

    def _done(self, part: AnswerPart) -> NamedEvent:
        return self._event("output_item.done", output_index=part.index, item=self._item(part, COMPLETED).model_dump())

    def _told(self, what: str) -> NamedEvent:
        return self._event(what, response=self._response().model_dump())

    def _event(self, what: str, **told: Any) -> NamedEvent:
        return NamedEvent.of(f"response.{what}", sequence_number=next(self._numbers), **told)

    # -- items

    def _item_id(self, part: AnswerPart) -> str:
        prefix = {PartKind.TEXT: "msg", PartKind.REASONING: "rs", PartKind.CALL: "fc"}[part.kind]
        return f"{prefix}_{self._answer.stem}_{part.index}"

    def _content(self, part: AnswerPart) -> dict[str, Any]:
        content = OutputText if part.kind is PartKind.TEXT else ReasoningText
        return content(text=part.text).model_dump()

    def _item(self, part: AnswerPart, status: str) -> OutputItem:
        id = self._item_id(part)
        if part.kind is PartKind.TEXT:
            return OutputMessage(id=id, status=status, content=[OutputText(text=part.text)])
        if part.kind is PartKind.REASONING:
            return ReasoningItem(id=id, status=status, content=[ReasoningText(text=part.text)])
        assert part.call is not None
        call_id = f"call_{self._answer.stem}_{part.index}"
        return FunctionCallItem(id=id, status=status, call_id=call_id, name=part.call.name, arguments=part.text)

    @property
    def _status(self) -> str:
        if self._reason is None:
            return IN_PROGRESS
        return INCOMPLETE if self._reason == LENGTH else COMPLETED

    def _output(self) -> list[OutputItem]:
        """Return the items of the answer. If the answer was cut off, its last item is the incomplete one."""
        *before, last = self._parts.all
        return [*(self._item(part, COMPLETED) for part in before), self._item(last, self._status)]

    def _response(self) -> ResponseReply:
        answer, asked, status = self._answer, self._asked, self._status
        choice = asked.tool_choice or "auto"
        return ResponseReply(
            id=answer.id,
            created_at=answer.created,
            status=status,
            incomplete_details={"reason": "max_output_tokens"} if status == INCOMPLETE else None,
            instructions=asked.instructions,
            model=answer.model,
            output=[] if status == IN_PROGRESS else self._output(),
            parallel_tool_calls=asked.parallel_tool_calls is not False,
            temperature=asked.temperature,
            tool_choice=choice if isinstance(choice, str) else choice.model_dump(),
            tools=[tool.model_dump() for tool in asked.tools or ()],
            top_p=asked.top_p,
            usage=None if status == IN_PROGRESS else ResponseUsage.of(answer.usage()),
        )
