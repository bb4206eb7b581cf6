"""What a model says, as its own tokenizer reads it: transformers' response templates, which are the inverse of chat templates."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from swarmnode.gateway.generation.response_parser import Parsed
from swarmnode.gateway.generation.tool_calls import ToolCall
from swarmnode.gateway.generation.tool_use import ToolUse

TEXT = "content"
REASONING = frozenset({"thinking", "reasoning", "reasoning_content"})
CALLS = "tool_calls"


class TemplateParser:
    """`parser` is transformers' `ResponseParser`, which wants special tokens, too. What it cannot read is told as text."""

    def __init__(self, parser: Any, tools: ToolUse) -> None:
        self._parser = parser
        self._tools = tools
        self._calls: list[ToolCall] = []
        self._region: str | None = None
        self._held = ""  # of a call that has not ended
        self._unread = ""  # what was fed and not told, should reading it fail
        self._failed = False
        self._take(parser.initial_events)  # how the prompt begins the answer

    def __repr__(self) -> str:
        return f"<TemplateParser in {self._region}, {len(self._calls)} calls>"

    @property
    def reasoning(self) -> bool:
        """Whether the model is not yet answering."""
        return self._region in REASONING

    def push(self, text: str) -> Parsed:
        """The next piece of what it says."""
        if self._failed:
            return Parsed(text)
        self._unread += text
        try:
            events = self._parser.feed(text)
        except (ValueError, KeyError, TypeError):  # broken JSON in a call, as models write now and then
            return self._fail()
        return self._take(events)

    def finish(self) -> Parsed:
        """What was held back, now that nothing follows."""
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
            if self._region != CALLS:  # what follows the last event may be the beginning of a call
                self._unread = self._unread.rpartition(event["text"])[2] if kind == "region_chunk" else ""
        return Parsed(text, reasoning)

    def _call(self, event: Mapping[str, Any]) -> str:
        """The text of what turns out to be no call of ours."""
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
