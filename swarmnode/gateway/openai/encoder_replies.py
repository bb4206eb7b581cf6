"""What comes back from models that make one vector of a text."""

from __future__ import annotations

import time
import uuid

from pydantic import BaseModel, Field


class EncoderUsage(BaseModel):
    """How many tokens went in."""

    prompt_tokens: int
    total_tokens: int


class Embedding(BaseModel):
    """`embedding`: numbers, or float32 (little-endian) in base64."""

    object: str = "embedding"
    index: int
    embedding: list[float] | str


class EmbeddingReply(BaseModel):
    """The vectors, in the order of the texts."""

    object: str = "list"
    data: list[Embedding]
    model: str
    usage: EncoderUsage


class Classification(BaseModel):
    """The most probable class of a text, and how probable each is."""

    index: int
    label: str
    probs: list[float]
    num_classes: int


class ClassificationReply(BaseModel):
    """The classes, in the order of the texts."""

    id: str = Field(default_factory=lambda: f"classify-{uuid.uuid4().hex}")
    object: str = "list"
    created: int = Field(default_factory=lambda: int(time.time()))
    model: str
    data: list[Classification]
    usage: EncoderUsage
