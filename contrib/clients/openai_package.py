"""The `openai` package against a gateway: `python contrib/clients/openai_package.py URL MODEL`."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import openai
from question import SAID, SCHEMA

TOOL: Any = {"type": "function", "function": {"name": "count", "parameters": SCHEMA}}
FLAT: Any = {"type": "function", "name": "count", "parameters": SCHEMA, "strict": False}


def sync(url: str, model: str) -> None:
    """Try all calls without asyncio. Raises AssertionError if an answer is wrong."""
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
        assert model in [one.id for one in client.models.list()] and client.models.retrieve(model).id == model
        ask: Any = {"model": model, "temperature": 0}
        whole = client.chat.completions.create(messages=SAID, max_tokens=16, **ask)
        chunks = list(client.chat.completions.create(messages=SAID, max_tokens=16, stream=True, **ask))
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content
        forced = client.chat.completions.create(
            messages=SAID, max_tokens=100, tools=[TOOL], tool_choice="required", **ask
        )
        assert set(json.loads(forced.choices[0].message.tool_calls[0].function.arguments)) == {"hens"}
        assert client.completions.create(prompt="A hen", max_tokens=8, **ask).usage.completion_tokens == 8
        response = client.responses.create(input=SAID, max_output_tokens=4, **ask)
        *_, last = client.responses.create(input=SAID, max_output_tokens=4, stream=True, **ask)
        assert last.type == "response.incomplete" and last.response.output_text == response.output_text
        later = client.responses.create(input=SAID, max_output_tokens=4, previous_response_id=response.id, **ask)
        assert later.usage.input_tokens > response.usage.input_tokens
        assert client.responses.retrieve(later.id).output_text == later.output_text
        assert len(list(client.responses.input_items.list(later.id))) == 2 * len(SAID) + 1
        client.responses.delete(later.id)
        called = client.responses.create(
            input=SAID, max_output_tokens=100, tools=[FLAT], tool_choice={"type": "function", "name": "count"}, **ask
        )
        assert called.output[0].type == "function_call" and set(json.loads(called.output[0].arguments)) == {"hens"}
        try:
            client.chat.completions.create(model="nobody", messages=SAID)
        except openai.NotFoundError:
            return
        raise AssertionError("a model that is not served was found")


async def with_asyncio(url: str, model: str) -> None:
    """Try several calls at once, and a stream, with asyncio. Raises AssertionError if an answer is wrong."""
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
        ask: Any = {"model": model, "messages": SAID, "max_tokens": 8}
        ask |= {
            "temperature": 1,
            "top_p": 1,
            "extra_body": {"top_k": 0},
        }  # a random model that draws from few tokens may end early
        asked = [client.chat.completions.create(**ask, seed=n) for n in range(4)]
        assert all(answer.usage.completion_tokens == 8 for answer in await asyncio.gather(*asked))
        stream = await client.chat.completions.create(**ask, seed=0, stream=True)
        assert [chunk async for chunk in stream][-1].choices[0].finish_reason == "length"


if __name__ == "__main__":
    sync(sys.argv[1], sys.argv[2])
    asyncio.run(with_asyncio(sys.argv[1], sys.argv[2]))
