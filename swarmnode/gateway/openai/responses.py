"""POST /v1/responses, without a memory: each request brings its whole conversation."""

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
from swarmnode.gateway.http.event_stream import NamedEvent
from swarmnode.gateway.openai.requests import ResponsesRequest
from swarmnode.gateway.openai.response_replies import OutputMessage, OutputText, ResponseReply, ResponseUsage

router = APIRouter()
IN_PROGRESS, COMPLETED, INCOMPLETE = "in_progress", "completed", "incomplete"


@router.post("/v1/responses", response_model=ResponseReply)
async def responses(asked: ResponsesRequest, request: Request) -> Response:
    """What the model says next in a conversation."""
    model = gateway_of(request).model(asked.model)
    prompt = await model.encode_chat(asked.conversation())
    answer = ApiAnswer("resp_", model.name, [prompt], await model.choices([prompt], asked, key_of(request)))
    return await answer.respond(request, _ResponseStyle(answer, asked), stream=asked.stream)


class _ResponseStyle:
    def __init__(self, answer: ApiAnswer, asked: ResponsesRequest) -> None:
        self._answer = answer
        self._asked = asked
        self._text = ""
        self._reason: str | None = None
        self._numbers = itertools.count()

    def whole(self, texts: Sequence[Text]) -> ResponseReply:
        self._text, self._reason = texts[0].text, texts[0].finish_reason
        return self._response()

    def events(self, piece: Piece) -> list[NamedEvent]:
        begins = self._begin() if not self._text and self._reason is None else []
        self._text += piece.text
        self._reason = piece.finish_reason
        return [*begins, self._event("output_text.delta", **self._place(), delta=piece.text, logprobs=[])]

    def ending(self) -> Sequence[BaseModel | str]:
        message = self._message()
        item = {"output_index": 0, "item": message.model_dump()}
        part = message.content[0].model_dump()
        return [
            self._event("output_text.done", **self._place(), text=self._text, logprobs=[]),
            self._event("content_part.done", **self._place(), part=part),
            self._event("output_item.done", **item),
            self._event(self._status, response=self._response().model_dump()),
        ]

    def _begin(self) -> list[NamedEvent]:
        response = self._response().model_dump()
        item = self._message().model_dump() | {"content": []}
        return [
            self._event("created", response=response),
            self._event("in_progress", response=response),
            self._event("output_item.added", output_index=0, item=item),
            self._event("content_part.added", **self._place(), part=OutputText(text="").model_dump()),
        ]

    def _event(self, what: str, **told: Any) -> NamedEvent:
        return NamedEvent.of(f"response.{what}", sequence_number=next(self._numbers), **told)

    def _place(self) -> dict[str, Any]:
        return {"item_id": self._message().id, "output_index": 0, "content_index": 0}

    @property
    def _status(self) -> str:
        if self._reason is None:
            return IN_PROGRESS
        return INCOMPLETE if self._reason == LENGTH else COMPLETED

    def _message(self) -> OutputMessage:
        return OutputMessage(id=f"msg_{self._answer.trace}", status=self._status, content=[OutputText(text=self._text)])

    def _response(self) -> ResponseReply:
        answer, usage, status = self._answer, self._answer.usage(), self._status
        return ResponseReply(
            id=answer.id,
            created_at=answer.created,
            status=status,
            incomplete_details={"reason": "max_output_tokens"} if status == INCOMPLETE else None,
            instructions=self._asked.instructions,
            model=answer.model,
            output=[] if status == IN_PROGRESS else [self._message()],
            temperature=self._asked.temperature,
            top_p=self._asked.top_p,
            usage=None if status == IN_PROGRESS else ResponseUsage.of(usage),
        )
