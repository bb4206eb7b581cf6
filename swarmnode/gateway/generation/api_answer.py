"""An answer to a request: all of its choices at once, or as events while they are generated.

When it begins, ends and fails is here; what it looks like is each API's own business, its `Style`.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from fastapi import Request
from pydantic import BaseModel
from starlette.responses import Response

from swarmnode.errors import SwarmnodeError
from swarmnode.gateway.gateway import gateway_of
from swarmnode.gateway.generation.choice_stream import ChoiceStream, Piece, pieces_of
from swarmnode.gateway.generation.logprobs import SpelledChoice
from swarmnode.gateway.generation.parts import TokenUsage
from swarmnode.gateway.generation.response_parser import ToolCall
from swarmnode.gateway.http.api_error import ApiError, api_error
from swarmnode.gateway.http.client_watch import ClientWatch
from swarmnode.gateway.http.event_stream import EventStream, event

REQUEST_ID = "X-Request-Id"


@dataclass
class Text:
    """All that one choice said."""

    index: int
    text: str = ""
    finish_reason: str | None = None
    calls: tuple[ToolCall, ...] = ()
    logprobs: list[SpelledChoice] = field(default_factory=list)
    reasoning: str = ""
    ids: list[int] = field(default_factory=list)


class Style(Protocol):
    """How an API tells an answer."""

    def whole(self, texts: Sequence[Text]) -> BaseModel:
        """All of it."""
        ...

    def events(self, piece: Piece) -> Sequence[BaseModel | bytes]:
        """What a piece adds to a stream, written or not."""
        ...

    def ending(self) -> Sequence[BaseModel | str]:
        """What follows the last piece."""
        ...


class ApiAnswer:
    """The choices of a request. `prefix` is what its API begins ids with."""

    def __init__(self, prefix: str, model: str, prompts: Sequence[list[int]], choices: Sequence[ChoiceStream]) -> None:
        self.model = model
        self.created = int(time.time())
        self.choices = choices
        self._prefix = prefix
        self._prompt_tokens = sum(map(len, prompts))

    def __repr__(self) -> str:
        return f"<ApiAnswer {self._prefix} of {self.model}: {list(self.choices)}>"

    @functools.cached_property
    def trace(self) -> str:
        """What `swarmnode trace` takes: of the first choice, as it is when something has come."""
        return self.choices[0].trace

    @property
    def id(self) -> str:
        """The trace, behind the API's prefix."""
        return f"{self._prefix}{self.trace}"

    def usage(self) -> TokenUsage:
        """So far. A prompt that several choices continue counts once."""
        cached = sum(choice.cached_tokens for choice in self.choices)
        return TokenUsage(
            prompt=self._prompt_tokens,
            completion=sum(choice.tokens for choice in self.choices),
            cached=min(cached, self._prompt_tokens),
            reasoning=sum(choice.reasoning_tokens for choice in self.choices),
        )

    async def respond(self, request: Request, style: Style, *, stream: bool) -> Response:
        """Tell it. Raises ClientGone, and what it fails with before anything was told."""
        if stream:
            timeout_s = gateway_of(request).config.write_timeout_s
            events = await EventStream.begin(request, self._events(style), write_timeout_s=timeout_s)
            events.headers[REQUEST_ID] = self.trace
            return events
        with ClientWatch(request.receive) as client:
            texts = await client.run(self._texts())
        whole = style.whole(texts).model_dump_json()
        return Response(whole, media_type="application/json", headers={REQUEST_ID: self.trace})

    async def _texts(self) -> list[Text]:
        texts = [Text(choice.index) for choice in self.choices]
        async with contextlib.aclosing(pieces_of(self.choices)) as pieces:
            async for piece in pieces:
                text = texts[piece.choice.index]
                text.text += piece.text
                text.reasoning += piece.reasoning
                text.logprobs += piece.logprobs
                text.ids += piece.ids
                text.finish_reason, text.calls = piece.finish_reason, piece.calls
        return texts

    async def _events(self, style: Style) -> AsyncGenerator[bytes, None]:
        begun, running = False, len(self.choices)
        try:
            async with contextlib.aclosing(pieces_of(self.choices)) as pieces:
                async for piece in pieces:
                    running -= piece.finish_reason is not None
                    told: list[BaseModel | bytes | str] = list(style.events(piece))
                    if not running:
                        told += style.ending()  # goes out with the last piece
                    yield b"".join(map(event, told))
                    begun = True
        except (SwarmnodeError, ApiError) as error:
            if not begun:
                raise  # a status tells it
            failure = error if isinstance(error, ApiError) else api_error(error)
            yield event(failure.json(), name="error")
