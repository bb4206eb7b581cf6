"""OpenAI's endpoints for chats, completions and models, and vLLM's /tokenize and /detokenize."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

from fastapi import APIRouter, Request
from pydantic import BaseModel
from starlette.responses import Response

from swarmnode.gateway.access.keys import ApiKey
from swarmnode.gateway.gateway import ServedModel, gateway_of, key_of
from swarmnode.gateway.generation.api_answer import ApiAnswer, Text
from swarmnode.gateway.generation.choice_stream import ChatLogprobs, Piece, SpelledChoice, TextSpeller, spell_prompt
from swarmnode.gateway.generation.request_fields import ToolUse
from swarmnode.gateway.generation.response_parser import PartKind
from swarmnode.gateway.http.api_error import bad_request
from swarmnode.gateway.http.body_route import MAX_VALUES, BodyRoute
from swarmnode.gateway.http.event_stream import DONE, ClientWatch, TextEvents
from swarmnode.gateway.openai.replies import (
    ChatChoice,
    ChatMessage,
    ChatReply,
    CompletionReply,
    DetokenizeReply,
    FunctionCall,
    ModelCard,
    ModelList,
    TextChoice,
    TokenizeReply,
    ToolCallReply,
    Usage,
)
from swarmnode.gateway.openai.requests import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
    offered_tools,
    templated,
)

router = APIRouter(route_class=BodyRoute)


@router.post("/v1/chat/completions", response_model=ChatReply)
async def chat_completions(asked: ChatRequest, request: Request) -> Response:
    """Generate the next message of a conversation."""
    model = gateway_of(request).model(asked.model)
    prompt = await model.encode_chat(asked.conversation(), asked.tool_use, asked.template_variables, asked.ending)
    choices = await model.choices([prompt], asked, key_of(request))
    answer = ApiAnswer("chatcmpl-", model.name, [prompt], choices)
    return await answer.respond(request, _ChatStyle(answer, tells_usage=asked.tells_usage), stream=asked.stream)


class _OpenAIStyle:
    def __init__(self, answer: ApiAnswer, *, tells_usage: bool) -> None:
        self._answer = answer
        self._tells_usage = tells_usage

    async def ending(self) -> Sequence[BaseModel | str]:
        return [self._reply([], Usage.of(self._answer.usage())), DONE] if self._tells_usage else [DONE]

    def _reply(self, choices: list[Any], usage: Usage | None = None) -> BaseModel:
        raise NotImplementedError


class _ChatStyle(_OpenAIStyle):
    def __init__(self, answer: ApiAnswer, *, tells_usage: bool) -> None:
        super().__init__(answer, tells_usage=tells_usage)
        self._begun: set[int] = set()  # choices whose role has been sent
        self._calls: Counter[int] = Counter()  # calls that have begun, by choice
        self._texts = TextEvents(
            lambda index, text: self._reply([ChatChoice(index=index, delta=ChatMessage(content=text))])
        )

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
        return self._reply(choices, Usage.of(self._answer.usage()), object="chat.completion")

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
            part = piece.call
            if part.number < self._calls[index]:  # name and id are in the first part of a call alone
                function = FunctionCall(name=None, arguments=part.arguments)
                call = ToolCallReply(index=part.number, id=None, function=function)
            else:
                self._calls[index] = part.number + 1
                call = self._call(index, part.number, part.name, part.arguments)
            chunks.append(ChatChoice(index=index, delta=ChatMessage(tool_calls=[call])))
        if piece.finish_reason is not None:
            chunks.append(ChatChoice(index=index, delta=ChatMessage(), finish_reason=piece.finish_reason))
        return [self._reply([chunk]) for chunk in chunks]

    def _call(self, choice: int, number: int, name: str, arguments: str) -> ToolCallReply:
        """Return a call in this API's format, with an id that is unique in a conversation."""
        id = f"call_{self._answer.stem}_{choice}_{number}"
        return ToolCallReply(index=number, id=id, function=FunctionCall(name=name, arguments=arguments))

    def _reply(
        self, choices: list[ChatChoice], usage: Usage | None = None, *, object: str = "chat.completion.chunk"
    ) -> ChatReply:
        answer = self._answer
        return ChatReply(
            id=answer.id, object=object, created=answer.created, model=answer.model, choices=choices, usage=usage
        )


@router.post("/v1/completions", response_model=CompletionReply)
async def completions(asked: CompletionRequest, request: Request) -> Response:
    """Generate the continuation of texts."""
    if asked.suffix:
        raise bad_request("suffix is not supported: models here only continue a text", "suffix")
    if asked.max_tokens == 0 and not asked.echo:
        raise bad_request("max_tokens: 0 works only with echo: true", "max_tokens")
    model = gateway_of(request).model(asked.model)
    model.check_count(len(asked.prompts), asked)
    special = asked.add_special_tokens
    prompts = [
        await model.encode(prompt, special_tokens=special) if isinstance(prompt, str) else prompt
        for prompt in asked.prompts
    ]
    tells_ids = asked.return_token_ids or await model.loader.tokenizer() is None
    choices = await model.choices(prompts, asked, key_of(request))
    echoes: list[Echo] = []
    if asked.echo:
        with ClientWatch(request.receive) as client:
            echoes = await client.run(_echoes(model, prompts, asked, key_of(request)))
    answer = ApiAnswer("cmpl-", model.name, prompts, choices)
    style = _CompletionStyle(answer, asked, echoes, tells_ids=tells_ids)
    return await answer.respond(request, style, stream=asked.stream)


class Echo(NamedTuple):
    """Prompt that is returned before its continuation."""

    text: str
    logprobs: Sequence[SpelledChoice]


async def _echoes(
    model: ServedModel, prompts: Sequence[list[int]], asked: CompletionRequest, key: ApiKey
) -> list[Echo]:
    """Return an echo of each prompt, with its logprobs if the request asks for logprobs."""
    tokenizer = await model.loader.tokenizer()
    echoes = []
    for given, ids in zip(asked.prompts, prompts, strict=True):
        text = given if isinstance(given, str) else ""
        if tokenizer is not None and not isinstance(given, str):
            (await model.client.limits()).ids(ids)
            text = await asyncio.to_thread(tokenizer.decode, ids, special_tokens=not asked.skip_special_tokens)
        if asked.logprobs is None:
            echoes.append(Echo(text, ()))
            continue
        async with model.queue.place(key):
            scores = await model.client.score(ids, most_likely=asked.logprobs, adapter=model.adapter)
        echoes.append(Echo(text, await asyncio.to_thread(spell_prompt, tokenizer, ids[0], scores)))
    return echoes


class _CompletionStyle(_OpenAIStyle):
    def __init__(self, answer: ApiAnswer, asked: CompletionRequest, echoes: Sequence[Echo], *, tells_ids: bool) -> None:
        super().__init__(answer, tells_usage=asked.tells_usage)
        self._tells_ids = tells_ids
        self._texts = TextEvents(lambda index, text: self._reply([TextChoice(index=index, text=text)]))
        self._spellers: defaultdict[int, TextSpeller] = defaultdict(TextSpeller)  # by choice
        self._lengths: Counter[int] = Counter()  # characters sent up to now, by choice
        self._echoes = {choice.index: echoes[choice.index // asked.texts] for choice in answer.choices if echoes}

    async def whole(self, texts: Sequence[Text]) -> CompletionReply:
        choices = [self._choice(text.index, text) for text in texts]
        return self._reply(choices, Usage.of(self._answer.usage()))

    def events(self, piece: Piece) -> list[CompletionReply | bytes]:
        index = piece.choice.index
        if not piece.is_text or self._tells_ids or index in self._echoes:
            return [self._reply([self._choice(index, piece)])]
        return [self._texts.fill(index, piece.text)]

    def _choice(self, index: int, said: Text | Piece) -> TextChoice:
        echo = self._echoes.pop(index, Echo("", ()))
        text = echo.text + said.text
        self._lengths[index] += len(text)
        logprobs = self._spellers[index].tell([*echo.logprobs, *said.logprobs], self._lengths[index])
        ids = list(said.ids) if self._tells_ids else None
        return TextChoice(index=index, text=text, finish_reason=said.finish_reason, logprobs=logprobs, token_ids=ids)

    def _reply(self, choices: list[TextChoice], usage: Usage | None = None) -> CompletionReply:
        answer = self._answer
        return CompletionReply(id=answer.id, created=answer.created, model=answer.model, choices=choices, usage=usage)


@router.get("/v1/models")
async def list_models(request: Request) -> ModelList:
    """List the models: each swarm of this gateway is one, and each of their adapters another."""
    return ModelList(data=[model.card() for model in gateway_of(request).models.values()])


@router.get("/v1/models/{name:path}")
async def one_model(name: str, request: Request) -> ModelCard:
    """Return one model."""
    return gateway_of(request).model(name).card()


@router.post("/tokenize")
async def tokenize(asked: TokenizeRequest, request: Request) -> TokenizeReply:
    """Return the token ids of a prompt or of a conversation, as the model would get them."""
    model = gateway_of(request).model(asked.model)
    if (asked.prompt is None) == (asked.messages is None):
        raise bad_request("send either prompt or messages, not both", "prompt")
    if asked.prompt is not None:
        tokens = await model.encode(asked.prompt, special_tokens=asked.add_special_tokens)
    else:
        tools, variables = ToolUse(offered_tools(asked.tools)), asked.chat_template_kwargs or {}
        tokens = await model.encode_chat(templated(asked.messages or ()), tools, variables, asked.ending)
    if len(tokens) > MAX_VALUES:
        raise bad_request(
            f"the text has {len(tokens):,} tokens, and at most {MAX_VALUES:,} can be returned: send a shorter one",
            "prompt",
        )
    return TokenizeReply(count=len(tokens), max_model_len=model.card().max_model_len, tokens=tokens)


@router.post("/detokenize")
async def detokenize(asked: DetokenizeRequest, request: Request) -> DetokenizeReply:
    """Return the text of token ids."""
    model = gateway_of(request).model(asked.model)
    tokenizer, limits = await model.tokenizer(), await model.client.limits()
    tokens = limits.ids(asked.tokens)
    return DetokenizeReply(prompt=await asyncio.to_thread(tokenizer.decode, tokens))
