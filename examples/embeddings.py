"""Find the text that is nearest to a question: `python examples/embeddings.py` beside `swarmnode serve` of an encoder's swarm."""

from __future__ import annotations

import asyncio

from openai import AsyncOpenAI

TEXTS = ("the hens lay", "a red cat sat on the mat", "a blue dog ran")


async def nearest(client: AsyncOpenAI, question: str, texts: tuple[str, ...] = TEXTS) -> str:
    """Return the one of `texts` whose embedding has the smallest angle to the embedding of `question`."""
    model = (await client.models.list()).data[0].id
    answer = await client.embeddings.create(model=model, input=[question, *texts])
    asked, *told = [each.embedding for each in answer.data]
    return max(zip(texts, told, strict=True), key=lambda each: _cosine(asked, each[1]))[0]


def _cosine(one: list[float], other: list[float]) -> float:
    product = sum(a * b for a, b in zip(one, other, strict=True))
    return product / (sum(a * a for a in one) * sum(b * b for b in other)) ** 0.5


if __name__ == "__main__":
    gateway = AsyncOpenAI(base_url="http://127.0.0.1:8000/v1", api_key="none")
    print(asyncio.run(nearest(gateway, "Where was the cat?")))
