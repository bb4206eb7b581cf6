"""An answer as a row of parts, each of one kind: how newer APIs tell one (OpenAI's output items, Anthropic's content blocks)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum, auto
from typing import NamedTuple

from swarmnode.gateway.generation.response_parser import ToolCall


class TokenUsage(NamedTuple):
    """`cached` is of the prompt's tokens those that were not computed again, `reasoning` of the completion's those before the
    answer."""

    prompt: int
    completion: int
    cached: int
    reasoning: int = 0


class PartKind(Enum):
    """What a part is."""

    REASONING = auto()
    TEXT = auto()
    CALL = auto()


@dataclass
class AnswerPart:
    """`text` is all of it by now; of a call its arguments, which come at once."""

    index: int
    kind: PartKind
    text: str = ""
    call: ToolCall | None = None


class PartStep(Enum):
    """What happens to a part."""

    BEGIN = auto()
    DELTA = auto()
    END = auto()


class PartEvent(NamedTuple):
    """`text` is what a delta adds."""

    step: PartStep
    part: AnswerPart
    text: str = ""


class Parts:
    """The parts by now; the last one is open while more of its kind may come."""

    def __init__(self) -> None:
        self.all: list[AnswerPart] = []
        self._open: AnswerPart | None = None

    def __repr__(self) -> str:
        return f"<Parts {[part.kind.name for part in self.all]}>"

    def push(
        self, reasoning: str, text: str, calls: tuple[ToolCall, ...], *, over: bool = False
    ) -> Iterator[PartEvent]:
        """What this adds. An answer that is `over` has a text, be it empty, or a call."""
        yield from self._add(PartKind.REASONING, reasoning)
        yield from self._add(PartKind.TEXT, text)
        for call in calls:
            yield from self._close()
            yield from self._add(PartKind.CALL, call.arguments, call)
        if over:
            if all(part.kind is PartKind.REASONING for part in self.all):
                yield from self._begin(PartKind.TEXT)
            yield from self._close()

    def _add(self, kind: PartKind, text: str, call: ToolCall | None = None) -> Iterator[PartEvent]:
        if not text:
            return
        if self._open is None or self._open.kind is not kind:
            yield from self._begin(kind, call)
        part = self.all[-1]
        part.text += text
        yield PartEvent(PartStep.DELTA, part, text)

    def _begin(self, kind: PartKind, call: ToolCall | None = None) -> Iterator[PartEvent]:
        yield from self._close()
        self._open = AnswerPart(len(self.all), kind, call=call)
        self.all.append(self._open)
        yield PartEvent(PartStep.BEGIN, self._open)

    def _close(self) -> Iterator[PartEvent]:
        if self._open is not None:
            closed, self._open = self._open, None
            yield PartEvent(PartStep.END, closed)
