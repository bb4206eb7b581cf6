"""Logarithms of tokens' probabilities in the format of OpenAI's API, which has the tokens' texts."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from pydantic import BaseModel, PrivateAttr

from swarmnode.client.tokenizer import UNFINISHED, ByteTokenizer, Tokenizer
from swarmnode.codec.sampling import TokenLogprob


class SpelledToken(BaseModel):
    """Token with its text. `bytes` are the token's bytes, null without a tokenizer. A token that is only a part of a character has
    a `token` like `bytes:\\xe2`."""

    token: str
    logprob: float
    bytes: list[int] | None
    _id: int = PrivateAttr(-1)


class SpelledChoice(SpelledToken):
    """Token that was drawn, with the most likely tokens in its place."""

    top_logprobs: list[SpelledToken]
    _is_shown: bool = PrivateAttr(True)  # whether the text contains the token
    _follows: bool = PrivateAttr(True)  # whether a token precedes it


class ChatLogprobs(BaseModel):
    """Logprobs of a chat's answer, or of a piece of it."""

    content: list[SpelledChoice]
    refusal: None = None

    @classmethod
    def of(cls, choices: Sequence[SpelledChoice]) -> ChatLogprobs | None:
        """Return the logprobs of `choices`; None if there are none."""
        return cls(content=list(choices)) if choices else None


class TextLogprobs(BaseModel):
    """Logprobs of a completion, or of a piece of it. `text_offset` is the index in the text at which each token begins. The first
    token of a prompt has null logprobs. If several likely tokens have the same text, all after the first are named by their ids."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class TextSpeller:
    """Converter of the logprobs of one completion, piece after piece; it counts characters for `text_offset`."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._chars = 0  # complete characters up to now

    def __repr__(self) -> str:
        return f"<TextSpeller after {self._chars} characters>"

    def tell(self, choices: Sequence[SpelledChoice], text_length: int) -> TextLogprobs | None:
        """Return the logprobs of the tokens in `choices`; None if there are none. No offset exceeds `text_length`, where a stop
        string may have cut the text."""
        if not choices:
            return None
        told = TextLogprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])
        for one in choices:
            told.text_offset.append(min(self._chars, text_length))
            told.tokens.append(one.token)
            told.token_logprobs.append(one.logprob if one._follows else None)
            told.top_logprobs.append(_by_text(one.top_logprobs) if one._follows else None)
            if one._is_shown and one.bytes is not None:
                self._chars += len(self._decoder.decode(bytes(one.bytes)))
        return told


def _by_text(tokens: Sequence[SpelledToken]) -> dict[str, float]:
    told: dict[str, float] = {}
    for one in tokens:
        told[one.token if one.token not in told else f"token_id:{one._id}"] = one.logprob
    return told


def spell(
    tokenizer: Tokenizer | ByteTokenizer | None, logprobs: Sequence[TokenLogprob], *, is_end: bool = False
) -> SpelledChoice:
    """Return the drawn token, which is the first of `logprobs`, with the other tokens as its alternatives.

    With `is_end` the token ends the text and is no part of it.
    """
    drawn, *others = (_spelled(tokenizer, one) for one in logprobs)
    choice = SpelledChoice(top_logprobs=others, **drawn.model_dump())
    choice._is_shown = tokenizer is not None and not is_end and not tokenizer.is_special(logprobs[0].id)
    return choice


def spell_prompt(
    tokenizer: Tokenizer | ByteTokenizer | None, first: int, scores: Sequence[Sequence[TokenLogprob]]
) -> list[SpelledChoice]:
    """Return a prompt's tokens: the id `first`, which has no logprob, and one token for each of `scores`."""
    begin = spell(tokenizer, [TokenLogprob(first, 0.0)])
    begin._follows = False
    return [begin, *(spell(tokenizer, score) for score in scores)]


def _spelled(tokenizer: Tokenizer | ByteTokenizer | None, one: TokenLogprob) -> SpelledToken:
    if tokenizer is None:
        return SpelledToken(token=f"token_id:{one.id}", logprob=one.logprob, bytes=None)  # as vLLM names it
    text, written = tokenizer.decode_token(one.id), tokenizer.token_bytes(one.id)
    if UNFINISHED in text:
        text = "bytes:" + "".join(f"\\x{byte:02x}" for byte in written)  # as OpenAI names it
    spelled = SpelledToken(token=text, logprob=one.logprob, bytes=list(written))
    spelled._id = one.id
    return spelled
