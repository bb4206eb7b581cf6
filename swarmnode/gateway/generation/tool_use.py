"""Tools that a model may or must call, in a form that all APIs share."""

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
Tool = dict[str, Any]  # in the format of OpenAI's chats, which chat templates expect
ANY_OBJECT: dict[str, Any] = {"type": "object"}


class NamedSchema(BaseModel):
    """JSON schema with a name."""

    name: str = ""
    definition: dict[str, Any] | bool = Field(True, alias="schema")


class ResponseFormat(BaseModel):
    """Format of the answer. `type` is text, json_object or json_schema. The schema is in `json_schema` or, in /v1/responses and
    /v1/messages, in `schema` beside the type."""

    type: str
    json_schema: NamedSchema | None = None
    definition: dict[str, Any] | bool | None = Field(None, alias="schema")

    def grammar(self) -> Grammar | None:
        """Return the grammar of the format; None if `type` is text. Raises ApiError if the type is unknown or its schema is
        missing."""
        if self.type == "text":
            return None
        if self.type == "json_object":
            return json_grammar(ANY_OBJECT)
        schema = self.definition if self.json_schema is None else self.json_schema.definition
        if self.type != "json_schema" or schema is None:
            raise bad_request(
                "a response format must be text, json_object, or json_schema with a schema",
                "response_format",
            )
        return json_grammar(schema)


def json_grammar(schema: dict[str, Any] | bool) -> Grammar:
    """Return the grammar of JSON texts that fit `schema`."""
    return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema))


def tool_call_grammar(tools: Sequence[Mapping[str, Any]]) -> Grammar:
    """Return the grammar of one call of one of `tools`, in the format that `ToolCallParser` reads. Raises ApiError if two tools
    define a schema of the same name differently."""
    definitions: dict[str, dict[str, Any]] = {"$defs": {}, "definitions": {}}
    calls = []
    for tool in tools:
        function = tool["function"]
        parameters = dict(function.get("parameters") or ANY_OBJECT)
        for word, defined in definitions.items():  # references are resolved from the root of the schema
            own = parameters.pop(word, {})
            if any(defined.get(name, schema) != schema for name, schema in own.items()):
                raise bad_request(f"two tools define the same name in their {word}: rename one of them", "tools")
            defined.update(own)
        fields = {"name": {"const": function["name"]}, "arguments": parameters}
        calls.append({"type": "object", "properties": fields, "required": list(fields), "additionalProperties": False})
    return json_grammar({"anyOf": calls, **{word: defined for word, defined in definitions.items() if defined}})


@dataclass(frozen=True)
class ToolUse:
    """Tools of a chat. The model sees the `offered` ones, and must call one of `forced` if there are any; `parallel` allows several
    calls in one answer."""

    offered: Sequence[Tool] = ()
    forced: Sequence[Tool] = ()
    parallel: bool = True

    @classmethod
    def choose(
        cls, tools: Sequence[Tool], choice: str = AUTO, name: str | None = None, *, parallel: bool = True
    ) -> ToolUse:
        """Return the use of `tools` by `choice`: none, auto, or required, of one of them if `name` is given. Raises ApiError if the
        choice is unknown or names no tool."""
        forced = [tool for tool in tools if name in (None, name_of(tool))] if choice == REQUIRED else []
        if choice not in (NONE, AUTO, REQUIRED) or (choice == REQUIRED and not forced):
            raise bad_request(
                "tool_choice must be none, auto, required, or the name of one of the tools", "tool_choice"
            )
        return cls([] if choice == NONE else tools, forced, parallel)

    @property
    def names(self) -> frozenset[str]:
        """Names of the tools that the model may call."""
        return frozenset(map(name_of, self.offered))

    @property
    def forced_names(self) -> frozenset[str]:
        """Names of the tools if the model must call one of them; empty if it need not."""
        return frozenset(map(name_of, self.forced))

    def grammar(self) -> Grammar | None:
        """Return the grammar of a tool call if the model must make one, else None. Raises ApiError."""
        return tool_call_grammar(self.forced) if self.forced else None


def function_tool(name: str, description: str | None, parameters: Mapping[str, Any] | None) -> Tool:
    """Return a tool in the format of chat templates, from the fields of another API."""
    told = {"description": description} if description else {}
    schema = dict(parameters or {"type": "object", "properties": {}})
    return {"type": "function", "function": {"name": name, **told, "parameters": schema}}


def name_of(tool: Tool) -> str:
    """Return the name of a tool."""
    return str(tool["function"]["name"])
