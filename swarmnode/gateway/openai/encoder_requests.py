"""What is asked of models that make one vector of a text: embeddings as OpenAI has them, classes as vLLM has them."""

from __future__ import annotations

from typing import Literal, cast

from pydantic import BaseModel, Field

MAX_TEXTS = 2048  # OpenAI's own bound


class EncoderRequest(BaseModel):
    """A text, token ids, or several of one of these."""

    model: str = ""
    input: str | list[int] | list[str] | list[list[int]] = Field(min_length=1)

    @property
    def texts(self) -> list[str] | list[list[int]]:
        """Each of them."""
        if isinstance(self.input, str):
            return [self.input]
        if all(isinstance(one, int) for one in self.input):
            return [cast("list[int]", self.input)]
        return cast("list[str] | list[list[int]]", self.input)


class EmbeddingRequest(EncoderRequest):
    """POST /v1/embeddings"""

    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = Field(None, ge=1)


class ClassificationRequest(EncoderRequest):
    """POST /classify"""
