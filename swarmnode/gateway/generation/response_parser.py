"""What a model says in a chat, parted into reasoning, text and calls of tools as it comes."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from swarmnode.gateway.generation.reasoning import ReasoningParser
from swarmnode.gateway.generation.tool_calls import ToolCall, ToolCallParser
from swarmnode.gateway.generation.tool_use import ToolUse


class Parsed(NamedTuple):
    """What is certain by now. Calls come with the end alone: before it they may turn out to be text."""

    text: str = ""
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()


class ResponseParser(Protocol):
    """Of one answer."""

    @property
    def reasoning(self) -> bool:
        """Whether the model is not yet answering."""
        ...

    def push(self, text: str) -> Parsed:
        """The next piece of what it says."""
        ...

    def finish(self) -> Parsed:
        """What was held back, now that nothing follows."""
        ...


class CommonParser:
    """For models whose tokenizer does not tell how they write: the formats that most of them share."""

    def __init__(self, tools: ToolUse, reasoning: ReasoningParser | None = None) -> None:
        """Without `reasoning` all of it is the answer."""
        self._reasoning = reasoning
        self._calls = ToolCallParser(tools.names) if tools.offered else None
        self._most = None if tools.parallel else 1

    def __repr__(self) -> str:
        return f"<CommonParser {self._reasoning!r}, {self._calls!r}>"

    @property
    def reasoning(self) -> bool:
        """Whether the model is not yet answering."""
        return self._reasoning is not None and self._reasoning.inside

    def push(self, text: str) -> Parsed:
        """The next piece of what it says."""
        reasoning = ""
        if self._reasoning is not None:
            reasoning, text = self._reasoning.push(text)
        return Parsed(text if self._calls is None else self._calls.push(text), reasoning)

    def finish(self) -> Parsed:
        """What was held back, now that nothing follows."""
        reasoning, text = ("", "") if self._reasoning is None else self._reasoning.finish()
        if self._calls is None:
            return Parsed(text, reasoning)
        told = self._calls.push(text)
        held, calls = self._calls.finish()
        return Parsed(told + held, reasoning, calls[: self._most])
