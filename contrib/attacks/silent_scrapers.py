"""A stranger opens connections to a node's metrics port and sends nothing, so that each connection keeps a thread."""

from __future__ import annotations

import asyncio
import threading
import urllib.request

from attack import Outcome, main

from swarmnode.metrics.exposition import MAX_CONNECTIONS, Sources, serving

VIRTUAL, FAST = False, False
STRANGERS, SETTLE_S = 300, 7.0


def scrape(port: int) -> bool:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
        return b"swarmnode_" in answer.read()


async def attack() -> Outcome:
    before = threading.active_count()
    async with serving(Sources("friends", lambda: (), lambda: ()), "127.0.0.1", 0) as port:
        held = [await asyncio.open_connection("127.0.0.1", port) for _ in range(STRANGERS)]
        most = threading.active_count() - before
        answered = await asyncio.to_thread(scrape, port)
        await asyncio.sleep(SETTLE_S)
        left = threading.active_count() - before
        for _, writer in held:
            writer.close()
    return Outcome(
        answered and most <= 2 * MAX_CONNECTIONS and left < 8,
        f"{STRANGERS} silent connections had {most} threads at once, {left} after {SETTLE_S:.0f} s; a scrape was "
        f"{'answered' if answered else 'not answered'}",
    )


main(__name__, attack, virtual=VIRTUAL)
