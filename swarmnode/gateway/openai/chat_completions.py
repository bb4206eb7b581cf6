"""OpenAI's endpoint for chats: POST /v1/chat/completions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from fastapi import APIRouter, Request
from starlette.responses import Response

from swarmnode.gateway.gateway import gateway_of, key_of
from swarmnode.gateway.generation.api_answer import ApiAnswer, Text
from swarmnode.gateway.generation.choice_stream import ChatLogprobs, Piece
from swarmnode.gateway.generation.parts import PartKind
from swarmnode.gateway.generation.response_parser import CallPart
from swarmnode.gateway.http.body_route import BodyRoute
from swarmnode.gateway.http.event_stream import DONE, TextEvents
from swarmnode.gateway.openai.replies import ChatChoice, ChatMessage, ChatReply, FunctionCall, ToolCallReply, Usage
from swarmnode.gateway.openai.requests import ChatRequest

router = APIRouter(route_class=BodyRoute)


@router.post("/v1/chat/completions", response_model=ChatReply)
async def chat_completions(asked: ChatRequest, request: Request) -> Response:
    """Generate the next message of a conversation."""
    model = gateway_of(request).model(asked.model)
    prompt = await model.encode_chat(asked.conversation(), asked.tool_use, asked.template_variables, asked.ending)
    choices = await model.choices([prompt], asked, key_of(request))
    answer = ApiAnswer("chatcmpl-", model.name, [prompt], choices)
    return await answer.respond(request, _ChatStyle(answer, tells_usage=asked.tells_usage), stream=asked.stream)


class _ChatStyle:
    def __init__(self, answer: ApiAnswer, *, tells_usage: bool) -> None:
        self._answer = answer
        self._tells_usage = tells_usage
        self._begun: set[int] = set()  # choices whose role has been sent
        self._calls: Counter[int] = Counter()  # calls that have begun, by choice
        self._texts = TextEvents(lambda index, text: self._chunk(index, ChatMessage(content=text)))

    async def whole(self, texts: Sequence[Text]) -> ChatReply:
        choices = []
        for text in texts:
            parts = [part for part in text.parts.all if part.kind is PartKind.CALL]
            calls = [
                self._call(text.index, number, part.call.name, part.text)
                for number, part in enumerate(parts)
                if part.call is not None
            ]
            message = ChatMessage(
                role="assistant",
                content=None if calls and not text.text else text.text,
                reasoning_content=text.reasoning or None,
                tool_calls=calls or None,
            )
            logprobs = ChatLogprobs.of(text.logprobs)
            choices.append(
                ChatChoice(index=text.index, message=message, finish_reason=text.finish_reason, logprobs=logprobs)
            )
        return self._told("chat.completion", choices, Usage.of(self._answer.usage()))

    def events(self, piece: Piece) -> list[ChatReply | bytes]:
        index = piece.choice.index
        if piece.is_text and index in self._begun:
            return [self._texts.fill(index, piece.text)]
        chunks = []
        if index not in self._begun:
            self._begun.add(index)
            chunks.append(ChatChoice(index=index, delta=ChatMessage(role="assistant", content="")))
        if piece.reasoning:
            chunks.append(ChatChoice(index=index, delta=ChatMessage(reasoning_content=piece.reasoning)))
        if piece.text or piece.logprobs:
            logprobs = ChatLogprobs.of(piece.logprobs)
            chunks.append(ChatChoice(index=index, delta=ChatMessage(content=piece.text), logprobs=logprobs))
        if piece.call is not None:
            calls = [self._call_part(index, piece.call)]
            chunks.append(ChatChoice(index=index, delta=ChatMessage(tool_calls=calls)))
        if piece.finish_reason is not None:
            chunks.append(ChatChoice(index=index, delta=ChatMessage(), finish_reason=piece.finish_reason))
        return [self._told("chat.completion.chunk", [chunk]) for chunk in chunks]

    def _chunk(self, index: int, delta: ChatMessage) -> ChatReply:
        return self._told("chat.completion.chunk", [ChatChoice(index=index, delta=delta)])

    async def ending(self) -> Sequence[ChatReply | str]:
        if not self._tells_usage:
            return [DONE]
        return [self._told("chat.completion.chunk", [], Usage.of(self._answer.usage())), DONE]

    def _call_part(self, choice: int, part: CallPart) -> ToolCallReply:
        """Return a part of a call in this API's format: name and id are in the first part alone."""
        if part.number < self._calls[choice]:
            return ToolCallReply(index=part.number, id=None, function=FunctionCall(name=None, arguments=part.arguments))
        self._calls[choice] = part.number + 1
        return self._call(choice, part.number, part.name, part.arguments)

    def _call(self, choice: int, number: int, name: str, arguments: str) -> ToolCallReply:
        """Return a call in this API's format, with an id that is unique in a conversation."""
        id = f"call_{self._answer.stem}_{choice}_{number}"
        return ToolCallReply(index=number, id=id, function=FunctionCall(name=name, arguments=arguments))

    def _told(self, object: str, choices: list[ChatChoice], usage: Usage | None = None) -> ChatReply:
        answer = self._answer
        return ChatReply(
            id=answer.id, object=object, created=answer.created, model=answer.model, choices=choices, usage=usage
        )
