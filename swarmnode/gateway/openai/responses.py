"""OpenAI's endpoints /v1/responses. A response is kept for a day unless its request forbids it, so that the next request can
continue its conversation."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from typing import Annotated, Any, Literal

import msgspec
from fastapi import APIRouter, Depends, Query, Request
from pydantic import BaseModel
from starlette.responses import Response

from swarmnode.errors import LocalError
from swarmnode.gateway.gateway import gateway_of, key_of
from swarmnode.gateway.generation.api_answer import ApiAnswer, Text
from swarmnode.gateway.generation.choice_stream import LENGTH, Piece
from swarmnode.gateway.generation.response_parser import AnswerPart, PartEvent, PartKind, Parts, PartStep, TokenUsage
from swarmnode.gateway.http.api_error import ApiError, bad_request, too_many
from swarmnode.gateway.http.body_route import BodyRoute
from swarmnode.gateway.http.event_stream import NamedEvent
from swarmnode.gateway.openai.kept_responses import Item, StoredResponse
from swarmnode.gateway.openai.replies import PromptTokens
from swarmnode.gateway.openai.response_requests import COMPLETED, REFERENCE, ResponsesRequest, turns_of

log = logging.getLogger(__name__)

router = APIRouter(route_class=BodyRoute)
IN_PROGRESS, INCOMPLETE = "in_progress", "incomplete"
MAX_LISTED = 100
MOST_READINGS, MOST_READINGS_OF_KEY = 16, 4  # of kept responses at once
READING_RETRY_S = 1.0
MAX_ID_CHARS = 100  # that an error repeats
Keep = Callable[[str, bytes], None]
"""Function that keeps a response by its id and its JSON. Raises LocalError."""
SPOKEN = {  # names of events
    PartKind.TEXT: "output_text",
    PartKind.REASONING: "reasoning_text",
    PartKind.CALL: "function_call_arguments",
}


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
    """Response of POST /v1/responses. `store` says whether it is kept."""

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
    previous_response_id: str | None
    temperature: float | None
    tool_choice: str | dict[str, Any] = "auto"
    tools: list[dict[str, Any]] = []
    top_p: float | None
    usage: ResponseUsage | None
    store: bool = False


class DeletedResponse(BaseModel):
    """Response of DELETE /v1/responses/{id}."""

    id: str
    object: str = "response"
    deleted: bool = True


class InputItemList(BaseModel):
    """Items that a response answers. `has_more` tells that further ones follow `last_id`."""

    object: str = "list"
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


async def _reading(request: Request) -> AsyncIterator[None]:
    """Hold one of the places to read kept responses until the answer has been sent: each reading takes several times the size of
    its response. Raises ApiError (429) if the key, or all keys together, have no place left."""
    readings, key = gateway_of(request).readings, key_of(request).name
    if readings[key] >= MOST_READINGS_OF_KEY or readings.total() >= MOST_READINGS:
        raise too_many("too many kept responses are being read at once: try again later", READING_RETRY_S)
    readings[key] += 1
    try:
        yield
    finally:
        readings[key] -= 1
        if not readings[key]:
            del readings[key]


reading = contextlib.asynccontextmanager(_reading)
READS = [Depends(_reading)]


@router.post("/v1/responses", response_model=ResponseReply)
async def responses(asked: ResponsesRequest, request: Request) -> Response:
    """Generate the next message of a conversation. The response is kept for a day unless `store` is false."""
    model = gateway_of(request).model(asked.model)
    asked.check_supported()
    items = asked.items()
    if asked.previous_response_id is not None or any(item.type == REFERENCE for item in items):
        async with reading(request):
            items = await _with_referenced([*await _earlier(asked.previous_response_id, request), *items], request)
    turns = turns_of(items, asked.instructions)
    prompt = await model.encode_chat(turns, asked.tool_use, asked.template_variables)
    answer = ApiAnswer("resp_", model.name, [prompt], await model.choices([prompt], asked, key_of(request)))
    keep = None
    if (kept := gateway_of(request).responses) is not None and asked.store is not False:
        keep = partial(kept.store, key_of(request).name, items=items)
    return await answer.respond(request, _ResponseStyle(answer, asked, keep), stream=asked.stream)


@router.get("/v1/responses/{id}", response_model=ResponseReply, dependencies=READS)
async def get_response(id: str, request: Request, stream: bool = False) -> Response:
    """Return a kept response of this API key."""
    if stream:
        raise bad_request("a kept response is not streamed again: leave out stream", "stream")
    return Response(bytes((await _stored_response(id, request)).reply), media_type="application/json")


@router.delete("/v1/responses/{id}", dependencies=READS)
async def delete_response(id: str, request: Request) -> DeletedResponse:
    """Remove a kept response of this API key. Later responses of its conversation stay."""
    kept = gateway_of(request).responses
    if kept is None or not await asyncio.to_thread(kept.remove, key_of(request).name, id):
        raise _not_found(id)
    return DeletedResponse(id=id)


@router.get("/v1/responses/{id}/input_items", dependencies=READS)
async def input_items(
    id: str,
    request: Request,
    after: str | None = None,
    limit: Annotated[int, Query(ge=1, le=MAX_LISTED)] = 20,
    order: Literal["asc", "desc"] = "desc",
) -> InputItemList:
    """Return the items that a kept response answers, the last one first, with those of the responses before it."""
    items = (await _stored_response(id, request)).input
    if order == "desc":
        items = items[::-1]
    ids = [item.id for item in items]
    if after is not None and after not in ids:
        raise bad_request(f"{after!r} is no input item of this response", "after")
    begin = 0 if after is None else ids.index(after) + 1
    page = items[begin : begin + limit]
    return InputItemList(
        data=msgspec.to_builtins(page),
        first_id=page[0].id if page else None,
        last_id=page[-1].id if page else None,
        has_more=begin + limit < len(items),
    )


async def _earlier(id: str | None, request: Request) -> list[Item]:
    """Return the conversation up to the end of the response `id`; empty if `id` is None. Raises ApiError (404) if this API key has
    no such response."""
    if id is None:
        return []
    try:
        return (await _stored_response(id, request)).conversation()
    except ApiError as error:
        sentence = f"Previous response with id {id[:MAX_ID_CHARS]!r} not found: responses are kept for a day; send the whole input"
        raise ApiError("previous_response_not_found", sentence, parameter="previous_response_id") from error


async def _with_referenced(items: list[Item], request: Request) -> list[Item]:
    """Return the conversation with each reference replaced by the item that it names. The item belongs to a kept response of the
    request's API key, or precedes it. Raises ApiError (404) if there is no such item."""
    by_id = {item.id: item for item in items if item.type != REFERENCE}
    kept, owner = gateway_of(request).responses, key_of(request).name
    for item in reversed(items):  # a later response has the items of those before it
        if item.id in by_id or item.type != REFERENCE:
            continue
        _, _, place = item.id.partition("_")
        found = None if kept is None else await asyncio.to_thread(kept.find, owner, f"resp_{place.rpartition('_')[0]}")
        by_id |= {each.id: each for each in ([] if found is None else found.conversation())}
        if item.id not in by_id:
            sentence = f"the item_reference {item.id[:MAX_ID_CHARS]!r} names no item of a kept response: send the item"
            raise ApiError(404, sentence, parameter="input")
    return [by_id[item.id] for item in items]


async def _stored_response(id: str, request: Request) -> StoredResponse:
    """Return the kept response `id` of the request's API key. Raises ApiError (404) if there is none."""
    kept = gateway_of(request).responses
    found = None if kept is None else await asyncio.to_thread(kept.find, key_of(request).name, id)
    if found is None:
        raise _not_found(id)
    return found


def _not_found(id: str) -> ApiError:
    return ApiError(404, f"Response with id {id[:MAX_ID_CHARS]!r} not found.", parameter="id")


class _ResponseStyle:
    def __init__(self, answer: ApiAnswer, asked: ResponsesRequest, store: Keep | None) -> None:
        self._answer = answer
        self._asked = asked
        self._store = store
        self._parts = Parts()
        self._reason: str | None = None
        self._numbers = itertools.count()
        self._begun = False

    async def whole(self, texts: Sequence[Text]) -> ResponseReply:
        [text] = texts
        self._reason = text.finish_reason
        self._parts = text.parts
        return await self._stored_reply()

    def events(self, piece: Piece) -> list[NamedEvent]:
        begins = [] if self._begun else [self._response_event("created"), self._response_event("in_progress")]
        self._begun = True
        self._reason = piece.finish_reason
        over = piece.finish_reason is not None
        parts = self._parts.push(piece.reasoning, piece.text, piece.call, over=over)
        return [*begins, *(event for step in parts for event in self._step(step))]

    async def ending(self) -> Sequence[BaseModel | str]:
        response = await self._stored_reply()
        return [self._event(self._status, response=response.model_dump())]

    async def _stored_reply(self) -> ResponseReply:
        """Return the response after it was kept, if it is to be. If that fails, its `store` is false."""
        response = self._response()
        if self._store is not None:
            try:
                await asyncio.to_thread(self._store, response.id, response.model_dump_json().encode())
            except LocalError as error:
                log.warning("a response is not kept: %s", error)
                response.store = False
        return response

    # -- events

    def _step(self, event: PartEvent) -> list[NamedEvent]:
        """Return the events of a part. A text or reasoning is the only content of its item; a call has none."""
        step, part, text = event
        place: dict[str, Any] = {"item_id": self._item_id(part), "output_index": part.index}
        told: dict[str, Any] = {}
        if part.call is not None:
            whole = {"arguments": part.text, "name": part.call.name}
        else:
            place["content_index"] = 0
            if part.kind is PartKind.TEXT:
                told["logprobs"] = []
            whole = {"text": part.text, **told}
        if step is PartStep.DELTA:
            return [self._event(f"{SPOKEN[part.kind]}.delta", **place, delta=text, **told)]
        events = []
        if step is PartStep.BEGIN:
            item = self._item(part, IN_PROGRESS).model_dump() | ({"content": []} if part.call is None else {})
            events.append(self._event("output_item.added", output_index=part.index, item=item))
        else:
            events.append(self._event(f"{SPOKEN[part.kind]}.done", **place, **whole))
        if part.call is None:
            content = (OutputText if part.kind is PartKind.TEXT else ReasoningText)(text=part.text).model_dump()
            what = "content_part.added" if step is PartStep.BEGIN else "content_part.done"
            events.append(self._event(what, **place, part=content))
        if step is PartStep.END:
            item = self._item(part, INCOMPLETE if self._reason == LENGTH else COMPLETED).model_dump()
            events.append(self._event("output_item.done", output_index=part.index, item=item))
        return events

    def _response_event(self, what: str) -> NamedEvent:
        return self._event(what, response=self._response().model_dump())

    def _event(self, what: str, **told: Any) -> NamedEvent:
        return NamedEvent.of(f"response.{what}", sequence_number=next(self._numbers), **told)

    # -- items

    def _item_id(self, part: AnswerPart) -> str:
        prefix = {PartKind.TEXT: "msg", PartKind.REASONING: "rs", PartKind.CALL: "fc"}[part.kind]
        return f"{prefix}_{self._answer.stem}_{part.index}"

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

    def _response(self) -> ResponseReply:
        answer, asked, status = self._answer, self._asked, self._status
        choice = asked.tool_choice or "auto"
        # If the answer was cut off, its last item is the incomplete one.
        ended = [*[COMPLETED] * (len(self._parts.all) - 1), status]
        output = [] if status == IN_PROGRESS else list(map(self._item, self._parts.all, ended))
        return ResponseReply(
            id=answer.id,
            created_at=answer.created,
            status=status,
            incomplete_details={"reason": "max_output_tokens"} if status == INCOMPLETE else None,
            instructions=asked.instructions,
            metadata=asked.metadata or {},
            model=answer.model,
            output=output,
            parallel_tool_calls=asked.parallel_tool_calls is not False,
            previous_response_id=asked.previous_response_id,
            temperature=asked.temperature,
            tool_choice=choice if isinstance(choice, str) else choice.model_dump(),
            tools=[tool.model_dump() for tool in asked.tools or ()],
            top_p=asked.top_p,
            store=self._store is not None,
            usage=None if status == IN_PROGRESS else ResponseUsage.of(answer.usage()),
        )
