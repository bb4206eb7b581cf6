"""The gateway as people run it: a process of its own between OpenAI's client and a swarm. More: tests/gateway."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import openai
import pytest

from swarmnode.localswarm import NodeProcess
from tests.gateway.speaking import save_speaking_llama
from tests.real.forked import ForkedSwarm

STREAMS = 64
ASK = {"model": "local", "max_tokens": 32, "temperature": 0}


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkedSwarm]:
    folder = tmp_path_factory.mktemp("served")
    save_speaking_llama(folder / "model")
    with ForkedSwarm(folder) as local:
        local.create(folder / "model")
        local.bootstrap()
        for node in [local.node("a", "--span", "0:4"), local.node("b", "--span", "0:4")]:
            node.wait_for("ready")
        yield local


def test_a_node_dies_in_the_middle_of_sentences(local: ForkedSwarm) -> None:
    server = local.server("gateway", "--port", "0")
    url = server.wait_for("serving")["url"]
    with openai.OpenAI(api_key="none", base_url=url) as client:
        said = [{"role": "user", "content": "How are the hens?"}]
        alone = client.chat.completions.create(messages=said, **ASK).choices[0].message.content
    assert asyncio.run(while_one_is_killed(url, local.members[1])) == [alone] * STREAMS


async def while_one_is_killed(url: str, node: NodeProcess) -> list[str]:
    begun = asyncio.Semaphore(0)

    async def tell(client: openai.AsyncOpenAI) -> str:
        said = [{"role": "user", "content": "How are the hens?"}]
        text = ""
        async for chunk in await client.chat.completions.create(messages=said, stream=True, **ASK):
            text += chunk.choices[0].delta.content or ""
            begun.release()
        return text

    async with openai.AsyncOpenAI(api_key="none", base_url=url) as client:
        telling = [asyncio.ensure_future(tell(client)) for _ in range(STREAMS)]
        for _ in range(4 * STREAMS):
            await begun.acquire()
        node.kill()
        return list(await asyncio.gather(*telling))
