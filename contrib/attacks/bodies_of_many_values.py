"""A stranger sends a gateway megabytes of wrong JSON, whose elements must all be checked, to block its event loop."""

from __future__ import annotations

import asyncio
import time

from attack import Outcome, main

from swarmnode.gateway.app import build_app
from swarmnode.gateway.gateway import Gateway
from tests.gateway.in_process import InProcess

VIRTUAL, FAST = False, False
BODY_BYTES = 8 << 20
MOST_S = 0.5  # CPU time for a body of 8 MiB; 50 ms are those of one callback. Before, 1 MiB took 3 to 23 s
PLACES = {
    "/v1/completions": ('{"prompt":%}', '{"prompt":"a","stop":%}', '{"prompt":"a","logit_bias":{"a":%}}'),
    "/v1/chat/completions": ('{"messages":%}', '{"messages":[{"role":"user","content":%}]}'),
    "/v1/messages": ('{"messages":[{"role":"user","content":%}]}', '{"messages":%}'),
    "/v1/responses": ('{"input":%}',),
    "/v1/embeddings": ('{"input":%}',),
    "/tokenize": ('{"prompt":%}', '{"messages":%}'),
    "/detokenize": ('{"tokens":%}',),
}
ELEMENTS = ("1", '"a"', "null", "{}", "[]", "[1]")


async def attack() -> Outcome:
    import httpx2

    transport = InProcess(build_app(Gateway({})))
    slowest_s, asked, refused = 0.0, 0, 0
    async with httpx2.AsyncClient(transport=transport, base_url="http://localhost", timeout=None) as http:
        for path, places in PLACES.items():
            for place in places:
                for element in ELEMENTS:
                    for count in (BODY_BYTES // (len(element) + 1) - 20, 14_000):
                        body = place.replace("%", f"[{','.join([element] * count)}]").encode()
                        began_s = time.process_time()
                        answer = await http.post(path, content=body, headers={"content-type": "application/json"})
                        slowest_s = max(slowest_s, time.process_time() - began_s)
                        asked += 1
                        refused += 400 <= answer.status_code < 500
                        await asyncio.sleep(0)
    return Outcome(
        refused == asked and slowest_s < MOST_S,
        f"{refused} of {asked} bodies were refused; the slowest took {1e3 * slowest_s:.0f} ms of CPU",
    )


main(__name__, attack, virtual=VIRTUAL)
