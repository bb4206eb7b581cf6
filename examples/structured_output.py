"""An answer that is JSON of a given schema, whatever the model would like to say: `python examples/structured_output.py` beside
`swarmnode serve`."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from openai import AsyncOpenAI

SCHEMA = {
    "type": "object",
    "properties": {"laid": {"type": "boolean"}, "mood": {"enum": ["good", "bad"]}},
    "required": ["laid", "mood"],
    "additionalProperties": False,
}


async def ask(client: AsyncOpenAI, text: str) -> dict[str, Any]:
    """Ask `text` and return the parsed answer, which fits `SCHEMA`. Raises ValueError if the answer is cut off before its end."""
    model = (await client.models.list()).data[0].id
    answer = await client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": text}],
        response_format={"type": "json_schema", "json_schema": {"name": "hens", "schema": SCHEMA}},
        max_tokens=200,
    )
    told = json.loads(answer.choices[0].message.content or "")
    assert isinstance(told, dict)
    return told


if __name__ == "__main__":
    gateway = AsyncOpenAI(base_url="http://127.0.0.1:8000/v1", api_key="none")
    print(asyncio.run(ask(gateway, "How are the hens?")))
