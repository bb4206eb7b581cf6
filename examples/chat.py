"""Chat with a swarm by the openai package, printed as it arrives: `python examples/chat.py` beside `swarmnode serve`."""

from __future__ import annotations

import asyncio

from openai import AsyncOpenAI


async def chat(client: AsyncOpenAI, text: str) -> str:
    """Ask the first served model and return its answer, printed while it arrives."""
    model = (await client.models.list()).data[0].id
    messages = [{"role": "system", "content": "Be short."}, {"role": "user", "content": text}]
    answer = ""
    async for chunk in await client.chat.completions.create(
        model=model, messages=messages, max_tokens=100, stream=True
    ):
        piece = chunk.choices[0].delta.content or ""
        print(piece, end="", flush=True)
        answer += piece
    return answer


if __name__ == "__main__":
    gateway = AsyncOpenAI(base_url="http://127.0.0.1:8000/v1", api_key="none")
    asyncio.run(chat(gateway, "How are the hens?"))
