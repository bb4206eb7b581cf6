"""Which tools a model may call, and which it must, whatever its API calls them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, Field

from swarmnode.codec.sampling import Grammar, GrammarKind
from swarmnode.gateway.http.api_error import bad_request

MAX_TOOLS = 256
NONE, AUTO, REQUIRED = "none", "auto", "required"
Tool = dict[str, Any]  # as OpenAI's chats have it, which is what chat templates expect
ANY_OBJECT: dict[str, Any] = {"type": "object"}


class NamedSchema(BaseModel):
    """A JSON schema."""

    name: str = ""
    definition: dict[str, Any] | bool = Field(True, alias="schema")


class ResponseFormat(BaseModel):
    """`type` is text, json_object or json_schema; the schema is in a field of its own or, in responses, beside the type."""

    type: str
    json_schema: NamedSchema | None = None
    definition: dict[str, Any] | bool | None = Field(None, alias="schema")

    def grammar(self) -> Grammar | None:
        """None where any text will do. Raises ApiError."""
        if self.type == "text":
            return None
        if self.type == "json_object":
            return json_grammar(ANY_OBJECT)
        schema = self.definition if self.json_schema is None else self.json_schema.definition
        if self.type != "json_schema" or schema is None:
            raise bad_request("a response format is text, json_object, or json_schema with a schema", "response_format")
        return json_grammar(schema)


def json_grammar(schema: dict[str, Any] | bool) -> Grammar:
    """Of JSON that fits a schema."""
    return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema))


def tool_call_grammar(tools: Sequence[Mapping[str, Any]]) -> Grammar:
    """Of one call of one of these tools, as `ToolCallParser` reads it. Raises ApiError where two schemas define one name."""
    definitions: dict[str, dict[str, Any]] = {"$defs": {}, "definitions": {}}
    calls = []
    for tool in tools:
        function = tool["function"]
        parameters = dict(function.get("parameters") or ANY_OBJECT)
        for word, defined in definitions.items():  # references begin at the root
            own = parameters.pop(word, {})
            if any(defined.get(name, schema) != schema for name, schema in own.items()):
                raise bad_request(f"two tools define one name in their {word}", "tools")
            defined.update(own)
        fields = {"name": {"const": function["name"]}, "arguments": parameters}
        calls.append({"type": "object", "properties": fields, "required": list(fields), "additionalProperties": False})
    return json_grammar({"anyOf": calls, **{word: defined for word, defined in definitions.items() if defined}})


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
