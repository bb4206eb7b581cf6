"""Endpoints about the served models: OpenAI's /v1/models, and vLLM's /tokenize and /detokenize."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter, Request

from swarmnode.gateway.gateway import gateway_of
from swarmnode.gateway.generation.tool_use import ToolUse
from swarmnode.gateway.http.api_error import bad_request
from swarmnode.gateway.http.body_route import MAX_VALUES, BodyRoute
from swarmnode.gateway.openai.replies import DetokenizeReply, ModelCard, ModelList, TokenizeReply
from swarmnode.gateway.openai.requests import DetokenizeRequest, TokenizeRequest, offered_tools, templated

router = APIRouter(route_class=BodyRoute)


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
