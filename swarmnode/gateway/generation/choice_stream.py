"""Stream of one choice: one of the texts that a request asks for, while it is generated.

Logarithms of tokens' probabilities in the format of OpenAI's API, which has the tokens' texts.
"""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import secrets
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from typing import NamedTuple

from pydantic import BaseModel, PrivateAttr

from swarmnode.client.text_stream import GeneratedText, StopStrings, TextStream
from swarmnode.client.tokenizer import UNFINISHED, ByteTokenizer, Tokenizer
from swarmnode.codec.sampling import TokenLogprob
from swarmnode.gateway.access.keys import ApiKey, FairQueue
from swarmnode.gateway.generation.response_parser import CallPart, Parsed, ResponseParser
from swarmnode.net.tasks import Tasks
from swarmnode.serving.client.generation import Generation


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

    def tell(self, choices: Sequence[SpelledChoice], text_length: int) -> TextLogprobs | None:
        """Return the logprobs of the tokens in `choices`; None if there are none. No offset exceeds `text_length`, where a stop
        string may have cut the text."""
        if not choices:
            return None
        logprobs = TextLogprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])
        for one in choices:
            logprobs.text_offset.append(min(self._chars, text_length))
            logprobs.tokens.append(one.token)
            logprobs.token_logprobs.append(one.logprob if one._follows else None)
            likely: dict[str, float] = {}
            for each in one.top_logprobs:
                likely[each.token if each.token not in likely else f"token_id:{each._id}"] = each.logprob
            logprobs.top_logprobs.append(likely if one._follows else None)
            if one._is_shown and one.bytes is not None:
                self._chars += len(self._decoder.decode(bytes(one.bytes)))
        return logprobs


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


def _spelled(tokenizer: Tokenizer | ByteTokenizer | None, token: TokenLogprob) -> SpelledToken:
    if tokenizer is None:
        return SpelledToken(token=f"token_id:{token.id}", logprob=token.logprob, bytes=None)  # as vLLM names it
    text, written = tokenizer.decode_token(token.id), tokenizer.token_bytes(token.id)
    if UNFINISHED in text:
        text = "bytes:" + "".join(f"\\x{byte:02x}" for byte in written)  # as OpenAI names it
    spelled = SpelledToken(token=text, logprob=token.logprob, bytes=list(written))
    spelled._id = token.id
    return spelled


LENGTH, STOP, TOOL_CALLS = "length", "stop", "tool_calls"
AHEAD = 64  # pieces of all choices of a request that wait for a slow client


class Piece(NamedTuple):
    """New part of a choice: text that is final by now, reasoning, or a part of a tool call; in the last piece also the reason why
    the choice ended. `logprobs` and `ids` are those of the tokens whose text has been sent by now and that no earlier piece had."""

    choice: ChoiceStream
    text: str
    finish_reason: str | None = None
    call: CallPart | None = None
    logprobs: tuple[SpelledChoice, ...] = ()
    reasoning: str = ""
    ids: tuple[int, ...] = ()

    @property
    def is_text(self) -> bool:
        """Whether the piece has text and nothing else except token ids."""
        return bool(self.text) and not (self.finish_reason or self.logprobs or self.reasoning or self.call)


class NoTokens:
    """Stream without tokens, for a prompt that is only echoed."""

    rest = ""

    def __init__(self) -> None:
        self.result = Generation(trace=secrets.token_hex(16))

    async def __aiter__(self) -> AsyncGenerator[GeneratedText, None]:
        """End at once."""
        return
        yield


class ChoiceStream:
    """Stream of the pieces of one choice, read by iterating over it. If the reader stops, the session ends at every hop."""

    def __init__(
        self,
        index: int,
        stream: TextStream | NoTokens,
        *,
        stop_ids: Sequence[int],
        stops: Sequence[str],
        parser: ResponseParser | None,
        queue: FairQueue,
        key: ApiKey,
        tokenizer: Tokenizer | ByteTokenizer | None,
    ) -> None:
        """Without `parser` the pieces have the text as the model writes it. Without `tokenizer` they have token ids and no text."""
        self.index = index
        self._stream = stream
        self._stop_ids = frozenset(stop_ids)
        self._stops = StopStrings(stops)
        self._parser = parser
        self._queue = queue
        self._key = key
        self._tokenizer = tokenizer
        self._logprobs: deque[tuple[int, SpelledChoice]] = deque()  # not yet in a piece, with where their text begins
        self._written = self._final = 0  # characters that the model wrote, and those of them before any stop string
        self._called = self._cut = False  # whether the answer has a call, and whether its last one is cut
        self._ids: list[int] = []  # not yet in a piece
        self.reasoning_tokens = 0

    @property
    def tokens(self) -> int:
        """Number of tokens generated up to now, including the one that ended the text."""
        return len(self._stream.result.ids)

    @property
    def cached_tokens(self) -> int:
        """Number of the prompt's tokens that came from a cache."""
        return self._stream.result.cached_tokens

    @property
    def trace(self) -> str:
        """Trace of the session, which `swarmnode why trace` takes."""
        return self._stream.result.trace

    @property
    def stop_string(self) -> str | None:
        """Stop string that ended the text; None if none has."""
        return self._stops.matched

    async def __aiter__(self) -> AsyncGenerator[Piece, None]:
        async with self._queue.place(self._key), contextlib.aclosing(aiter(self._stream)) as tokens:
            begun = ended = False
            async for token in tokens:
                ended = token.id in self._stop_ids
                if not ended:
                    self._ids.append(token.id)
                # a completion tells of its end, as vLLM's does
                if token.logprobs and (not ended or self._parser is None):
                    self._logprobs.append((self._written, spell(self._tokenizer, token.logprobs, is_end=ended)))
                text = self._until_stop("" if ended else token.text or "")
                if self.stop_string is not None:
                    break
                pieces = [self._piece(parsed) for parsed in self._parse(text)]
                if not pieces and (self._tokenizer is None or (self._parser is not None and not begun)) and not ended:
                    pieces = [self._piece(Parsed())]  # also at the beginning of text that the parser holds back
                for piece in pieces:
                    begun = True
                    yield piece
        if self.stop_string is None:
            text = self._until_stop("" if ended else self._stream.rest) + self._stops.flush()
        if self.stop_string is None:  # a stop string ends the text, so the tokens behind it have no logprobs
            self._final = self._written + 1
        whole = ended or self._stream.result.whole or self.stop_string is not None
        # The pieces at the end of the choice, the last of them with the reason
        parts = [*self._parse(text)]
        if self._parser is not None:
            parts += self._parser.finish(cut=not whole or self.stop_string is not None)
        *before, last = [part for part in parts if any(part)] or [Parsed()]
        for parsed in before:
            yield self._piece(parsed)
        piece, reason = self._piece(last), STOP if whole else LENGTH
        yield piece._replace(finish_reason=TOOL_CALLS if self._called and not self._cut else reason)

    def _until_stop(self, text: str) -> str:
        """Add text of the model and return the part that certainly precedes any stop string."""
        self._written += len(text)
        certain = self._stops.push(text)
        self._final += len(certain)
        return certain

    def _parse(self, text: str) -> Sequence[Parsed]:
        if self._parser is None:
            return [Parsed(text)] if text else []
        self.reasoning_tokens += self._parser.reasoning
        return [part for part in self._parser.push(text) if any(part)]

    def _piece(self, parsed: Parsed) -> Piece:
        """Build a piece of `parsed`, with the logprobs and ids that no earlier piece had."""
        if parsed.call is not None:
            self._called, self._cut = True, parsed.call.cut
        logprobs = []
        while self._logprobs and (self._logprobs[0][0] < self._final or self._tokenizer is None):
            logprobs.append(self._logprobs.popleft()[1])
        ids, self._ids = tuple(self._ids), []
        return Piece(self, parsed.text, None, parsed.call, tuple(logprobs), parsed.reasoning, ids)


async def pieces_of(choices: Sequence[ChoiceStream]) -> AsyncGenerator[Piece, None]:
    """Yield the pieces of all choices in the order of their arrival. If one choice fails, raise its error and end the others."""
    if len(choices) == 1:
        async with contextlib.aclosing(aiter(choices[0])) as pieces:
            async for piece in pieces:
                yield piece
        return
    coming: asyncio.Queue[Piece | BaseException] = asyncio.Queue(AHEAD)
    tasks = Tasks("choices of a request", on_crash=None)

    async def listen(choice: ChoiceStream) -> None:
        try:
            async with contextlib.aclosing(aiter(choice)) as pieces:
                async for piece in pieces:
                    await coming.put(piece)
        except Exception as error:  # the reader gets every error
            await coming.put(error)

    try:
        for choice in choices:
            tasks.spawn(listen(choice), f"choice {choice.index}", awaited=True)
        running = len(choices)
        while running:
            came = await coming.get()
            if isinstance(came, BaseException):
                raise came
            running -= came.finish_reason is not None
            yield came
    finally:
        await tasks.close()
