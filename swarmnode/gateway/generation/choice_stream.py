"""Stream of one choice: one of the texts that a request asks for, while it is generated."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncGenerator, Sequence
from typing import NamedTuple

from swarmnode.client.text_stream import GeneratedText, StopStrings, TextStream
from swarmnode.client.tokenizer import ByteTokenizer, Tokenizer
from swarmnode.gateway.access.fair_queue import FairQueue
from swarmnode.gateway.access.keys import ApiKey
from swarmnode.gateway.generation.logprobs import SpelledChoice, spell
from swarmnode.gateway.generation.response_parser import Parsed, ResponseParser, ToolCall
from swarmnode.net.tasks import Tasks
from swarmnode.serving.client.generation import Generation

LENGTH, STOP, TOOL_CALLS = "length", "stop", "tool_calls"
AHEAD = 64  # pieces of all choices of a request that wait for a slow client


class Piece(NamedTuple):
    """New part of a choice: the text that is final by now; in the last piece also the reason why the choice ended, and its tool
    calls."""

    choice: ChoiceStream
    text: str
    finish_reason: str | None = None
    calls: tuple[ToolCall, ...] = ()
    logprobs: tuple[SpelledChoice, ...] = ()
    reasoning: str = ""
    ids: tuple[int, ...] = ()

    @property
    def is_text(self) -> bool:
        """Whether the piece has text and nothing else except token ids."""
        return bool(self.text) and not (self.finish_reason or self.logprobs or self.reasoning)


class NoTokens:
    """Stream without tokens, for a prompt that is only echoed."""

    rest = ""

    def __init__(self) -> None:
        self.result = Generation(trace=secrets.token_hex(16))

    def __repr__(self) -> str:
        return "<NoTokens>"

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
        self._logprobs: list[SpelledChoice] = []  # not yet in a piece
        self._ids: list[int] = []  # not yet in a piece
        self.reasoning_tokens = 0

    def __repr__(self) -> str:
        return f"<ChoiceStream {self.index} of {self._stream!r}>"

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
        """Trace of the session, which `swarmnode trace` takes."""
        return self._stream.result.trace

    @property
    def stop_string(self) -> str | None:
        """Stop string that ended the text; None if none has."""
        return self._stops.found

    async def __aiter__(self) -> AsyncGenerator[Piece, None]:
        async with self._queue.place(self._key), contextlib.aclosing(aiter(self._stream)) as tokens:
            ended = False
            async for token in tokens:
                ended = token.id in self._stop_ids
                if not ended:
                    self._ids.append(token.id)
                if token.logprobs and (
                    not ended or self._parser is None
                ):  # a completion tells of its end, as vLLM's does
                    self._logprobs.append(spell(self._tokenizer, token.logprobs, is_end=ended))
                text = self._stops.push("" if ended else token.text or "")
                if self.stop_string is not None:
                    yield self._last(text, STOP)
                    return
                parsed = self._parse(text)
                if parsed.text or parsed.reasoning or (self._tokenizer is None and not ended):
                    yield self._piece(parsed)
        rest = self._stops.push("" if ended else self._stream.rest) + self._stops.flush()
        ended = ended or self._stream.result.whole or self.stop_string is not None
        yield self._last(rest, STOP if ended else LENGTH)

    def _last(self, text: str, finish_reason: str) -> Piece:
        parsed = self._parse(text)
        if self._parser is not None:
            held = self._parser.finish()
            parsed = Parsed(parsed.text + held.text, parsed.reasoning + held.reasoning, held.calls)
        return self._piece(parsed, TOOL_CALLS if parsed.calls else finish_reason)

    def _parse(self, text: str) -> Parsed:
        if self._parser is None:
            return Parsed(text)
        self.reasoning_tokens += self._parser.reasoning
        return self._parser.push(text)

    def _piece(self, parsed: Parsed, finish_reason: str | None = None) -> Piece:
        """Build a piece of `parsed`, with the logprobs and ids that no earlier piece had."""
        logprobs, ids = tuple(self._logprobs), tuple(self._ids)
        self._logprobs, self._ids = [], []
        return Piece(self, parsed.text, finish_reason, parsed.calls, logprobs, parsed.reasoning, ids)


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
