"""A text as it is generated, token after token."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, AsyncIterator
from typing import NamedTuple

from swarmnode.client.tokenizer import ByteTokenizer, Detokenizer, Tokenizer
from swarmnode.codec.sampling import TokenLogprob
from swarmnode.serving.client.generation import Generation, RingStream


class GeneratedText(NamedTuple):
    """One generated token, and the text that it adds (None for a checkpoint without tokenizer). `logprobs` where wanted."""

    id: int
    text: str | None
    logprobs: tuple[TokenLogprob, ...] = ()


class TextStream:
    """The pieces of one generation as they come; `result` holds all of it in the end."""

    def __init__(
        self,
        ring: RingStream,
        tokenizer: Tokenizer | ByteTokenizer | None,
        running: dict[str, Generation],
        *,
        special_tokens: bool = False,
    ) -> None:
        """`running` has its result, by its trace, while somebody listens."""
        self._running = running
        self._ring = ring
        self._text = None if tokenizer is None else Detokenizer(tokenizer, special_tokens=special_tokens)

    def __repr__(self) -> str:
        return f"<TextStream {self._ring!r}>"

    @property
    def rest(self) -> str:
        """What no piece has told yet: the end of a text that ends in the middle of a character."""
        return "" if self._text is None else self._text.rest

    @property
    def prompt(self) -> list[int]:
        """The token ids that are continued."""
        return self._ring.prompt

    @property
    def result(self) -> Generation:
        """What has been generated so far, by which route, and how fast."""
        return self._ring.result

    async def __aiter__(self) -> AsyncGenerator[GeneratedText, None]:
        told = ""
        async with (
            _entered(self._running, self.result),
            contextlib.aclosing(aiter(self._ring)) as tokens,  # who stops listening frees the session at once
        ):
            async for token in tokens:
                if len(self.result.ids) == 1:
                    _enter(self._running, self.result)  # from now on it is known by this trace
                logprobs = self.result.logprobs[-1] if self.result.logprobs else ()
                if self._text is None:
                    yield GeneratedText(token, None, logprobs)
                    continue
                piece = self._text.push(token)
                told += piece
                self.result.text = told + self._text.rest
                yield GeneratedText(token, piece, logprobs)


@contextlib.asynccontextmanager
async def _entered(running: dict[str, Generation], result: Generation) -> AsyncIterator[None]:
    _enter(running, result)
    try:
        yield
    finally:
        _leave(running, result)


def _enter(running: dict[str, Generation], result: Generation) -> None:
    """Under its trace, which becomes an earlier text's where that one's session goes on."""
    _leave(running, result)
    running[result.trace] = result


def _leave(running: dict[str, Generation], result: Generation) -> None:
    for trace in [trace for trace, other in running.items() if other is result]:
        del running[trace]
