"""Question and tool schema that all clients use."""

from __future__ import annotations

from typing import Any

SAID: list[Any] = [{"role": "user", "content": "How are the hens?"}]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"hens": {"type": "boolean"}},
    "required": ["hens"],
    "additionalProperties": False,
}
