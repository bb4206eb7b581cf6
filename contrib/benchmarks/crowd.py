"""Many nodes of a tiny model, started together on one machine: seconds until a client sees all, and cost of idling. Prints JSON.

    python contrib/benchmarks/crowd.py [--nodes 24] [--idle 60]

`converged_s` counts from the first start until a client sees all of them ready; CPU seconds are per node, of its Python and of its
p2pd apart, so that they hold on a busy machine, too. Idle ones are per cent of a core, after a minute of rest.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import uvloop
from plain_decoding import PlainClient

from swarmnode.localswarm import LocalSwarm, NodeProcess
from swarmnode.swarm.storage.swarmfile import load_swarm

REST_S = 60.0
PATIENCE_S = 600.0


def make_model(folder: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)


def cpu_s(members: Sequence[NodeProcess]) -> dict[str, list[float]]:
    """Return the CPU seconds that each member's Python and p2pd have used since they started."""
    spent: dict[str, list[float]] = {"python": [], "p2pd": []}
    for member in members:
        process = psutil.Process(member.pid)
        spent["python"].append(sum(process.cpu_times()[:2]))
        spent["p2pd"].append(sum(sum(child.cpu_times()[:2]) for child in process.children()))
    return spent


def medians(values: dict[str, list[float]], factor: float = 1.0) -> dict[str, float]:
    return {name: round(statistics.median(each) * factor, 3) for name, each in values.items()}


def ready(client: PlainClient) -> int:
    return sum(peer["state"] == "ready" and peer["span"][1] > 0 for peer in client.status()["peers"])


async def converge(client: PlainClient, swarm: LocalSwarm, nodes: int) -> tuple[list[NodeProcess], float]:
    """Start them all at once; (the members, seconds until all are seen ready)."""
    invite = load_swarm(swarm.file).invite
    began_s = time.perf_counter()
    members = [await asyncio.to_thread(swarm.node, f"n{number}", swarm=invite) for number in range(nodes)]
    while ready(client) < nodes:
        await asyncio.wait_for(client.changed(), PATIENCE_S)
    return members, time.perf_counter() - began_s


async def measure(folder: Path, nodes: int, idle_s: float) -> dict[str, Any]:
    make_model(folder / "model")
    with LocalSwarm(folder) as swarm:
        swarm.create(folder / "model")
        swarm.bootstrap()
        client = await PlainClient.join(load_swarm(swarm.file), home=folder / "client")
        members, converged_s = await converge(client, swarm, nodes)
        started = cpu_s(members)
        await client.close()
        await asyncio.sleep(REST_S)
        before, began_s = cpu_s(members), time.perf_counter()
        await asyncio.sleep(idle_s)
        after, seconds = cpu_s(members), time.perf_counter() - began_s
        idle = {name: [b - a for a, b in zip(before[name], after[name], strict=True)] for name in before}
        both = {"both": [sum(pair) for pair in zip(*idle.values(), strict=True)]}
    return {
        "nodes": nodes,
        "converged_s": round(converged_s, 1),
        "start_cpu_s_per_node": medians(started),
        "idle_cpu_percent_per_node": medians(idle | both, 100 / seconds),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=24)
    parser.add_argument("--idle", type=float, default=60.0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        print(json.dumps(uvloop.run(measure(Path(name), options.nodes, options.idle)), indent=1))


if __name__ == "__main__":
    main()
