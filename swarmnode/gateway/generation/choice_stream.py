"""A choice: one of the texts that a request asks for, as it is generated."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Collection, Sequence
from typing import NamedTuple

from swarmnode.gateway.access.fair_queue import FairQueue
from swarmnode.gateway.access.keys import ApiKey
from swarmnode.gateway.generation.logprobs import SpelledChoice, spell
from swarmnode.gateway.generation.stop_strings import StopStrings
from swarmnode.gateway.generation.tool_calls import ToolCall, ToolCallParser
from swarmnode.net.tasks import Tasks
from swarmnode.text_stream import TextStream
from swarmnode.tokenizer import ByteTokenizer, Tokenizer

LENGTH, STOP, TOOL_CALLS = "length", "stop", "tool_calls"
AHEAD = 64  # pieces that wait for a slow reader, of all choices of a request


class Piece(NamedTuple):
    """What came: the text that is certain by now, and with the last piece why nothing follows."""

    choice: ChoiceStream
    text: str
    finish_reason: str | None = None
    calls: tuple[ToolCall, ...] = ()
    logprobs: tuple[SpelledChoice, ...] = ()


class ChoiceStream:
    """Iterate over its pieces. Who stops listening ends the session at every hop."""

    def __init__(
        self,
        index: int,
        stream: TextStream,
        *,
        stop_ids: Sequence[int],
        stops: Sequence[str],
        tools: Collection[str],
        queue: FairQueue,
        key: ApiKey,
        tokenizer: Tokenizer | ByteTokenizer,
    ) -> None:
        """`tools` are the names of those that the model may call."""
        self.index = index
        self._stream = stream
        self._stop_ids = frozenset(stop_ids)
        self._stops = StopStrings(stops)
        self._tools = ToolCallParser(tools) if tools else None
        self._queue = queue
        self._key = key
        self._tokenizer = tokenizer
        self._logprobs: list[SpelledChoice] = []  # that no piece has told yet

    def __repr__(self) -> str:
        return f"<ChoiceStream {self.index} of {self._stream!r}>"

    @property
    def tokens(self) -> int:
        """Tokens generated so far; the one that ended the text is one of them."""
        return len(self._stream.result.ids)

    @property
    def cached_tokens(self) -> int:
        """Of the prompt's tokens, those that were not computed again."""
        return self._stream.result.cached_tokens

    @property
    def trace(self) -> str:
        """What `swarmnode trace` takes."""
        return self._stream.result.trace

    @property
    def stop_string(self) -> str | None:
        """The one that ended the text."""
        return self._stops.found

    async def __aiter__(self) -> AsyncGenerator[Piece, None]:
        async with self._queue.place(self._key), contextlib.aclosing(aiter(self._stream)) as tokens:
            ended = False
            async for token in tokens:
                ended = token.id in self._stop_ids
                if token.logprobs and not ended:
                    self._logprobs.append(spell(self._tokenizer, token.logprobs))
                text = self._stops.push("" if ended else token.text or "")
                if self.stop_string is not None:
                    yield self._last(text, STOP)
                    return
                if self._tools is not None:
                    text = self._tools.push(text)
                if text:
                    yield Piece(self, text, logprobs=self._untold())
        rest = self._stops.push("" if ended else self._stream.rest) + self._stops.flush()
        ended = ended or self._stream.result.whole or self.stop_string is not None
        yield self._last(rest, STOP if ended else LENGTH)

    def _last(self, text: str, finish_reason: str) -> Piece:
        if self._tools is None:
            return Piece(self, text, finish_reason, logprobs=self._untold())
        told = self._tools.push(text)
        held, calls = self._tools.finish()
        return Piece(self, told + held, TOOL_CALLS if calls else finish_reason, calls, self._untold())

    def _untold(self) -> tuple[SpelledChoice, ...]:
        untold, self._logprobs = tuple(self._logprobs), []
        return untold


async def pieces_of(choices: Sequence[ChoiceStream]) -> AsyncGenerator[Piece, None]:
    """The pieces of all of them, as they come. Raises what ended any of them, and ends the others."""
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
        except Exception as error:  # whatever it is, it is for who listens
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
