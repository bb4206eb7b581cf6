"""What is asked of models that make one vector of a text: embeddings as OpenAI has them, classes as vLLM has them."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field

from swarmnode.gateway.openai.requests import Texts, each_of

MAX_TEXTS = 2048  # OpenAI's own bound


class EncoderRequest(BaseModel):
    """A text, token ids, or several of one of these."""

    model: str = ""
    input: Texts = Field(min_length=1)

    @property
    def texts(self) -> list[str] | list[list[int]]:
        """Each of them."""
        return each_of(self.input)


class EmbeddingRequest(EncoderRequest):
    """POST /v1/embeddings"""

    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = Field(None, ge=1)


class ClassificationRequest(EncoderRequest):
    """POST /classify"""
