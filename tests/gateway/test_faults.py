"""Who goes away, and which machine: the text is the same, and nobody computes for nobody."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import openai
import pytest

from swarmnode.gateway.http.event_stream import ClientWatch, EventStream
from tests.gateway.conftest import HALVES, MODEL, serving
from tests.net.virtual import in_virtual_time
from tests.node.conftest import Founded

TWO_BY_TWO = {"a1": "0:2", "a2": "0:2", "b1": "2:4", "b2": "2:4"}
LONG = {"model": MODEL, "prompt": "hens", "max_tokens": 2000, "temperature": 0}


@in_virtual_time
async def test_a_text_goes_on_while_the_machines_that_write_it_are_killed(founded: Founded, tmp_path: Path) -> None:
    async with serving(founded, tmp_path, nodes=TWO_BY_TWO) as served:
        options = {**LONG, "max_tokens": 48}
        expected = (await served.openai.completions.create(**options)).choices[0].text
        streams = [await served.openai.completions.create(stream=True, **options) for _ in range(4)]
        await served.swarm.members["a1"].kill()
        await served.swarm.members["b2"].kill()
        texts = ["", "", "", ""]
        for number, stream in enumerate(streams):
            async for chunk in stream:
                texts[number] += chunk.choices[0].text
    assert texts == [expected] * 4


@pytest.mark.parametrize("streaming", [False, True])
@in_virtual_time
async def test_who_goes_frees_the_session_at_every_hop(founded: Founded, tmp_path: Path, streaming: bool) -> None:
    async with serving(founded, tmp_path, nodes=HALVES) as served:
        asking = asyncio.ensure_future(served.openai.completions.create(stream=streaming, n=2, **LONG))
        await asyncio.wait({asking}, timeout=0.3)
        assert served.sessions() == 4, "two at each of two hops"
        if streaming:
            await asking.result().close()
        else:
            asking.cancel()
        assert await served.freed()


@in_virtual_time
async def test_a_swarm_that_goes_is_told_and_comes_back(founded: Founded, tmp_path: Path) -> None:
    async with serving(founded, tmp_path, nodes=HALVES, patience_s=5.0) as served:
        expected = (await served.openai.completions.create(**{**LONG, "max_tokens": 8})).choices[0].text
        stream = await served.openai.completions.create(stream=True, **LONG)
        await served.swarm.members["b"].kill()
        with pytest.raises(openai.APIError, match="layers 2"):
            async for _ in stream:
                pass
        with pytest.raises(openai.InternalServerError) as refusal:
            await served.openai.completions.create(**LONG)
        assert refusal.value.status_code == 503 and refusal.value.response.headers["retry-after"]
        await served.swarm.node("c", "2:4").wait_for("ready")
        answer = await served.openai.completions.create(**{**LONG, "max_tokens": 8})
        assert answer.choices[0].text == expected


@in_virtual_time
async def test_who_does_not_read_is_cut_off() -> None:
    async def events() -> AsyncGenerator[bytes, None]:
        yield b"never asked for"

    async def receive() -> Any:
        await asyncio.Event().wait()

    async def send(message: Any) -> None:
        if message["type"] == "http.response.body":
            await asyncio.Event().wait()

    source = events()
    await asyncio.wait_for(EventStream(b"first", source, ClientWatch(receive), 60.0)({}, receive, send), 61.0)
    assert [each async for each in source] == [], "it was closed"
