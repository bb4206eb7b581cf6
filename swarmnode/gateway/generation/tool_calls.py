"""Calls of tools in what a model says.

Two ways of writing them are common, and understood whatever the model is: `<tool_call>{"name": …, "arguments": …}</tool_call>`,
any number of them (Hermes, Qwen), and an answer that is one such JSON object and nothing else (Llama 3, with `parameters`).
"""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import NamedTuple

from swarmnode.gateway.generation.stop_strings import StopStrings

BEGIN, END = "<tool_call>", "</tool_call>"


class ToolCall(NamedTuple):
    """`arguments` is JSON."""

    name: str
    arguments: str


class ToolCallParser:
    """Lets a text through as it comes, but for what may be calls of the tools of these names."""

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._before = StopStrings([BEGIN])
        self._is_object: bool | None = None  # not known before the first character
        self._held = ""

    def __repr__(self) -> str:
        return f"<ToolCallParser for {', '.join(self._names)}, {len(self._held)} characters held back>"

    def push(self, text: str) -> str:
        """What is certain to be no call."""
        if self._is_object is None and text.strip():
            self._is_object = text.lstrip().startswith("{")
        if self._is_object or self._before.found is not None:
            self._held += text
            return ""
        told = self._before.push(text)
        if self._before.found is not None:
            self._held = BEGIN + self._before.rest
        return told

    def finish(self) -> tuple[str, tuple[ToolCall, ...]]:
        """What was held back, as calls where all of it is that, else as text."""
        held = self._before.flush() + self._held
        bodies = [held] if self._is_object else [part.split(END)[0] for part in held.split(BEGIN)[1:]]
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
