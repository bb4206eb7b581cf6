"""Time to the first token of a prompt that begins as an earlier one did, against the earlier one. Also of ten turns, and of
simultaneous prompts that begin alike, from one owner, and from an owner each (owners share nothing).

    python contrib/benchmarks/prefix.py

A random Llama (hidden 512, 8 layers, float32) on two nodes of one thread each, no drafts. Prints JSON: medians over rounds, each
with a prompt of its own, and their ratio.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import operator
import os
import random
import statistics
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

from plain_decoding import PlainClient

from swarmnode.localswarm import LocalSwarm
from swarmnode.swarm.storage.swarmfile import load_swarm
from tests.gateway.speaking import VOCABULARY, save_speaking_llama

SIZES = {"hidden_size": 512, "intermediate_size": 1376, "num_attention_heads": 8, "num_key_value_heads": 8}
LAYERS, NEW_TOKENS, TURN_TOKENS = 8, 8, 16


async def first_token_s(
    client: PlainClient, prompt: list[int], owner: str = "benchmark"
) -> tuple[float, list[int], int]:
    """Return the seconds to the first token, the generated ids, and the number of prompt tokens that were cached."""
    stream = await client.stream(prompt, kept_for=owner, max_new_tokens=NEW_TOKENS)
    async for _ in stream:
        pass
    return stream.result.first_token_s, stream.result.ids, stream.result.cached_tokens


async def slowest_s(client: PlainClient, prefix: list[int], owners: list[str]) -> float:
    """Send prompts with this prefix at once, one for each of `owners`, and return the seconds to the latest first token."""
    told = await asyncio.gather(*(first_token_s(client, [*prefix, 7, 8 + end], one) for end, one in enumerate(owners)))
    return max(first_s for first_s, _, _ in told)


async def measure(local: LocalSwarm, options: argparse.Namespace) -> dict[str, Any]:
    """Measure prompts with known and new prefixes, simultaneous prompts, and ten turns."""
    dice = random.Random(0)
    client = await PlainClient.join(load_swarm(local.file), home=local.folder / "client", audit_share=0.0)
    firsts, seconds, turns = [], [], []
    shared, apart = [], []

    def drawn() -> list[int]:
        return [dice.randrange(5, VOCABULARY) for _ in range(options.prefix)]

    async with client:
        for _ in range(options.rounds + 1):  # the first to warm up
            prefix = drawn()
            first_s, _, _ = await first_token_s(client, [*prefix, 7, 8])
            second_s, _, cached = await first_token_s(client, [*prefix, 9, 10])
            assert cached == options.prefix, cached
            firsts.append(first_s)
            seconds.append(second_s)
            shared.append(await slowest_s(client, drawn(), ["benchmark"] * options.at_once))
            apart.append(await slowest_s(client, drawn(), [f"owner {one}" for one in range(options.at_once)]))
        said = drawn()
        for _ in range(10):
            turn_s, ids, _ = await first_token_s(client, said)
            turns.append(turn_s)
            said += [*ids, *(dice.randrange(5, VOCABULARY) for _ in range(TURN_TOKENS))]
    first_s, second_s, shared_s, apart_s = (statistics.median(one[1:]) for one in (firsts, seconds, shared, apart))
    return {
        "prefix_tokens": options.prefix,
        "first_ms": round(1e3 * first_s, 1),
        "second_ms": round(1e3 * second_s, 1),
        "ratio": round(second_s / first_s, 3),
        "at_once": options.at_once,
        "at_once_ms": round(1e3 * shared_s, 1),
        "at_once_apart_ms": round(1e3 * apart_s, 1),
        "at_once_to_first": round(statistics.median(map(operator.truediv, shared[1:], firsts[1:])), 3),
        "apart_to_first": round(statistics.median(map(operator.truediv, apart[1:], firsts[1:])), 3),
        "turns_ms": [round(1e3 * turn_s, 1) for turn_s in turns],
    }


def main(options: argparse.Namespace) -> None:
    """Serve a random model on two nodes, measure, and print the results."""
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder, "model")
        save_speaking_llama(model, layers=LAYERS, **SIZES)
        with LocalSwarm(Path(folder)) as local:
            local.create(model)
            local.bootstrap()
            for name, span in (("a", f"0:{LAYERS // 2}"), ("b", f"{LAYERS // 2}:{LAYERS + 2}")):
                local.node(name, "--span", span).wait_for("ready")
            print(json.dumps(asyncio.run(measure(local, options))))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prefix", type=int, default=2048)
    parser.add_argument("--at-once", type=int, default=4)
    main(parser.parse_args())
