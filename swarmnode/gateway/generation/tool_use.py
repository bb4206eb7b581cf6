"""Which tools a model may call, and which it must, whatever its API calls them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from swarmnode.codec.sampling import Grammar
from swarmnode.gateway.generation.response_format import tool_call_grammar
from swarmnode.gateway.http.api_error import bad_request

MAX_TOOLS = 256
NONE, AUTO, REQUIRED = "none", "auto", "required"
Tool = dict[str, Any]  # as OpenAI's chats have it, which is what chat templates expect


@dataclass(frozen=True)
class ToolUse:
    """`offered` are shown to the model, which must call one of `forced` where there are any; `parallel` ones at once."""

    offered: Sequence[Tool] = ()
    forced: Sequence[Tool] = ()
    parallel: bool = True

    @classmethod
    def choose(
        cls, tools: Sequence[Tool], choice: str = AUTO, name: str | None = None, *, parallel: bool = True
    ) -> ToolUse:
        """What `tool_choice` says of these tools: none, auto, required, or the `name` of one. Raises ApiError."""
        forced = [tool for tool in tools if name in (None, name_of(tool))] if choice == REQUIRED else []
        if choice not in (NONE, AUTO, REQUIRED) or (choice == REQUIRED and not forced):
            raise bad_request("tool_choice is none, auto, required, or the name of one of the tools", "tool_choice")
        return cls([] if choice == NONE else tools, forced, parallel)

    @property
    def names(self) -> frozenset[str]:
        """Of those that it may call."""
        return frozenset(map(name_of, self.offered))

    def grammar(self) -> Grammar | None:
        """Of a call, where it must make one. Raises ApiError."""
        return tool_call_grammar(self.forced) if self.forced else None


def function_tool(name: str, description: str | None, parameters: Mapping[str, Any] | None) -> Tool:
    """A tool of another API."""
    function: Tool = {"name": name, "parameters": dict(parameters or {"type": "object", "properties": {}})}
    return {"type": "function", "function": {**function, **({"description": description} if description else {})}}


def name_of(tool: Tool) -> str:
    """What the model calls it by."""
    return str(tool["function"]["name"])
