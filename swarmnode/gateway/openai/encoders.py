"""Endpoints for models that encode texts: OpenAI's POST /v1/embeddings, and vLLM's POST /classify."""

from __future__ import annotations

import base64
import time
import uuid
from typing import Literal

import numpy as np
from fastapi import APIRouter, Request
from pydantic import BaseModel, Field

from swarmnode.client.remote_encoder import RemoteEncoder
from swarmnode.errors import ContextTooLong, UsageError
from swarmnode.gateway.gateway import gateway_of, key_of
from swarmnode.gateway.http.api_error import bad_request
from swarmnode.gateway.http.body_route import BodyRoute
from swarmnode.gateway.http.client_watch import ClientWatch
from swarmnode.gateway.openai.requests import Texts, each_of
from swarmnode.gateway.served_model import ServedModel
from swarmnode.swarm.records.manifest import CLASSIFY, EMBED

router = APIRouter(route_class=BodyRoute)
MAX_TEXTS = 2048  # OpenAI's own bound


class EncoderUsage(BaseModel):
    """Token counts of the input."""

    prompt_tokens: int
    total_tokens: int


class Embedding(BaseModel):
    """Vector of one text. `embedding` is a list of numbers, or float32 values (little-endian) in base64."""

    object: str = "embedding"
    index: int
    embedding: list[float] | str


class EmbeddingReply(BaseModel):
    """Vectors in the order of the texts."""

    object: str = "list"
    data: list[Embedding]
    model: str
    usage: EncoderUsage


class Classification(BaseModel):
    """Most probable class of a text (`label`), and the probabilities of all classes."""

    index: int
    label: str
    probs: list[float]
    num_classes: int


class ClassificationReply(BaseModel):
    """Classes in the order of the texts."""

    id: str = Field(default_factory=lambda: f"classify-{uuid.uuid4().hex}")
    object: str = "list"
    created: int = Field(default_factory=lambda: int(time.time()))
    model: str
    data: list[Classification]
    usage: EncoderUsage


class EncoderRequest(BaseModel):
    """Text or row of token ids, or a list of either."""

    model: str = ""
    input: Texts

    @property
    def texts(self) -> list[str] | list[list[int]]:
        """All texts or rows of token ids, as a list."""
        return each_of(self.input)


class EmbeddingRequest(EncoderRequest):
    """Body of POST /v1/embeddings."""

    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = Field(None, ge=1)


class ClassificationRequest(EncoderRequest):
    """Body of POST /classify."""


@router.post("/v1/embeddings")
async def embeddings(asked: EmbeddingRequest, request: Request) -> EmbeddingReply:
    """Compute the vectors of texts."""
    model = gateway_of(request).model(asked.model)
    encoder = await _encoder(model, EMBED)
    if asked.dimensions not in (None, encoder.size):
        raise bad_request(
            f"{model.name} makes vectors of {encoder.size} numbers: leave out dimensions, or send {encoder.size}",
            "dimensions",
        )
    vectors, usage = await _vectors(model, encoder, asked, request)
    data = [
        Embedding(index=index, embedding=_encoded(vector) if asked.encoding_format == "base64" else vector.tolist())
        for index, vector in enumerate(vectors)
    ]
    return EmbeddingReply(data=data, model=model.name, usage=usage)


@router.post("/classify")
async def classify(asked: ClassificationRequest, request: Request) -> ClassificationReply:
    """Classify texts."""
    model = gateway_of(request).model(asked.model)
    encoder = await _encoder(model, CLASSIFY)
    vectors, usage = await _vectors(model, encoder, asked, request)
    data = [
        Classification(
            index=index,
            label=_label(encoder, int(vector.argmax())),
            probs=vector.tolist(),
            num_classes=len(vector),
        )
        for index, vector in enumerate(vectors)
    ]
    return ClassificationReply(model=model.name, data=data, usage=usage)


async def _encoder(model: ServedModel, task: str) -> RemoteEncoder:
    """Return the encoder of `model`. Raises ApiError if the model has another task."""
    try:
        return await model.client.encoder(task)
    except UsageError as error:
        raise bad_request(str(error), "model", code="model_not_supported") from None


async def _vectors(
    model: ServedModel, encoder: RemoteEncoder, asked: EncoderRequest, request: Request
) -> tuple[list[np.ndarray], EncoderUsage]:
    """Return the vector of every text and the token counts. Computing begins after all texts have been checked. Raises ApiError if
    a text cannot be encoded."""
    if asked.input == []:
        raise bad_request("input is empty: send a text, token ids, or a list of either", "input")
    if len(asked.texts) > MAX_TEXTS:
        raise bad_request(f"send at most {MAX_TEXTS} texts in one request", "input")
    try:
        rows = [await encoder.ids(text) for text in asked.texts]
    except ContextTooLong as error:
        raise bad_request(str(error), "input", code="context_length_exceeded") from None
    except UsageError as error:
        raise bad_request(str(error), "input") from None

    async def computed() -> list[np.ndarray]:
        async with model.place(key_of(request)):
            return await encoder.vectors(rows)

    with ClientWatch(request.receive) as client:
        vectors = await client.run(computed())
    tokens = sum(map(len, rows))
    return vectors, EncoderUsage(prompt_tokens=tokens, total_tokens=tokens)


def _encoded(vector: np.ndarray) -> str:
    return base64.b64encode(vector.astype("<f4").tobytes()).decode()


def _label(encoder: RemoteEncoder, number: int) -> str:
    return encoder.labels[number] if number < len(encoder.labels) else f"LABEL_{number}"
