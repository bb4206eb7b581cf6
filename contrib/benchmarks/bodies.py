"""Cost of request bodies of 8 MiB that are made to be slow: the CPU time of the longest callback in a gateway's event loop.

    python contrib/benchmarks/bodies.py

A small random Llama on one node. Lists and texts of every request are filled with each kind of value, right and wrong. Prints JSON:
for each path the slowest bodies, with the longest callback and the longest standstill of the loop (which on a busy
machine includes waiting for a core).
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import tempfile
import time
from asyncio import events
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
from plain_decoding import PlainClient

from swarmnode.gateway.app import build_app
from swarmnode.gateway.gateway import Gateway, GatewayConfig
from swarmnode.gateway.page.page import HEADER, Page
from swarmnode.localswarm import LocalSwarm
from swarmnode.swarm.storage.swarmfile import load_swarm
from tests.gateway.in_process import InProcess
from tests.gateway.speaking import save_speaking_llama

BODY_BYTES = 8 << 20
BEAT_S = 0.002
VALUES = {
    "numbers": "1",
    "long numbers": "1." + "7" * 30,
    "texts": '"a"',
    "long texts": '"' + "1" * 4000 + '"',
    "nothing": "null",
    "objects": "{}",
    "lists": "[]",
    "parts": '{"type":"text","text":""}',
    "wrong parts": '{"type":"text","text":7}',
    "messages": '{"role":"user","content":"a"}',
    "calls": '{"type":"function","function":{"name":"f"}}',
}
COUNTS = (14_990, 149_980, 4096, 256)  # just within the gateway's limits
HI = [{"role": "user", "content": "hi"}]
PLACES: dict[str, list[str]] = {  # of a list, in bodies that are well otherwise; % is where it goes
    "/v1/completions": [
        '{"prompt":%}',
        '{"prompt":"a","max_tokens":1,"stop":%}',
        '{"prompt":[%]}',
        '{"prompt":"a","stop_token_ids":%}',
    ],
    "/v1/chat/completions": [
        '{"messages":%}',
        '{"messages":[{"role":"user","content":%}]}',
        '{"messages":[{"role":"assistant","content":"a","tool_calls":%}]}',
        '{"messages":[{"role":"user","content":"a"}],"tools":%}',
        '{"messages":[{"role":"user","content":"a"}],"chat_template_kwargs":{"x":%}}',
        '{"messages":[{"role":"user","content":"a"}],"tools":[{"type":"function","function":{"name":"f","parameters":{"x":%}}}]}',
    ],
    "/v1/responses": ['{"input":%}', '{"input":[{"role":"user","content":%}]}', '{"input":"a","tools":%}'],
    "/v1/messages": [
        '{"max_tokens":1,"messages":%}',
        '{"max_tokens":1,"messages":[{"role":"user","content":%}]}',
        '{"max_tokens":1,"messages":[{"role":"user","content":[{"type":"tool_result","content":%}]}]}',
        '{"max_tokens":1,"messages":[{"role":"user","content":"a"}],"stop_sequences":%}',
        '{"max_tokens":1,"system":%,"messages":[{"role":"user","content":"a"}]}',
    ],
    "/v1/messages/count_tokens": ['{"messages":[{"role":"user","content":%}]}'],
    "/v1/embeddings": ['{"input":%}'],
    "/classify": ['{"input":%}'],
    "/tokenize": ['{"messages":%}', '{"messages":[{"role":"user","content":%}]}', '{"prompt":%}'],
    "/detokenize": ['{"tokens":%}'],
    "/api/v1/machine/x": ['{"command":%}', '{"command":"pause","reason":%}'],
    "/api/v1/swarms/m/revocations": ['{"password":"x","who":%}'],
}
TEXTS = {
    "one text": '"' + "hens and eggs " * (BODY_BYTES // 14 - 20) + '"',
    "escapes": '"' + r"\n" * (BODY_BYTES // 2 - 200) + '"',
    "one number": "1" * (BODY_BYTES - 300),
    "depth": "[" * 900 + "]" * 900,
    "keys": "{" + ",".join(f'"{number}":1' for number in range(95_000)) + "}",
    "wrong keys": "{" + ",".join(f'"x{number}":"y"' for number in range(60_000)) + "}",
}


def bodies() -> Iterator[tuple[str, str, bytes]]:
    """Yield the path, the description and the bytes of every body."""
    for path, places in PLACES.items():
        for place in places:
            fillings = {
                f"{count} {name}": "[" + ",".join([value] * min(count, (BODY_BYTES - 300) // (len(value) + 1))) + "]"
                for name, value in VALUES.items()
                for count in COUNTS
            }
            for name, filling in {**fillings, **TEXTS}.items():
                yield path, f"{place}: {name}", place.replace("%", filling).encode()
            flooded = ("[" + '"a",' * (BODY_BYTES // 4 - 100) + '"a"]').encode()
            yield path, f"{place}: 8 MiB of texts", place.encode().replace(b"%", flooded)
    biases = '{"messages":[{"role":"user","content":"a"}],"logit_bias":%}'
    for name in ("keys", "wrong keys"):
        yield "/v1/chat/completions", f"{biases}: {name}", biases.replace("%", TEXTS[name]).encode()


class Longest:
    """CPU seconds of the loop's longest callback since the last reading, by its own thread's clock."""

    def __init__(self) -> None:
        self._seconds = 0.0
        run: Callable[[Any], None] = events.Handle._run  # type: ignore[attr-defined]

        def timed(handle: Any) -> None:
            began_s = time.thread_time()
            run(handle)
            self._seconds = max(self._seconds, time.thread_time() - began_s)

        events.Handle._run = timed  # type: ignore[attr-defined]

    def __repr__(self) -> str:
        return f"<Longest {self._seconds} s>"

    def take(self) -> float:
        """Return it, and begin anew."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds


async def measure(local: LocalSwarm, only: str) -> dict[str, Any]:
    """Send the bodies one after another. Returns the longest callbacks and standstills, and the three slowest bodies by
    path."""
    longest, still_s = Longest(), 0.0

    async def beat() -> None:
        nonlocal still_s
        while True:
            began_s = time.perf_counter()
            await asyncio.sleep(BEAT_S)
            still_s = max(still_s, time.perf_counter() - began_s - BEAT_S)

    told: dict[str, list[dict[str, Any]]] = {}
    async with await PlainClient.join(load_swarm(local.file), home=local.folder / "client") as client:
        gateway = Gateway({"m": client}, config=GatewayConfig(max_body_bytes=BODY_BYTES))
        page = Page(gateway, local.folder)
        app = build_app(gateway, page)
        transport = InProcess(app)
        headers = {"content-type": "application/json", HEADER: page.owner.token}
        async with (
            gateway.loading(),
            httpx2.AsyncClient(transport=transport, base_url="http://localhost", timeout=None) as http,
        ):
            await http.post("/v1/chat/completions", json={"messages": HI, "max_tokens": 1})
            gc.freeze()  # as `serve` does
            beating = asyncio.ensure_future(beat())
            for path, what, body in bodies():
                if only not in path:
                    continue
                await asyncio.sleep(2 * BEAT_S)
                longest.take()
                still_s = 0.0
                answer = await http.post(path, content=body, headers=headers)
                row = {"ms": 1e3 * longest.take(), "still_ms": 1e3 * still_s, "status": answer.status_code}
                told.setdefault(path, []).append({"body": what, **{key: round(value, 1) for key, value in row.items()}})
            beating.cancel()
    slowest = {path: sorted(rows, key=lambda row: -row["ms"])[:3] for path, rows in told.items()}
    return {
        "bodies": sum(map(len, told.values())),
        "longest_ms": max(row["ms"] for rows in told.values() for row in rows),
        "still_ms": max(row["still_ms"] for rows in told.values() for row in rows),
        "most_still": {path: max(rows, key=lambda row: row["still_ms"]) for path, rows in told.items()},
        "slowest": slowest,
    }


def main(options: argparse.Namespace) -> None:
    """Serve a random model, measure, and print the results."""
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder, "model")
        save_speaking_llama(model)
        with LocalSwarm(Path(folder)) as local:
            local.create(model)
            local.bootstrap()
            local.node("a").wait_for("ready")
            print(json.dumps(asyncio.run(measure(local, options.only))))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="", help="paths that contain this")
    main(parser.parse_args())
