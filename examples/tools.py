"""A model of a swarm that calls a tool, and goes on with what it gave: `python examples/tools.py` beside `swarmnode serve`."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from openai import AsyncOpenAI

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather in a town.",
        "parameters": {"type": "object", "properties": {"town": {"type": "string"}}, "required": ["town"]},
    },
}


def weather(town: str = "") -> str:
    """Return the weather in `town`, which is always rain in this example."""
    return f"Rain in {town}."


async def ask(client: AsyncOpenAI, text: str, most_calls: int = 4) -> list[dict[str, Any]]:
    """Hold a conversation with tool calls and return its messages. It ends when the model calls no tool, or after `most_calls`
    answers."""
    model = (await client.models.list()).data[0].id
    messages: list[dict[str, Any]] = [{"role": "user", "content": text}]
    for _ in range(most_calls):
        answer = await client.chat.completions.create(model=model, messages=messages, tools=[WEATHER], max_tokens=100)
        said = answer.choices[0].message
        messages.append(said.model_dump(exclude_none=True))
        if not said.tool_calls:
            break
        for call in said.tool_calls:
            result = weather(**json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return messages


if __name__ == "__main__":
    gateway = AsyncOpenAI(base_url="http://127.0.0.1:8000/v1", api_key="none")
    for message in asyncio.run(ask(gateway, "What is the weather in Bern?")):
        print(message)
