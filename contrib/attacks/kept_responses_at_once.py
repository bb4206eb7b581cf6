"""A client of the gateway reads one large kept response many times at once, to fill the gateway's memory."""

from __future__ import annotations

import asyncio
import json
import tempfile
import tracemalloc
from collections import Counter
from pathlib import Path

import httpx2
from attack import Outcome, main

from swarmnode.gateway.access.keys import ANYBODY
from swarmnode.gateway.app import build_app
from swarmnode.gateway.gateway import Gateway
from swarmnode.gateway.openai.kept_responses import Item, ItemPart
from swarmnode.gateway.page.page import Page
from tests.gateway.in_process import InProcess

VIRTUAL, FAST = True, True
READINGS, MOST_BYTES = 60, 400 << 20
ID, TEXT = "resp_large", "x" * (3500 << 10)


async def attack() -> Outcome:
    with tempfile.TemporaryDirectory() as name:
        gateway = Gateway({}, home=Path(name))
        assert gateway.responses is not None
        part = {"type": "output_text", "text": TEXT}
        answer = {"id": "msg_2", "type": "message", "status": "completed", "role": "assistant", "content": [part]}
        asked = Item("msg_1", "message", "completed", "user", [ItemPart("input_text", TEXT)])
        gateway.responses.store(ANYBODY, ID, json.dumps({"id": ID, "output": [answer]}).encode(), [asked])
        app, path = build_app(gateway, Page(gateway, Path(name))), f"/v1/responses/{ID}"
        async with httpx2.AsyncClient(transport=InProcess(app), base_url="http://localhost", timeout=None) as http:
            assert (await http.get(path)).status_code == 200
            places = (path, f"{path}/input_items")
            tracemalloc.start(1)
            replies = await asyncio.gather(*(http.get(places[number % 2]) for number in range(READINGS)))
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
    told = Counter(reply.status_code for reply in replies)
    return Outcome(
        peak <= MOST_BYTES and set(told) <= {200, 429},
        f"{READINGS} readings of {len(TEXT) * 2 >> 20} MiB took {peak >> 20} MiB: {told[200]} answered, {told[429]} told to wait",
    )


main(__name__, attack, virtual=VIRTUAL)
