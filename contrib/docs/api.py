"""Write the reference of docs/api.md from the gateway's OpenAPI schema: `python contrib/docs/api.py`."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from swarmnode.gateway.app import build_app
from swarmnode.gateway.gateway import Gateway
from swarmnode.gateway.page.page import Page

PAGE = Path(__file__).parents[2] / "docs" / "api.md"
MARK = (
    "<!-- The rest is written by contrib/docs/api.py from the schema, which the gateway serves at /openapi.json. -->\n"
)
FRAMEWORK = {"HTTPValidationError", "ValidationError"}  # FastAPI's error objects, which the gateway does not use
Schema = dict[str, Any]


def page() -> str:
    """Return the whole page in Markdown: the handwritten part, then the reference."""
    prose = PAGE.read_text().partition(MARK)[0]
    return "\n".join([prose + MARK, *_paths(schema()), *_objects(schema())]) + "\n"


def schema() -> Schema:
    """Return the OpenAPI schema of a gateway that serves its web page too."""
    with tempfile.TemporaryDirectory() as home:
        gateway = Gateway({})
        return build_app(gateway, Page(gateway, Path(home))).openapi()


def _paths(api: Schema) -> Iterator[str]:
    yield "## Paths\n\n| path | is sent | answers | |\n|---|---|---|---|"
    for path, methods in api["paths"].items():
        for method, operation in methods.items():
            sent = _content(operation.get("requestBody", {}))
            answered = _content(operation["responses"].get("200", {}))
            told = " ".join(operation.get("description", "").split())
            yield f"| `{method.upper()} {path}` | {sent} | {answered} | {told} |"


def _content(part: Schema) -> str:
    found = part.get("content", {}).get("application/json", {}).get("schema", {})
    return _linked(found) if "$ref" in found else ""


def _objects(api: Schema) -> Iterator[str]:
    yield "\n## Objects\n\nFields without a default have to be sent; answers have all of theirs."
    for name, described in sorted(api["components"]["schemas"].items()):
        if name in FRAMEWORK:
            continue
        yield f"\n### {name}\n"
        if told := " ".join(described.get("description", "").split()):
            yield f"{told}\n"
        yield "| field | type | default |\n|---|---|---|"
        for field, kind in described.get("properties", {}).items():
            default = "" if "default" not in kind else f"`{json.dumps(kind['default'])}`"
            yield f"| `{field}` | {_type(kind)} | {default} |"


def _type(kind: Schema) -> str:
    """Return the type of a field in words, with its bounds."""
    if "$ref" in kind:
        return _linked(kind)
    if "anyOf" in kind:
        return " or ".join(dict.fromkeys(map(_type, kind["anyOf"])))
    if "enum" in kind:
        return " or ".join(f"`{json.dumps(value)}`" for value in kind["enum"])
    if "const" in kind:
        return f"`{json.dumps(kind['const'])}`"
    if kind.get("type") == "array":
        most = f", {kind['maxItems']} at most" if "maxItems" in kind else ""
        return f"list of {_type(kind.get('items', {}))}{most}"
    least = f", at least {kind['minimum']}" if "minimum" in kind else ""
    return str(kind.get("type", "anything")) + least


def _linked(kind: Schema) -> str:
    name = kind["$ref"].rpartition("/")[2]
    return f"[{name}](#{name.lower()})"


if __name__ == "__main__":
    PAGE.write_text(page())
