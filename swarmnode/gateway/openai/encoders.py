"""Endpoints for models that encode texts: /v1/embeddings, vLLM's /classify, and /v1/rerank in the form of Cohere and Jina."""

from __future__ import annotations

import base64
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

import numpy as np
from fastapi import APIRouter, Request
from pydantic import BaseModel, Field

from swarmnode.client.remote_encoder import RemoteEncoder
from swarmnode.errors import ContextTooLong, UsageError
from swarmnode.gateway.gateway import ServedModel, gateway_of, key_of
from swarmnode.gateway.http.api_error import ApiError, bad_request
from swarmnode.gateway.http.body_route import BodyRoute, Items
from swarmnode.gateway.http.event_stream import ClientWatch
from swarmnode.gateway.openai.requests import Texts, each_of
from swarmnode.swarm.records.manifest import CLASSIFY, EMBED

router = APIRouter(route_class=BodyRoute)
MAX_TEXTS = 2048  # OpenAI's own bound
MAX_DOCUMENTS = 1000  # Cohere's


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

    truncate_prompt_tokens: int | None = Field(
        None, ge=-1, description="Cut texts to this many tokens; -1: to the model's limit."
    )
    truncate: bool | Literal["NONE", "END"] = Field(
        False, description="Cut texts at the model's limit; false: refuse longer ones."
    )

    @property
    def most_tokens(self) -> int | None:
        """Number of tokens that texts are cut to, -1 for the model's limit; None if longer texts are refused."""
        if self.truncate_prompt_tokens is not None:
            return self.truncate_prompt_tokens
        return -1 if self.truncate in (True, "END") else None

    @property
    def texts(self) -> list[str] | list[list[int]]:
        """All texts or rows of token ids, as a list."""
        return each_of(self.input)


class EmbeddingRequest(EncoderRequest):
    """Body of POST /v1/embeddings."""

    truncate: bool | Literal["NONE", "END"] = Field(
        True, description="Cut texts at the model's limit, as sentence-transformers does; false: refuse longer ones."
    )
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = Field(None, ge=1)


class ClassificationRequest(EncoderRequest):
    """Body of POST /classify."""


class Document(BaseModel):
    """A document to rank."""

    text: str


class RerankRequest(BaseModel):
    """A query and documents to rank, as Cohere and Jina have it. Documents longer than the model are cut."""

    model: str = ""
    query: str = Field(min_length=1)
    documents: Items[str | Document] = Field(min_length=1, max_length=MAX_DOCUMENTS)
    top_n: int | None = Field(None, ge=1, description="Return the best N only.")
    return_documents: bool = False

    @property
    def texts(self) -> list[str]:
        """The documents' texts, in their order."""
        return [each if isinstance(each, str) else each.text for each in self.documents]


class RankedDocument(BaseModel):
    """A document's place in the request, and its relevance: a cross-encoder's probability, or the cosine of embeddings."""

    index: int
    relevance_score: float
    document: Document | None = None


class RerankReply(BaseModel):
    """The documents, the most relevant one first."""

    id: str = Field(default_factory=lambda: f"rerank-{uuid.uuid4().hex}")
    model: str
    results: list[RankedDocument]
    usage: EncoderUsage


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
    if asked.encoding_format == "base64":
        embedded = [base64.b64encode(vector.astype("<f4").tobytes()).decode() for vector in vectors]
    else:
        embedded = [vector.tolist() for vector in vectors]
    data = [Embedding(index=index, embedding=each) for index, each in enumerate(embedded)]
    return EmbeddingReply(data=data, model=model.name, usage=usage)


@router.post("/classify")
async def classify(asked: ClassificationRequest, request: Request) -> ClassificationReply:
    """Classify texts."""
    model = gateway_of(request).model(asked.model)
    encoder = await _encoder(model, CLASSIFY)
    vectors, usage = await _vectors(model, encoder, asked, request)
    data = []
    for index, vector in enumerate(vectors):
        best = int(vector.argmax())
        label = encoder.labels[best] if best < len(encoder.labels) else f"LABEL_{best}"
        data.append(Classification(index=index, label=label, probs=vector.tolist(), num_classes=len(vector)))
    return ClassificationReply(model=model.name, data=data, usage=usage)


@router.post("/rerank")
@router.post("/v1/rerank")
@router.post("/v2/rerank")
async def rerank(asked: RerankRequest, request: Request) -> RerankReply:
    """Rank documents by their relevance to a query: by a cross-encoder, or by embeddings."""
    model = gateway_of(request).model(asked.model)
    scores, usage = await _ranked(model, asked, request)
    order = sorted(range(len(scores)), key=lambda index: -scores[index])[: asked.top_n]
    shown = [Document(text=text) if asked.return_documents else None for text in asked.texts]
    results = [RankedDocument(index=index, relevance_score=scores[index], document=shown[index]) for index in order]
    return RerankReply(model=model.name, results=results, usage=usage)


async def _encoder(model: ServedModel, task: str) -> RemoteEncoder:
    """Return the encoder of `model`. Raises ApiError if the model has another task."""
    try:
        return await model.client.encoder(task)
    except UsageError as error:
        raise ApiError("model_not_supported", str(error), parameter="model") from None


async def _vectors(
    model: ServedModel, encoder: RemoteEncoder, asked: EncoderRequest, request: Request
) -> tuple[list[np.ndarray], EncoderUsage]:
    """Return the vector of every text and the token counts. Computing begins after all texts have been checked. Raises ApiError if
    a text cannot be encoded."""
    if asked.input == []:
        raise bad_request("input is empty: send a text, token ids, or a list of either", "input")
    if len(asked.texts) > MAX_TEXTS:
        raise bad_request(f"send at most {MAX_TEXTS} texts in one request", "input")
    with _refusing("input"):
        rows = [await encoder.ids(text, most_tokens=asked.most_tokens) for text in asked.texts]
    return await _computed(model, encoder, rows, request)


async def _computed(
    model: ServedModel, encoder: RemoteEncoder, rows: Sequence[Sequence[int]], request: Request
) -> tuple[list[np.ndarray], EncoderUsage]:
    """Return the vectors of rows of ids, when the key has a place, and the number of all tokens."""

    async def computed() -> list[np.ndarray]:
        async with model.queue.place(key_of(request)):
            return await encoder.vectors(rows)

    with ClientWatch(request.receive) as client:
        vectors = await client.run(computed())
    tokens = sum(map(len, rows))
    return vectors, EncoderUsage(prompt_tokens=tokens, total_tokens=tokens)


async def _ranked(model: ServedModel, asked: RerankRequest, request: Request) -> tuple[list[float], EncoderUsage]:
    """Return the relevance of each document to the query."""
    task = model.client.manifest.task
    if task == CLASSIFY:
        encoder = await _encoder(model, CLASSIFY)
        if encoder.size != 1:
            raise ApiError(
                "model_not_supported",
                f"{model.name} has {encoder.size} classes; a cross-encoder has one",
                parameter="model",
            )
        with _refusing("documents"):
            rows = [await encoder.pair_ids(asked.query, text) for text in asked.texts]
        vectors, usage = await _computed(model, encoder, rows, request)
        return [float(vector[0]) for vector in vectors], usage
    encoder = await _encoder(model, EMBED)
    with _refusing("documents"):
        rows = [await encoder.ids(text, most_tokens=-1) for text in (asked.query, *asked.texts)]
    (query, *documents), usage = await _computed(model, encoder, rows, request)
    return [_cosine(query, document) for document in documents], usage


@contextmanager
def _refusing(field: str) -> Iterator[None]:
    """Turn errors of texts into answers 400 that name the `field`."""
    try:
        yield
    except ContextTooLong as error:
        raise ApiError("context_length_exceeded", str(error), parameter=field) from None
    except UsageError as error:
        raise bad_request(str(error), field) from None


def _cosine(first: np.ndarray, second: np.ndarray) -> float:
    """Return the cosine of the angle between two vectors; 0 if one of them is 0."""
    length = float(np.linalg.norm(first) * np.linalg.norm(second))
    return float(first @ second) / length if length else 0.0
