"""POST /v1/messages, as Anthropic's clients ask, and what counts their tokens."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Request
from pydantic import BaseModel
from starlette.responses import Response

from swarmnode.gateway.anthropic.replies import (
    MessageReply,
    MessageUsage,
    ReplyBlock,
    TextBlock,
    ThinkingBlock,
    TokenCount,
    ToolUseBlock,
)
from swarmnode.gateway.anthropic.requests import MessagesRequest
from swarmnode.gateway.gateway import gateway_of, key_of
from swarmnode.gateway.generation.api_answer import ApiAnswer, Text
from swarmnode.gateway.generation.choice_stream import LENGTH, TOOL_CALLS, Piece
from swarmnode.gateway.generation.parts import AnswerPart, PartEvent, PartKind, Parts, PartStep
from swarmnode.gateway.http.event_stream import NamedEvent
from swarmnode.gateway.served_model import ServedModel

router = APIRouter()
DELTAS = {  # of a kind of block: what its deltas are called, and the field that they add to
    PartKind.TEXT: ("text_delta", "text"),
    PartKind.REASONING: ("thinking_delta", "thinking"),
    PartKind.CALL: ("input_json_delta", "partial_json"),
}


@router.post("/v1/messages", response_model=MessageReply)
async def messages(asked: MessagesRequest, request: Request) -> Response:
    """What the model says next in a conversation."""
    model = gateway_of(request).model(asked.model)
    prompt = await _prompt(model, asked)
    answer = ApiAnswer("msg_", model.name, [prompt], await model.choices([prompt], asked, key_of(request)))
    return await answer.respond(request, _MessageStyle(answer), stream=asked.stream)


@router.post("/v1/messages/count_tokens")
async def count_tokens(asked: MessagesRequest, request: Request) -> TokenCount:
    """How many tokens a conversation is."""
    return TokenCount(input_tokens=len(await _prompt(gateway_of(request).model(asked.model), asked)))


async def _prompt(model: ServedModel, asked: MessagesRequest) -> list[int]:
    return await model.encode_chat(asked.conversation(), asked.tool_use, asked.template_variables)


class _MessageStyle:
    def __init__(self, answer: ApiAnswer) -> None:
        self._answer = answer
        self._parts = Parts()
        self._begun = False

    def whole(self, texts: Sequence[Text]) -> MessageReply:
        [text] = texts
        for _ in self._parts.push(text.reasoning, text.text, text.calls, over=True):
            pass
        return self._message([self._block(part) for part in self._parts.all], self._reason(text.finish_reason))

    def events(self, piece: Piece) -> list[NamedEvent]:
        events, over = [], piece.finish_reason is not None
        if not self._begun:
            self._begun = True
            events.append(NamedEvent.of("message_start", message=self._message([], None).model_dump()))
        events += map(self._step, self._parts.push(piece.reasoning, piece.text, piece.calls, over=over))
        if over:
            delta = {"stop_reason": self._reason(piece.finish_reason), "stop_sequence": piece.choice.stop_string}
            events.append(NamedEvent.of("message_delta", delta=delta, usage=self._usage().model_dump()))
        return events

    def ending(self) -> Sequence[BaseModel | str]:
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
        id = f"toolu_{self._answer.trace}_{part.index}"
        return ToolUseBlock(id=id, name=part.call.name, input=json.loads(part.text or "{}"))

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
        return MessageUsage.of(self._answer.usage())

    def _reason(self, finish_reason: str | None) -> str:
        if finish_reason == LENGTH:
            return "max_tokens"
        if finish_reason == TOOL_CALLS:
            return "tool_use"
        return "stop_sequence" if self._answer.choices[0].stop_string is not None else "end_turn"
