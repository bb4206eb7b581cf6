"""Answer to a request: all of its choices in one response, or as events while they are generated.

`ApiAnswer` decides when an answer begins, ends and fails; each API defines the format, as a `Style`.
"""

from __future__ import annotations

import contextlib
import functools
import secrets
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from fastapi import Request
from pydantic import BaseModel
from starlette.responses import Response

from swarmnode.errors import SwarmnodeError
from swarmnode.gateway.gateway import gateway_of
from swarmnode.gateway.generation.choice_stream import ChoiceStream, Piece, SpelledChoice, pieces_of
from swarmnode.gateway.generation.response_parser import Parts, TokenUsage
from swarmnode.gateway.http.api_error import ApiError, api_error
from swarmnode.gateway.http.event_stream import ClientWatch, EventStream, event

REQUEST_ID = "X-Request-Id"
UNIQUE_BYTES = 6


@dataclass
class Text:
    """Complete result of one choice. `parts` has its reasoning, texts and calls in their order."""

    index: int
    text: str = ""
    finish_reason: str | None = None
    logprobs: list[SpelledChoice] = field(default_factory=list)
    reasoning: str = ""
    ids: list[int] = field(default_factory=list)
    parts: Parts = field(default_factory=Parts)


class Style(Protocol):
    """Response format of one API (OpenAI, Anthropic, …)."""

    async def whole(self, texts: Sequence[Text]) -> BaseModel:
        """Build the complete response body.

        Args:
            texts: The results of all choices, in their order.

        Returns:
            The body, which is sent as JSON.
        """
        ...

    def events(self, piece: Piece) -> Sequence[BaseModel | bytes]:
        """Build the events of a stream that tell one piece.

        Args:
            piece: What one choice has newly generated.

        Returns:
            The events in their order, as models or already serialised; they may be none.
        """
        ...

    async def ending(self) -> Sequence[BaseModel | str]:
        """Build the events that end a stream, after the last piece of the last choice.

        Returns:
            The events in their order, as models or as the text of an event.
        """
        ...


class ApiAnswer:
    """Answer to one request, made of its `choices`. `prefix` is the beginning of its id."""

    def __init__(self, prefix: str, model: str, prompts: Sequence[list[int]], choices: Sequence[ChoiceStream]) -> None:
        self.model = model
        self.created = int(time.time())
        self.choices = choices
        self._prefix = prefix
        self._unique = secrets.token_hex(UNIQUE_BYTES)
        self._prompt_tokens = sum(map(len, prompts))

    @functools.cached_property
    def trace(self) -> str:
        """Trace of the first choice's session, which `swarmnode why trace` takes. It is fixed when it is first read."""
        return self.choices[0].trace

    @property
    def stem(self) -> str:
        """Ending of the ids of the answer and of its parts: random digits and the trace. Answers of one conversation may share
        their trace, because they continue one session."""
        return f"{self._unique}-{self.trace}"

    @property
    def id(self) -> str:
        """Id of the answer: the API's prefix and the stem."""
        return f"{self._prefix}{self.stem}"

    def usage(self) -> TokenUsage:
        """Return the token counts up to now. A prompt that several choices continue counts once."""
        cached = sum(choice.cached_tokens for choice in self.choices)
        return TokenUsage(
            prompt=self._prompt_tokens,
            completion=sum(choice.tokens for choice in self.choices),
            cached=min(cached, self._prompt_tokens),
            reasoning=sum(choice.reasoning_tokens for choice in self.choices),
        )

    async def respond(self, request: Request, style: Style, *, stream: bool) -> Response:
        """Generate the choices and return the response: the complete body, or with `stream` a stream that has its first event.
        Raises ClientGone, and any error that occurs before the response has begun."""
        if stream:
            timeout_s = gateway_of(request).config.write_timeout_s
            events = await EventStream.begin(request, self._events(style), write_timeout_s=timeout_s)
            events.headers[REQUEST_ID] = self.trace
            return events
        with ClientWatch(request.receive) as client:
            texts = await client.run(self._texts())
        whole = await style.whole(texts)
        return Response(whole.model_dump_json(), media_type="application/json", headers={REQUEST_ID: self.trace})

    async def _texts(self) -> list[Text]:
        texts = [Text(choice.index) for choice in self.choices]
        async with contextlib.aclosing(pieces_of(self.choices)) as pieces:
            async for piece in pieces:
                text = texts[piece.choice.index]
                text.text += piece.text
                text.reasoning += piece.reasoning
                text.logprobs += piece.logprobs
                text.ids += piece.ids
                text.finish_reason = piece.finish_reason
                over = piece.finish_reason is not None
                for _ in text.parts.push(piece.reasoning, piece.text, piece.call, over=over):
                    pass
        return texts

    async def _events(self, style: Style) -> AsyncGenerator[bytes, None]:
        begun, running = False, len(self.choices)
        try:
            async with contextlib.aclosing(pieces_of(self.choices)) as pieces:
                async for piece in pieces:
                    running -= piece.finish_reason is not None
                    told: list[BaseModel | bytes | str] = list(style.events(piece))
                    if not running:
                        told += await style.ending()  # sent together with the last piece
                    yield b"".join(map(event, told))
                    begun = True
        except (SwarmnodeError, ApiError) as error:
            if not begun:
                raise  # the response has not begun, so a status can report it
            failure = error if isinstance(error, ApiError) else api_error(error)
            yield event(failure.json(), name="error")
