"""OpenAI's endpoint for completions: POST /v1/completions."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from fastapi import APIRouter, Request
from starlette.responses import Response

from swarmnode.gateway.access.keys import ApiKey
from swarmnode.gateway.gateway import gateway_of, key_of
from swarmnode.gateway.generation.api_answer import ApiAnswer, Text
from swarmnode.gateway.generation.choice_stream import Piece, SpelledChoice, TextSpeller, spell_prompt
from swarmnode.gateway.http.api_error import bad_request
from swarmnode.gateway.http.body_route import BodyRoute
from swarmnode.gateway.http.event_stream import DONE, ClientWatch, TextEvents
from swarmnode.gateway.openai.replies import CompletionReply, TextChoice, Usage
from swarmnode.gateway.openai.requests import CompletionRequest
from swarmnode.gateway.served_model import ServedModel

router = APIRouter(route_class=BodyRoute)


@router.post("/v1/completions", response_model=CompletionReply)
async def completions(asked: CompletionRequest, request: Request) -> Response:
    """Generate the continuation of texts."""
    if asked.suffix:
        raise bad_request("suffix is not supported: models here only continue a text", "suffix")
    if asked.max_tokens == 0 and not asked.echo:
        raise bad_request("max_tokens: 0 works only with echo: true", "max_tokens")
    model = gateway_of(request).model(asked.model)
    model.check_count(len(asked.prompts), asked)
    prompts = [await _ids(model, prompt, asked) for prompt in asked.prompts]
    tells_ids = asked.return_token_ids or await model.loader.tokenizer() is None
    choices = await model.choices(prompts, asked, key_of(request))
    echoes: list[Echo] = []
    if asked.echo:
        with ClientWatch(request.receive) as client:
            echoes = await client.run(_echoes(model, prompts, asked, key_of(request)))
    answer = ApiAnswer("cmpl-", model.name, prompts, choices)
    style = _CompletionStyle(answer, asked, echoes, tells_ids=tells_ids)
    return await answer.respond(request, style, stream=asked.stream)


async def _ids(model: ServedModel, prompt: str | list[int], asked: CompletionRequest) -> list[int]:
    if isinstance(prompt, str):
        return await model.encode(prompt, special_tokens=asked.add_special_tokens)
    return prompt


class Echo(NamedTuple):
    """Prompt that is returned before its continuation."""

    text: str
    logprobs: Sequence[SpelledChoice]


async def _echoes(
    model: ServedModel, prompts: Sequence[list[int]], asked: CompletionRequest, key: ApiKey
) -> list[Echo]:
    """Return an echo of each prompt, with its logprobs if the request asks for logprobs."""
    tokenizer = await model.loader.tokenizer()
    told = []
    for given, ids in zip(asked.prompts, prompts, strict=True):
        text = given if isinstance(given, str) else ""
        if tokenizer is not None and not isinstance(given, str):
            (await model.client.limits()).ids(ids)
            text = await asyncio.to_thread(tokenizer.decode, ids, special_tokens=not asked.skip_special_tokens)
        if asked.logprobs is None:
            told.append(Echo(text, ()))
            continue
        async with model.place(key):
            scores = await model.client.score(ids, most_likely=asked.logprobs, adapter=model.adapter)
        told.append(Echo(text, await asyncio.to_thread(spell_prompt, tokenizer, ids[0], scores)))
    return told


class _CompletionStyle:
    def __init__(self, answer: ApiAnswer, asked: CompletionRequest, echoes: Sequence[Echo], *, tells_ids: bool) -> None:
        self._answer = answer
        self._tells_usage = asked.tells_usage
        self._tells_ids = tells_ids
        self._texts = TextEvents(lambda index, text: self._told([TextChoice(index=index, text=text)]))
        self._spellers: defaultdict[int, TextSpeller] = defaultdict(TextSpeller)  # by choice
        self._lengths: Counter[int] = Counter()  # characters sent up to now, by choice
        self._echoes = {choice.index: echoes[choice.index // asked.texts] for choice in answer.choices if echoes}

    async def whole(self, texts: Sequence[Text]) -> CompletionReply:
        choices = [self._choice(text.index, text) for text in texts]
        return self._told(choices, Usage.of(self._answer.usage()))

    def events(self, piece: Piece) -> list[CompletionReply | bytes]:
        index = piece.choice.index
        if not piece.is_text or self._tells_ids or index in self._echoes:
            return [self._told([self._choice(index, piece)])]
        return [self._texts.fill(index, piece.text)]

    def _choice(self, index: int, said: Text | Piece) -> TextChoice:
        echo = self._echoes.pop(index, Echo("", ()))
        text = echo.text + said.text
        self._lengths[index] += len(text)
        logprobs = self._spellers[index].tell([*echo.logprobs, *said.logprobs], self._lengths[index])
        ids = list(said.ids) if self._tells_ids else None
        return TextChoice(index=index, text=text, finish_reason=said.finish_reason, logprobs=logprobs, token_ids=ids)

    async def ending(self) -> Sequence[CompletionReply | str]:
        return [self._told([], Usage.of(self._answer.usage())), DONE] if self._tells_usage else [DONE]

    def _told(self, choices: list[TextChoice], usage: Usage | None = None) -> CompletionReply:
        answer = self._answer
        return CompletionReply(id=answer.id, created=answer.created, model=answer.model, choices=choices, usage=usage)
