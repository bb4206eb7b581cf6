"""POST /v1/completions"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from fastapi import APIRouter, Request
from starlette.responses import Response

from swarmnode.gateway.gateway import gateway_of, key_of
from swarmnode.gateway.generation.api_answer import ApiAnswer, Text
from swarmnode.gateway.generation.choice_stream import Piece
from swarmnode.gateway.generation.logprobs import TextLogprobs
from swarmnode.gateway.http.api_error import bad_request
from swarmnode.gateway.http.body_route import BodyRoute
from swarmnode.gateway.http.event_stream import DONE, TextEvents
from swarmnode.gateway.openai.replies import CompletionReply, TextChoice, Usage
from swarmnode.gateway.openai.requests import CompletionRequest

router = APIRouter(route_class=BodyRoute)


@router.post("/v1/completions", response_model=CompletionReply)
async def completions(asked: CompletionRequest, request: Request) -> Response:
    """How a text goes on."""
    for field in ("suffix", "echo"):
        if getattr(asked, field):
            raise bad_request(f"{field} is not possible: a model here only goes on with a text", field)
    model = gateway_of(request).model(asked.model)
    model.check_count(len(asked.prompts), asked)
    prompts = [await model.encode(prompt) if isinstance(prompt, str) else prompt for prompt in asked.prompts]
    tells_ids = asked.return_token_ids or await model.loader.tokenizer() is None
    choices = await model.choices(prompts, asked, key_of(request))
    answer = ApiAnswer("cmpl-", model.name, prompts, choices)
    return await answer.respond(request, _CompletionStyle(answer, asked, tells_ids=tells_ids), stream=asked.stream)


class _CompletionStyle:
    def __init__(self, answer: ApiAnswer, asked: CompletionRequest, *, tells_ids: bool) -> None:
        self._answer = answer
        self._tells_usage = asked.tells_usage
        self._tells_ids = tells_ids
        self._texts = TextEvents(lambda index, text: self._told([TextChoice(index=index, text=text)]))
        self._offsets: Counter[int] = Counter()  # of each choice, where its next token begins

    def whole(self, texts: Sequence[Text]) -> CompletionReply:
        choices = [self._choice(text.index, text) for text in texts]
        return self._told(choices, Usage.of(self._answer.usage()))

    def events(self, piece: Piece) -> list[CompletionReply | bytes]:
        index = piece.choice.index
        if not piece.is_text or self._tells_ids:
            return [self._told([self._choice(index, piece)])]
        return [self._texts.fill(index, piece.text)]

    def _choice(self, index: int, said: Text | Piece) -> TextChoice:
        logprobs = TextLogprobs.of(said.logprobs, self._offsets[index])
        if logprobs is not None:
            self._offsets[index] = logprobs.end
        ids = list(said.ids) if self._tells_ids else None
        return TextChoice(
            index=index, text=said.text, finish_reason=said.finish_reason, logprobs=logprobs, token_ids=ids
        )

    def ending(self) -> Sequence[CompletionReply | str]:
        return [self._told([], Usage.of(self._answer.usage())), DONE] if self._tells_usage else [DONE]

    def _told(self, choices: list[TextChoice], usage: Usage | None = None) -> CompletionReply:
        answer = self._answer
        return CompletionReply(id=answer.id, created=answer.created, model=answer.model, choices=choices, usage=usage)
