"""Parsers that split what a model writes in a chat into reasoning, text and tool calls while it arrives."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple, Protocol

from swarmnode.client.text_stream import StopStrings
from swarmnode.data.conversation import CALL_BEGIN, CALL_END
from swarmnode.gateway.generation.tool_use import ToolUse

TEXT = "content"
REASONING = frozenset({"thinking", "reasoning", "reasoning_content"})
CALLS = "tool_calls"
THOUGHTS_BEGIN, THOUGHTS_END = "<think>", "</think>"


class ToolCall(NamedTuple):
    """Call of a tool; `arguments` is JSON text."""

    name: str
    arguments: str


class ToolCallParser:
    """Parser that passes a text through, except what may be calls of the tools in `names`."""

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._before = StopStrings([CALL_BEGIN])
        self._is_object: bool | None = None  # None before the first character
        self._held = ""

    def __repr__(self) -> str:
        return f"<ToolCallParser for {', '.join(self._names)}, {len(self._held)} characters held back>"

    def push(self, text: str) -> str:
        """Add `text` and return the part that certainly belongs to no call."""
        if self._is_object is None and text.strip():
            self._is_object = text.lstrip().startswith("{")
        if self._is_object or self._before.found is not None:
            self._held += text
            return ""
        told = self._before.push(text)
        if self._before.found is not None:
            self._held = CALL_BEGIN + self._before.rest
        return told

    def finish(self) -> tuple[str, tuple[ToolCall, ...]]:
        """Return the text that was held back: as calls if all of it is calls, else as text."""
        held = self._before.flush() + self._held
        bodies = [held] if self._is_object else [part.split(CALL_END)[0] for part in held.split(CALL_BEGIN)[1:]]
        calls = [self._call(body) for body in bodies]
        whole = tuple(call for call in calls if call is not None)
        return ("", whole) if whole and len(whole) == len(calls) else (held, ())

    def _call(self, body: str) -> ToolCall | None:
        try:
            said = json.loads(body)
        except (ValueError, RecursionError):
            return None
        if not isinstance(said, dict) or said.get("name") not in self._names:
            return None
        return ToolCall(said["name"], json.dumps(said.get("arguments", said.get("parameters", {}))))


class ReasoningParser:
    """Parser that splits a text into reasoning and answer while it arrives. `begun` means that the prompt has already opened the
    reasoning."""

    def __init__(self, *, begun: bool) -> None:
        self._inside = begun
        self._end = StopStrings([THOUGHTS_END])
        self._start = ""  # text that may still become THOUGHTS_BEGIN
        self._undecided = not begun
        self._told = False  # whether the present part has text, so that line breaks are no longer stripped

    def __repr__(self) -> str:
        return f"<ReasoningParser {'inside' if self._inside else 'outside'}>"

    @property
    def inside(self) -> bool:
        """Whether the next text is reasoning."""
        return self._inside

    def push(self, text: str) -> tuple[str, str]:
        """Add `text`; return the parts that are certainly reasoning and certainly answer."""
        if self._undecided:
            self._start += text
            seen = self._start.lstrip()
            if len(seen) < len(THOUGHTS_BEGIN) and THOUGHTS_BEGIN.startswith(seen):
                return "", ""
            self._undecided, self._inside = False, seen.startswith(THOUGHTS_BEGIN)
            text = seen[len(THOUGHTS_BEGIN) :] if self._inside else self._start
        if not self._inside:
            return "", self._led(text) if self._end.found else text
        reasoning = self._led(self._end.push(text))
        if self._end.found is None:
            return reasoning, ""
        self._inside = self._told = False
        return reasoning, self._led(self._end.rest)

    def finish(self) -> tuple[str, str]:
        """Return the text that was held back, as reasoning and answer."""
        if self._undecided:
            return "", self._start
        return self._end.flush(), ""

    def _led(self, text: str) -> str:
        """Strip the line breaks that templates put around both parts."""
        text = text if self._told else text.lstrip("\n")
        self._told = self._told or bool(text)
        return text


class Parsed(NamedTuple):
    """Parsed part of an answer. Only the last one has calls, because before the end a call may turn out to be text."""

    text: str = ""
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()


class ResponseParser(Protocol):
    """Parser of one answer."""

    @property
    def reasoning(self) -> bool:
        """Whether the model is still reasoning."""
        ...

    def push(self, text: str) -> Parsed:
        """Add the next piece of the model's text and return the part that is certain by now."""
        ...

    def finish(self) -> Parsed:
        """End the answer and return the parts that were held back, with the calls."""
        ...


class CommonParser:
    """Parser for models whose tokenizer does not define the format of answers: it reads the formats that most models share."""

    def __init__(self, tools: ToolUse, reasoning: ReasoningParser | None = None) -> None:
        """Without `reasoning` the whole text is the answer."""
        self._reasoning = reasoning
        self._calls = ToolCallParser(tools.names) if tools.offered else None
        self._most = None if tools.parallel else 1

    def __repr__(self) -> str:
        return f"<CommonParser {self._reasoning!r}, {self._calls!r}>"

    @property
    def reasoning(self) -> bool:
        """Whether the model is still reasoning."""
        return self._reasoning is not None and self._reasoning.inside

    def push(self, text: str) -> Parsed:
        """Add the next piece of the model's text and return the part that is certain by now."""
        reasoning = ""
        if self._reasoning is not None:
            reasoning, text = self._reasoning.push(text)
        return Parsed(text if self._calls is None else self._calls.push(text), reasoning)

    def finish(self) -> Parsed:
        """End the answer and return the parts that were held back, with the calls."""
        reasoning, text = ("", "") if self._reasoning is None else self._reasoning.finish()
        if self._calls is None:
            return Parsed(text, reasoning)
        told = self._calls.push(text)
        held, calls = self._calls.finish()
        return Parsed(told + held, reasoning, calls[: self._most])


class TemplateParser:
    """Parser by the checkpoint's own response template. `parser` is transformers' `ResponseParser`, which needs special tokens in
    the text. Text that it cannot read is passed through as it is."""

    def __init__(self, parser: Any, tools: ToolUse) -> None:
        self._parser = parser
        self._tools = tools
        self._calls: list[ToolCall] = []
        self._region: str | None = None
        self._held = ""  # text of a call that has not ended
        self._unread = ""  # text that was fed but not returned; returned if parsing fails
        self._failed = False
        self._take(parser.initial_events)  # the part of the answer that is in the prompt

    def __repr__(self) -> str:
        return f"<TemplateParser in {self._region}, {len(self._calls)} calls>"

    @property
    def reasoning(self) -> bool:
        """Whether the model is still reasoning."""
        return self._region in REASONING

    def push(self, text: str) -> Parsed:
        """Add the next piece of the model's text and return the part that is certain by now."""
        if self._failed:
            return Parsed(text)
        self._unread += text
        try:
            events = self._parser.feed(text)
        except (ValueError, KeyError, TypeError):  # broken JSON in a call, as models write now and then
            return self._fail()
        return self._take(events)

    def finish(self) -> Parsed:
        """End the answer and return the parts that were held back, with the calls."""
        if self._failed:
            return Parsed(calls=tuple(self._calls))
        try:
            _, events = self._parser.finalize()
        except (ValueError, KeyError, TypeError):
            return self._fail()._replace(calls=tuple(self._calls))
        told = self._take(events)
        calls = self._calls if self._tools.parallel else self._calls[:1]
        return told._replace(text=told.text + self._held, calls=tuple(calls))

    def _fail(self) -> Parsed:
        self._failed, text = True, self._unread
        return Parsed(text)

    def _take(self, events: Iterable[Mapping[str, Any]]) -> Parsed:
        text = reasoning = ""
        for event in events:
            field, kind = event["field"], event["type"]
            self._region = None if kind == "region_close" else field
            if field == CALLS:
                text += self._call(event)
            elif kind == "region_chunk" and field == TEXT:
                text += event["text"]
            elif kind == "region_chunk" and field in REASONING:
                reasoning += event["text"]
            if self._region != CALLS:  # the text after the last event may be the beginning of a call
                self._unread = self._unread.rpartition(event["text"])[2] if kind == "region_chunk" else ""
        return Parsed(text, reasoning)

    def _call(self, event: Mapping[str, Any]) -> str:
        """Return the text of a call that turns out to be none of the offered tools', else an empty text."""
        if event["type"] != "region_close":
            self._held += event.get("text", "")
            return ""
        held, self._held = self._held, ""
        values = event["value"] if isinstance(event["value"], list) else [event["value"]]
        calls = [_call_of(value) for value in values]
        if not calls or any(call is None or call.name not in self._tools.names for call in calls):
            return held
        self._calls += [call for call in calls if call is not None]
        return ""


def _call_of(value: Any) -> ToolCall | None:
    function = value.get("function", value) if isinstance(value, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        return None
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            return None
    return ToolCall(function["name"], json.dumps(arguments))
