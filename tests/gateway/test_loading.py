"""A gateway answers while its model's tokenizer is still loaded, and says so."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from swarmnode.client.swarm_client import SwarmClient
from swarmnode.errors import CheckpointError
from tests.gateway.conftest import MODEL, serving
from tests.gateway.test_refusals import CHAT, HI
from tests.net.virtual import in_virtual_time
from tests.node.conftest import Founded

ASKED = {"messages": HI, "max_tokens": 2}
READY = {"ready": True, "missing": {}, "loading": []}


@in_virtual_time
async def test_requests_wait_for_the_tokenizer_for_as_long_as_they_are_patient(
    founded: Founded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, calls, theirs = asyncio.Event(), [], SwarmClient.tokenizer

    async def tokenizer(client: SwarmClient) -> Any:
        calls.append(client)
        await read.wait()
        return await theirs(client)

    monkeypatch.setattr(SwarmClient, "tokenizer", tokenizer)
    async with serving(founded, tmp_path, patience_s=4.0) as served:
        answer = await served.http.get("/ready")
        assert (answer.status_code, answer.json()) == (503, {"ready": False, "missing": {}, "loading": [MODEL]})
        began_s = asyncio.get_running_loop().time()
        refused = await asyncio.gather(*(served.http.post(CHAT, json=ASKED) for _ in range(8)))
        assert asyncio.get_running_loop().time() - began_s == pytest.approx(4.0)
        for answer in refused:
            assert answer.status_code == 503 and answer.headers["retry-after"]
            assert answer.json()["error"]["code"] == "loading"
            assert "still loading after 4 s" in answer.json()["error"]["message"]
        waiting = asyncio.ensure_future(served.http.post(CHAT, json=ASKED))
        await asyncio.sleep(1.0)
        assert len(calls) == 1, "it is loaded once, whoever waits and goes away"
        read.set()
        assert (await waiting).status_code == 200
        assert (await served.http.get("/ready")).json() == READY


@in_virtual_time
async def test_a_tokenizer_that_failed_is_tried_by_who_asks_next(
    founded: Founded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    theirs = SwarmClient.tokenizer

    async def broken(client: SwarmClient) -> Any:
        raise CheckpointError("the checkpoint's tokenizer cannot be used: it is torn")

    monkeypatch.setattr(SwarmClient, "tokenizer", broken)
    async with serving(founded, tmp_path) as served:
        answer = await served.http.post(CHAT, json=ASKED)
        assert answer.status_code == 500 and "it is torn" in answer.json()["error"]["message"]
        assert "it is torn" in caplog.text
        assert (await served.http.get("/ready")).status_code == 503
        monkeypatch.setattr(SwarmClient, "tokenizer", theirs)
        assert (await served.http.post(CHAT, json=ASKED)).status_code == 200
        assert (await served.http.get("/ready")).json() == READY


@in_virtual_time
async def test_loading_is_tried_again_though_nobody_asks(
    founded: Founded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs, failures = SwarmClient.tokenizer, [AttributeError("no AutoTokenizer"), OSError("torn")]

    async def tokenizer(client: SwarmClient) -> Any:
        if failures:
            raise failures.pop()
        return await theirs(client)

    monkeypatch.setattr(SwarmClient, "tokenizer", tokenizer)
    async with serving(founded, tmp_path) as served:
        assert (await served.http.get("/ready")).status_code == 503
        await asyncio.sleep(5.0)  # after one second and two
        assert (await served.http.get("/ready")).json() == READY
