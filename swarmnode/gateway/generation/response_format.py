"""Grammars that answers follow: by the format that a request names, or by the tools of which one must be called."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel, Field

from swarmnode.codec.sampling import Grammar, GrammarKind
from swarmnode.gateway.http.api_error import bad_request

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
