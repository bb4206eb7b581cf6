"""What each client asks: a question, and arguments of a tool that are to fit a schema."""

from __future__ import annotations

from typing import Any

SAID: list[Any] = [{"role": "user", "content": "How are the hens?"}]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"hens": {"type": "boolean"}},
    "required": ["hens"],
    "additionalProperties": False,
}
