"""Cost of the gateway: the same texts asked of it over HTTP and of the swarm by `generate`, in turns, in the same run.

    python contrib/benchmarks/gateway.py

A random Llama (hidden 512, 8 layers unless told otherwise, float32) with a byte-level tokenizer, on one node of one thread, and no
drafts on either side. Prints JSON: for each number of streams the tokens per second of both, and as medians over the rounds
their ratio, and how much later a first token comes.
Each round asks both, the other one first each time. A rest before each clears up after the one before.
No prompt begins as another did: the gateway keeps the caches of what it was asked, and `generate` does not.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import operator
import os
import statistics
import tempfile
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

os.environ.setdefault("OMP_NUM_THREADS", "1")

from plain_decoding import PlainClient, start_gateway

from swarmnode.localswarm import LocalSwarm
from swarmnode.swarm.storage.swarmfile import load_swarm
from tests.gateway.speaking import save_speaking_llama

PROMPT = "{:06}: once upon a time there was a hen"
WAYS = ("generate", "gateway")
REST_S = 0.1
SIZES = {"hidden_size": 512, "intermediate_size": 1376, "num_attention_heads": 8, "num_key_value_heads": 8}


Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def by_generate(client: PlainClient, prompt: str, new_tokens: int) -> float:
    """Return the seconds to the first text of `generate`. A token that completes no character does not count."""
    began_s, first_s = time.perf_counter(), 0.0
    async for token in await client.stream(prompt, max_new_tokens=new_tokens):
        if token.text:
            first_s = first_s or time.perf_counter() - began_s
    return first_s


async def by_http(connection: Connection, path: str, prompt: str, new_tokens: int) -> float:
    """Return the seconds to the first text on an open connection, as clients keep theirs. The stream is read without
    parsing: parsing in a Python client costs several times what the gateway does, on the same cores."""
    reader, writer = connection
    body = json.dumps({"prompt": prompt, "max_tokens": new_tokens, "temperature": 0, "stream": True}).encode()
    head = (
        f"POST {path}/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    began_s, first_s, end = time.perf_counter(), 0.0, b""
    writer.write(head.encode() + body)
    while data := await reader.read(1 << 16):
        first_s = first_s or time.perf_counter() - began_s
        end = (end + data)[-64:]
    writer.close()
    assert b"[DONE]" in end, f"the answer did not come to its end: {end!r}"
    return first_s


def paired(measured: dict[str, list[float]]) -> tuple[list[float], list[float]]:
    """Return the figures of the gateway and of `generate`, without the warm-up round."""
    return measured["gateway"][1:], measured["generate"][1:]


async def measure(local: LocalSwarm, url: str, options: argparse.Namespace) -> dict[str, Any]:
    """Measure all numbers of streams over HTTP and by `generate`."""
    told: dict[str, Any] = {"rounds": options.rounds, "new_tokens": options.new_tokens}
    prompts = map(PROMPT.format, itertools.count())
    client, address = await PlainClient.join(load_swarm(local.file), home=local.folder / "client"), urlsplit(url)

    def ask(way: str, connection: Connection) -> Coroutine[Any, Any, float]:
        if way == "generate":
            return by_generate(client, next(prompts), options.new_tokens)
        return by_http(connection, address.path, next(prompts), options.new_tokens)

    async with client:
        for streams in options.streams:
            rates: dict[str, list[float]] = {way: [] for way in WAYS}
            firsts: dict[str, list[float]] = {way: [] for way in WAYS}
            for number in range(options.rounds + 1):  # the first to warm up
                for way in WAYS[:: 1 if number % 2 else -1]:
                    connect = asyncio.open_connection
                    connections = [await connect(address.hostname, address.port) for _ in range(streams)]
                    await asyncio.sleep(REST_S)
                    began_s = time.perf_counter()
                    first_s = await asyncio.gather(*(ask(way, each) for each in connections))
                    rates[way].append(streams * options.new_tokens / (time.perf_counter() - began_s))
                    firsts[way].append(statistics.median(first_s))
            told[f"{streams} streams"] = {
                **{f"{way}_tokens_per_s": round(statistics.median(each[1:]), 1) for way, each in rates.items()},
                "ratio": round(statistics.median(map(operator.truediv, *paired(rates))), 3),
                "first_token_later_ms": round(1e3 * statistics.median(map(operator.sub, *paired(firsts))), 2),
            }
    return told


def main(options: argparse.Namespace) -> None:
    """Serve a random model, measure, and print the results."""
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder, "model")
        save_speaking_llama(model, layers=options.layers, **SIZES)
        with LocalSwarm(Path(folder)) as local:
            local.create(model)
            local.bootstrap()
            local.node("a").wait_for("ready")
            url = start_gateway(local)
            print(json.dumps(asyncio.run(measure(local, url, options))))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument(
        "--layers", type=int, default=8, help="layers of the model; with 1 the first tokens differ little"
    )
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 32])
    main(parser.parse_args())
