"""Answer as a sequence of parts of different kinds, as newer APIs have it (OpenAI's output items, Anthropic's content blocks)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum, auto
from typing import NamedTuple

from swarmnode.gateway.generation.response_parser import CallPart


class TokenUsage(NamedTuple):
    """Token counts of an answer. `cached` is the number of prompt tokens that came from a cache, `reasoning` the number of
    completion tokens before the answer."""

    prompt: int
    completion: int
    cached: int
    reasoning: int = 0


class PartKind(Enum):
    """Kind of a part."""

    REASONING = auto()
    TEXT = auto()
    CALL = auto()


@dataclass
class AnswerPart:
    """Part of an answer. `text` is its text up to now; for a call, its arguments. `call` is the first part of a call."""

    index: int
    kind: PartKind
    text: str = ""
    call: CallPart | None = None


class PartStep(Enum):
    """Kind of an event of a part."""

    BEGIN = auto()
    DELTA = auto()
    END = auto()


class PartEvent(NamedTuple):
    """Event of a part; `text` is the addition of a delta, else empty."""

    step: PartStep
    part: AnswerPart
    text: str = ""


class Parts:
    """Parts of one answer up to now. The last one is open if more of its kind may follow."""

    def __init__(self) -> None:
        self.all: list[AnswerPart] = []
        self._open: AnswerPart | None = None

    def push(self, reasoning: str, text: str, call: CallPart | None, *, over: bool = False) -> Iterator[PartEvent]:
        """Add new reasoning, text or a part of a call, and yield the events. If `over` is true, close the last part; an answer
        without text and calls gets an empty text."""
        yield from self._add(PartKind.REASONING, reasoning)
        yield from self._add(PartKind.TEXT, text)
        if call is not None:
            if self._open is None or self._open.call is None or self._open.call.number != call.number:
                yield from self._begin(PartKind.CALL, call)
            yield from self._add(PartKind.CALL, call.arguments)
        if over:
            if all(part.kind is PartKind.REASONING for part in self.all):
                yield from self._begin(PartKind.TEXT)
            yield from self._close()

    def _add(self, kind: PartKind, text: str) -> Iterator[PartEvent]:
        if not text:
            return
        if self._open is None or self._open.kind is not kind:
            yield from self._begin(kind)
        part = self.all[-1]
        part.text += text
        yield PartEvent(PartStep.DELTA, part, text)

    def _begin(self, kind: PartKind, call: CallPart | None = None) -> Iterator[PartEvent]:
        yield from self._close()
        self._open = AnswerPart(len(self.all), kind, call=call)
        self.all.append(self._open)
        yield PartEvent(PartStep.BEGIN, self._open)

    def _close(self) -> Iterator[PartEvent]:
        if self._open is not None:
            closed, self._open = self._open, None
            yield PartEvent(PartStep.END, closed)
