"""Logarithms of tokens' probabilities as OpenAI's API tells them: with the tokens' texts."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import BaseModel

from swarmnode.client.tokenizer import UNFINISHED, ByteTokenizer, Tokenizer
from swarmnode.codec.sampling import TokenLogprob


class SpelledToken(BaseModel):
    """`bytes` of the token's text; null for a part of a character."""

    token: str
    logprob: float
    bytes: list[int] | None


class SpelledChoice(SpelledToken):
    """The token that was drawn, and the most likely ones."""

    top_logprobs: list[SpelledToken]


class ChatLogprobs(BaseModel):
    """Of a chat's answer, or of a piece of it."""

    content: list[SpelledChoice]
    refusal: None = None

    @classmethod
    def of(cls, choices: Sequence[SpelledChoice]) -> ChatLogprobs | None:
        """None where none are told."""
        return cls(content=list(choices)) if choices else None


class TextLogprobs(BaseModel):
    """Of a completion, or of a piece of it. `text_offset`: where each token begins in the completion."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]

    @classmethod
    def of(cls, choices: Sequence[SpelledChoice], offset: int) -> TextLogprobs | None:
        """None where none are told; the first of them begins at `offset`."""
        if not choices:
            return None
        offsets = [offset]
        for one in choices[:-1]:
            offsets.append(offsets[-1] + len(one.token))
        return cls(
            tokens=[one.token for one in choices],
            token_logprobs=[one.logprob for one in choices],
            top_logprobs=[{other.token: other.logprob for other in one.top_logprobs} for one in choices],
            text_offset=offsets,
        )

    @property
    def end(self) -> int:
        """Where the next token begins."""
        return self.text_offset[-1] + len(self.tokens[-1])


def spell(tokenizer: Tokenizer | ByteTokenizer | None, logprobs: Sequence[TokenLogprob]) -> SpelledChoice:
    """The drawn token, which comes first, and the others."""
    drawn, *others = (_spelled(tokenizer, one) for one in logprobs)
    return SpelledChoice(top_logprobs=others, **drawn.model_dump())


def _spelled(tokenizer: Tokenizer | ByteTokenizer | None, one: TokenLogprob) -> SpelledToken:
    if tokenizer is None:
        return SpelledToken(token=f"token_id:{one.id}", logprob=one.logprob, bytes=None)  # as vLLM names it
    text = tokenizer.decode_token(one.id)
    return SpelledToken(token=text, logprob=one.logprob, bytes=None if UNFINISHED in text else list(text.encode()))
