"""POST /v1/messages, as Anthropic's clients ask, and what counts their tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Request
from pydantic import BaseModel
from starlette.responses import Response

from swarmnode.gateway.anthropic.replies import MessageReply, MessageUsage, TextBlock, TokenCount
from swarmnode.gateway.anthropic.requests import MessagesRequest
from swarmnode.gateway.gateway import gateway_of, key_of
from swarmnode.gateway.generation.api_answer import ApiAnswer, Text
from swarmnode.gateway.generation.choice_stream import LENGTH, Piece
from swarmnode.gateway.http.event_stream import NamedEvent

router = APIRouter()


@router.post("/v1/messages", response_model=MessageReply)
async def messages(asked: MessagesRequest, request: Request) -> Response:
    """What the model says next in a conversation."""
    model = gateway_of(request).model(asked.model)
    prompt = await model.encode_chat(asked.conversation())
    answer = ApiAnswer("msg_", model.name, [prompt], await model.choices([prompt], asked, key_of(request)))
    return await answer.respond(request, _MessageStyle(answer), stream=asked.stream)


@router.post("/v1/messages/count_tokens")
async def count_tokens(asked: MessagesRequest, request: Request) -> TokenCount:
    """How many tokens a conversation is."""
    prompt = await gateway_of(request).model(asked.model).encode_chat(asked.conversation())
    return TokenCount(input_tokens=len(prompt))


class _MessageStyle:
    def __init__(self, answer: ApiAnswer) -> None:
        self._answer = answer
        self._begun = False

    def whole(self, texts: Sequence[Text]) -> MessageReply:
        return self._message([TextBlock(text=texts[0].text)], self._reason(texts[0].finish_reason))

    def events(self, piece: Piece) -> list[NamedEvent]:
        events = []
        if not self._begun:
            self._begun = True
            block = TextBlock(text="").model_dump()
            events.append(NamedEvent.of("message_start", message=self._message([], None).model_dump()))
            events.append(NamedEvent.of("content_block_start", index=0, content_block=block))
        if piece.text:
            delta: dict[str, Any] = {"type": "text_delta", "text": piece.text}
            events.append(NamedEvent.of("content_block_delta", index=0, delta=delta))
        if piece.finish_reason is not None:
            delta = {"stop_reason": self._reason(piece.finish_reason), "stop_sequence": piece.choice.stop_string}
            events.append(NamedEvent.of("content_block_stop", index=0))
            events.append(NamedEvent.of("message_delta", delta=delta, usage=self._usage().model_dump()))
        return events

    def ending(self) -> Sequence[BaseModel | str]:
        return [NamedEvent.of("message_stop")]

    def _message(self, content: list[TextBlock], reason: str | None) -> MessageReply:
        answer = self._answer
        stop_string = answer.choices[0].stop_string
        return MessageReply(
            id=answer.id,
            model=answer.model,
            content=content,
            stop_reason=reason,
            stop_sequence=stop_string,
            usage=self._usage(),
        )

    def _usage(self) -> MessageUsage:
        return MessageUsage.of(self._answer.usage())

    def _reason(self, finish_reason: str | None) -> str:
        if finish_reason == LENGTH:
            return "max_tokens"
        return "stop_sequence" if self._answer.choices[0].stop_string is not None else "end_turn"
