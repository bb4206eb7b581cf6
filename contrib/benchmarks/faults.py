"""Pauses in a stream of tokens when a node in use dies, hangs or leaves: `python contrib/benchmarks/faults.py`.

Two stages with two replicas each, real processes on loopback, a tiny Llama, no drafts. Prints one JSON object: per fault the median
and worst pause in seconds (the longest wait for a token), and whether every text equalled the undisturbed one.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import psutil
import uvloop
from plain_decoding import joined

from swarmnode.demo import write_untaught
from swarmnode.localswarm import LocalSwarm, NodeProcess

SPANS = {"a1": "0:3", "a2": "0:3", "b1": "3:6", "b2": "3:6"}
PROMPT = list(range(5, 37))
TOKENS, AT = 96, 40


def kill(member: NodeProcess) -> None:
    member.kill(signal.SIGKILL)


def hang(member: NodeProcess) -> None:
    member.kill(signal.SIGSTOP)


def leave(member: NodeProcess) -> None:
    member.kill(signal.SIGINT)


def kill_p2pd(member: NodeProcess) -> None:
    for child in psutil.Process(member.pid).children():
        child.kill()


FAULTS: dict[str, tuple[Callable[[NodeProcess], None], tuple[int, ...]]] = {
    "none": (lambda _member: None, (0,)),
    "kill -9 of the first hop": (kill, (0,)),
    "kill -9 of the last hop": (kill, (1,)),
    "kill -9 of both hops": (kill, (0, 1)),
    "p2pd of the last hop killed": (kill_p2pd, (1,)),
    "SIGSTOP of the first hop": (hang, (0,)),
    "SIGSTOP of the last hop": (hang, (1,)),
    "the last hop leaves": (leave, (1,)),
}


async def strike(
    swarm: LocalSwarm, fault: Callable[[NodeProcess], None], hops: tuple[int, ...]
) -> tuple[float, list[int]]:
    """Generate with this fault in the middle. Returns the longest pause and the ids. Afterwards the
    struck nodes are killed, unless the fault is none."""
    client = await joined(swarm, len(SPANS))
    try:
        stream = await client.stream(PROMPT, max_new_tokens=TOKENS)
        number, struck = 0, []
        async for _ in stream:
            number += 1
            if number == AT:
                struck = [next(m for m in swarm.members if m.peer == stream.result.route[hop].peer) for hop in hops]
                for member in struck:
                    fault(member)
        if fault is not FAULTS["none"][0]:
            for member in struck:
                member.kill(signal.SIGCONT)
                member.kill()
                await asyncio.to_thread(member.process.wait)
        return stream.result.longest_stall_s, stream.result.ids
    finally:
        await client.close()


def heal(swarm: LocalSwarm) -> None:
    """Start every node again that is not running, and wait until all are ready."""
    swarm.members = [member for member in swarm.members if member.process.poll() is None]
    for name, span in SPANS.items():
        if all(member.name != name for member in swarm.members):
            swarm.node(name, "--span", span)
    for member in swarm.members:
        member.wait_for("ready" if member.name in SPANS else "joined")


async def measure(folder: Path, repeats: int) -> dict[str, Any]:
    await asyncio.to_thread(write_untaught, folder / "model", 4)
    report: dict[str, Any] = {}
    truth: list[int] = []
    with LocalSwarm(folder) as swarm:
        swarm.create(folder / "model")
        swarm.bootstrap()
        for name, (fault, hops) in FAULTS.items():
            pauses, same = [], True
            for _ in range(repeats):
                await asyncio.to_thread(heal, swarm)
                pause_s, ids = await strike(swarm, fault, hops)
                truth = truth or ids
                same = same and ids == truth
                pauses.append(pause_s)
            report[name] = {
                "median_s": round(statistics.median(pauses), 3),
                "worst_s": round(max(pauses), 3),
                "identical": same,
            }
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        print(json.dumps(uvloop.run(measure(Path(name), options.repeats)), indent=1))


if __name__ == "__main__":
    main()
