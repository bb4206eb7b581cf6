"""Waits of users while nodes come and go: `chaos.py [--seconds 180] [--seed 1] [--pauses]`. Prints JSON.

Three stages with two replicas each, real processes on loopback, a tiny Llama; four clients generate without pause and drafts.
Every six seconds a node is killed -9, stopped for five seconds or asked to leave (SIGTERM), in turn. Lost nodes are started again.
Only nodes with a serving replica beside them are struck: whether a stage is left empty depends on the number of nodes.
The longest wait for a token, first ones included, should be at most 3 s, and no text another or missing.

With --pauses, meant for --seconds 300: two stages with two replicas each; every ten seconds a node pauses, or
goes on. Tokens but the first of each text should come at most twice as far apart in 99 of 100 cases as before the first pause.
The same in virtual time, for any seed: tests/serving/test_chaos.py.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import random
import signal
import statistics
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import uvloop
from plain_decoding import PlainClient

from swarmnode.demo import write_untaught
from swarmnode.errors import SwarmnodeError
from swarmnode.lending.control import running_nodes, tell_node
from swarmnode.localswarm import LocalSwarm, NodeProcess
from swarmnode.swarm.storage.swarmfile import load_swarm

SPANS = ("0:2", "2:4", "4:6")
REPLICAS = 2
CLIENTS = 4
TOKENS = 60
PAUSED_SPANS = ("0:3", "3:6")
FAULTS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "leave": signal.SIGTERM}
FAULT_EVERY_S = 6.0
STOPPED_S = 5.0
PAUSE_EVERY_S = 10.0
LONGEST_WAIT_S = 3.0
NOTHING = "nothing"  # of all faults
LEAST_GAPS = 100  # whose 99th percentile says something
SHOWN = 5  # of the longest waits


@dataclass(frozen=True)
class Wait:
    """Wait for one token: its length and its end (both in seconds, the end from the start), and the last fault before its
    end."""

    seconds: float
    ended_s: float
    first: bool
    after: str


@dataclass
class Report:
    """Faults of a run, and the texts and waits that users saw."""

    faults: list[str] = field(default_factory=list)
    texts: int = 0
    wrong: int = 0
    failed: list[str] = field(default_factory=list)
    waits: list[Wait] = field(default_factory=list)

    def between(self, *, calm: bool) -> list[float]:
        """Return the seconds between tokens of a text, before the first fault (`calm`) or since then."""
        return [wait.seconds for wait in self.waits if not wait.first and (wait.after == NOTHING) is calm]

    def to_json(self) -> dict[str, Any]:
        longest = sorted(self.waits, key=lambda wait: -wait.seconds)
        return {
            "faults": len(self.faults),
            "texts": self.texts,
            "wrong": self.wrong,
            "failed": self.failed,
            "p99_between_tokens_s": {"calm": p99_s(self.between(calm=True)), "later": p99_s(self.between(calm=False))},
            "longest_wait_s": round(longest[0].seconds, 2),
            "waits_beyond_the_floor": sum(wait.seconds > LONGEST_WAIT_S for wait in longest),
            "longest": [
                f"{wait.seconds:.2f} s until {wait.ended_s:.1f} s, {'first token' if wait.first else 'stall'}, after {wait.after}"
                for wait in longest[:SHOWN]
            ],
        }


def p99_s(seconds: list[float]) -> float | None:
    """Return the 99th percentile; None if there are fewer than `LEAST_GAPS` values."""
    return round(statistics.quantiles(seconds, n=100)[98], 4) if len(seconds) >= LEAST_GAPS else None


class Chaos:
    """Faults on a swarm of real processes, at fixed intervals."""

    def __init__(self, swarm: LocalSwarm, dice: random.Random) -> None:
        self.swarm = swarm
        self.report = Report()
        self.began_s = time.monotonic()
        self._dice = dice
        self._names = itertools.count()
        self._nodes: dict[NodeProcess, str] = {}  # and their spans; those that are to serve
        self._mending: set[asyncio.Task[None]] = set()

    @property
    def now_s(self) -> float:
        return time.monotonic() - self.began_s

    def start(self, span: str) -> NodeProcess:
        """Start another node without waiting for it."""
        node = self.swarm.node(f"n{next(self._names)}", "--span", span)
        self._nodes[node] = span
        return node

    async def run(self, seconds: float) -> None:
        """Strike a random node that has a replica at every interval until `seconds` are over, then wait until all are back."""
        for kind in itertools.cycle(FAULTS):
            await asyncio.sleep(FAULT_EVERY_S)
            if self.now_s >= seconds:
                break
            victims = [node for node in self._serving() if self._has_replica(node)]
            if victims:
                self._strike(self._dice.choice(victims), kind)
        await asyncio.gather(*self._mending)

    async def pause_in_turn(self, seconds: float) -> None:
        """Pause and resume the nodes in turn until `seconds` are over."""
        keeps = itertools.cycle(("disk", "memory"))
        for node, keep in zip(itertools.cycle(self._nodes), keeps, strict=False):
            await asyncio.sleep(PAUSE_EVERY_S)
            if self.now_s + PAUSE_EVERY_S >= seconds:
                break
            self.report.faults.append(f"pause of {node.name} at {self.now_s:.1f} s")
            await self._tell(node, "pause", keep=keep)
            await asyncio.sleep(PAUSE_EVERY_S)
            await self._tell(node, "resume")

    async def _tell(self, node: NodeProcess, command: str, **more: str) -> None:
        (path,) = running_nodes(node.home).values()
        answer = await asyncio.to_thread(tell_node, path, command, **more)
        assert answer is not None and "error" not in answer, answer

    def _serving(self) -> list[NodeProcess]:
        return [node for node in self._nodes if node.process.poll() is None and _has_told(node, "ready")]

    def _has_replica(self, node: NodeProcess) -> bool:
        return sum(self._nodes[other] == self._nodes[node] for other in self._serving()) > 1

    def _strike(self, victim: NodeProcess, kind: str) -> None:
        span = self._nodes[victim]
        self.report.faults.append(f"{kind} of {span} at {self.now_s:.1f} s")
        victim.kill(FAULTS[kind])
        if kind == "stop":
            asyncio.get_running_loop().call_later(STOPPED_S, victim.kill, signal.SIGCONT)
            return
        del self._nodes[victim]
        self._mending.add(asyncio.ensure_future(self._replace(span)))

    async def _replace(self, span: str) -> None:
        await asyncio.to_thread(self.start(span).wait_for, "ready")

    async def generate(self, client: PlainClient, prompt: list[int], truth: list[int], seconds: float) -> None:
        """Generate one text after the other and compare each with `truth`, until `seconds` are over."""
        while self.now_s < seconds:
            waited_from_s = self.now_s
            try:
                stream = await client.stream(prompt, max_new_tokens=TOKENS)
                async for _ in stream:
                    first = len(stream.result.ids) == 1
                    after = self.report.faults[-1] if self.report.faults else NOTHING
                    self.report.waits.append(Wait(self.now_s - waited_from_s, self.now_s, first, after))
                    waited_from_s = self.now_s
            except SwarmnodeError as error:
                self.report.failed.append(f"at {self.now_s:.1f} s: {error}")
                continue
            self.report.texts += 1
            self.report.wrong += stream.result.ids != truth


def _has_told(node: NodeProcess, event: str) -> bool:
    return any(told.get("event") == event for told in node.seen)


async def measure(folder: Path, seconds: float, seed: int, *, pauses: bool) -> dict[str, Any]:
    """Run the swarm, its clients and the faults for `seconds`, and return the report."""
    await asyncio.to_thread(write_untaught, folder / "model", 4)
    with LocalSwarm(folder / "swarm") as swarm:
        swarm.folder.mkdir()
        swarm.create(folder / "model")
        swarm.bootstrap()
        chaos = Chaos(swarm, random.Random(seed))
        for node in [chaos.start(span) for span in (PAUSED_SPANS if pauses else SPANS) for _ in range(REPLICAS)]:
            await asyncio.to_thread(node.wait_for, "ready")
        clients = [
            await PlainClient.join(load_swarm(swarm.file), home=folder / f"client-{number}")
            for number in range(CLIENTS)
        ]
        try:
            prompts = [[number + 5, 17, 7, 31] for number in range(CLIENTS)]
            truths = [(await clients[0].generate(prompt, max_new_tokens=TOKENS)).ids for prompt in prompts]
            chaos.began_s = time.monotonic()
            everybody = zip(clients, prompts, truths, strict=True)
            striking = chaos.pause_in_turn(seconds) if pauses else chaos.run(seconds)
            await asyncio.gather(striking, *(chaos.generate(*one, seconds) for one in everybody))
        finally:
            await asyncio.gather(*(client.close() for client in clients))
    return chaos.report.to_json()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=180.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--pauses", action="store_true", help="Pause nodes in turn instead.")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="swarmnode-chaos-") as name:
        print(
            json.dumps(uvloop.run(measure(Path(name), options.seconds, options.seed, pauses=options.pauses)), indent=1)
        )


if __name__ == "__main__":
    main()
