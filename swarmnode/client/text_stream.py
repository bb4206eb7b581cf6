"""Stream of a text while it is generated, token after token."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import NamedTuple

from swarmnode.client.tokenizer import ByteTokenizer, Detokenizer, Tokenizer
from swarmnode.codec.sampling import TokenLogprob
from swarmnode.serving.client.generation import Generation, RingStream


class GeneratedText(NamedTuple):
    """Generated token, and the text that it adds (None for a checkpoint without tokenizer). `logprobs` if requested."""

    id: int
    text: str | None
    logprobs: tuple[TokenLogprob, ...] = ()


class StopStrings:
    """Filter of a growing text that ends at the first of several stop strings.

    An end of the text that may be the beginning of a stop string is held back.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._held = ""
        self.matched: str | None = None  # the stop string that ended the text
        self.rest = ""  # the text after it in the same piece

    def push(self, text: str) -> str:
        """Return the text that certainly precedes any stop string, after `text` was added; empty once one was found."""
        if self.matched is not None:
            return ""
        held = self._held + text
        ends = [(begin + len(stop), begin) for stop in self._stops if (begin := held.find(stop)) >= 0]
        if ends:  # the one that is complete first, so that the length of a piece does not matter
            end, begin = min(ends)
            self.matched, self.rest, self._held = held[begin:end], held[end:], ""
            return held[:begin]
        kept = max((_overlap(held, stop) for stop in self._stops), default=0)
        self._held = held[len(held) - kept :]
        return held[: len(held) - kept]

    @property
    def held(self) -> str:
        """Generated text that may be the beginning of a stop string, and is held back until that is clear."""
        return self._held

    def flush(self) -> str:
        """Return the text held back, at the end of the stream."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of `text` that is a beginning of `stop`."""
    longest = min(len(text), len(stop) - 1)
    return next((length for length in range(longest, 0, -1) if stop.startswith(text[-length:])), 0)


class TextStream:
    """Pieces of one generation, in order: `async for piece in stream`. `result` holds all of it in the end."""

    def __init__(
        self,
        ring: RingStream,
        tokenizer: Tokenizer | ByteTokenizer | None,
        running: dict[str, Generation],
        *,
        special_tokens: bool = False,
        stops: Sequence[str] = (),
    ) -> None:
        """`running` has the result, by its trace, while the stream is read. The text ends before the first of `stops`."""
        self._running = running
        self._ring = ring
        self._text = None if tokenizer is None else Detokenizer(tokenizer, special_tokens=special_tokens)
        self._stops = StopStrings(stops)

    def __repr__(self) -> str:
        return f"<TextStream {self._ring!r}>"

    @property
    def rest(self) -> str:
        """The text that is in no piece yet: a possible stop string, or a part of a character."""
        if self._text is None or self._stops.matched is not None:
            return ""
        return self._stops.held + self._text.rest

    @property
    def prompt(self) -> list[int]:
        """Token ids of the prompt."""
        return self._ring.prompt

    @property
    def result(self) -> Generation:
        """The text up to now, its route and its speed."""
        return self._ring.result

    async def __aiter__(self) -> AsyncGenerator[GeneratedText, None]:
        emitted = ""
        async with (
            _entered(self._running, self.result),
            contextlib.aclosing(aiter(self._ring)) as tokens,  # a reader that stops frees the session at once
        ):
            async for token in tokens:
                if len(self.result.ids) == 1:
                    _enter(self._running, self.result)  # the trace is final from now on
                logprobs = self.result.logprobs[-1] if self.result.logprobs else ()
                if self._text is None:
                    yield GeneratedText(token, None, logprobs)
                    continue
                piece = self._stops.push(self._text.push(token))
                emitted += piece
                self.result.text = emitted + self.rest
                self.result.whole = self._stops.matched is not None
                yield GeneratedText(token, piece, logprobs)
                if self._stops.matched is not None:
                    return


@contextlib.asynccontextmanager
async def _entered(running: dict[str, Generation], result: Generation) -> AsyncIterator[None]:
    _enter(running, result)
    try:
        yield
    finally:
        _leave(running, result)


def _enter(running: dict[str, Generation], result: Generation) -> None:
    """Enter the result under its trace. The trace changes to an earlier text's if that text's session is continued."""
    _leave(running, result)
    running[result.trace] = result


def _leave(running: dict[str, Generation], result: Generation) -> None:
    for trace in [trace for trace, other in running.items() if other is result]:
        del running[trace]
