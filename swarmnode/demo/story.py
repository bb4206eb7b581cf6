"""The demo, scene by scene: a model, a swarm that chooses its spans, text, a death in the middle of it, the same text.

Each scene is a method. A later one trains the model on real text before it is served.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from swarmnode.client import SwarmClient, TextStream
from swarmnode.demo.checkpoint import generate_alone, make_checkpoint
from swarmnode.errors import LocalError
from swarmnode.localswarm import LocalSwarm, Member
from swarmnode.swarm.swarmfile import load_swarm

NODES = 4
PROMPT = "def main ( self ) :"
TOKENS = 96
KILL_AT = 32
COVER_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class DemoReport:
    """What happened. `identical` compares the swarm's text with a single process's; times in seconds."""

    nodes: int
    spans: dict[str, list[int]]
    tokens: int
    tokens_per_s: float
    first_token_s: float
    killed: str
    reroutes: int
    stall_s: float
    identical: bool
    left_running: int
    text: str
    seconds: float

    @property
    def succeeded(self) -> bool:
        """Whether all of it happened as it should."""
        return self.identical and self.reroutes >= 1 and self.tokens == TOKENS and self.left_running == 0

    def to_json(self) -> dict[str, Any]:
        """For scripts."""
        return {**asdict(self), "succeeded": self.succeeded}


class Audience:
    """Who watches the demo. This one sees nothing; the command line's draws."""

    def scene(self, text: str) -> None:
        """A new scene begins."""

    def swarm(self, status: dict[str, Any]) -> None:
        """The swarm as it is now."""

    def text(self, piece: str) -> None:
        """A piece of generated text."""

    def killed(self, name: str, span: list[int]) -> None:
        """A node has just been killed."""


class Story:
    """One run of the demo in a folder of its own, with processes that end with it."""

    def __init__(self, audience: Audience, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._audience = audience
        self._clock = clock

    async def tell(self) -> DemoReport:
        """All scenes in order. Raises SwarmnodeError where one cannot be played."""
        started_s = self._clock()
        with tempfile.TemporaryDirectory(prefix="swarmnode-demo-") as name:
            folder = Path(name)
            self._audience.scene("Making a small Llama checkpoint (random weights, no download)")
            await asyncio.to_thread(make_checkpoint, folder / "model")
            with LocalSwarm(folder) as local:
                nodes = await self._start(local, folder / "model")
                client = await SwarmClient.join(load_swarm(local.file), home=folder / "client")
                try:
                    spans = await self._watch_them_choose(client, nodes)
                    stream, killed = await self._generate(client, nodes)
                finally:
                    await client.close()
                self._audience.scene("Comparing with a single process that holds the whole model")
                result = stream.result
                alone = await asyncio.to_thread(generate_alone, folder / "model", stream.prompt, TOKENS)
                self._audience.scene("Stopping everything")
                await asyncio.to_thread(local.stop)
            left = sum(member.process.poll() is None for member in local.members)
        return DemoReport(
            nodes=len(nodes),
            spans=spans,
            tokens=len(result.ids),
            tokens_per_s=round(result.tokens_per_s, 1),
            first_token_s=round(result.first_token_s, 3),
            killed=killed,
            reroutes=result.reroutes,
            stall_s=round(result.longest_stall_s, 3),
            identical=result.ids == alone,
            left_running=left,
            text=result.text or "",
            seconds=round(self._clock() - started_s, 1),
        )

    async def _start(self, local: LocalSwarm, model: Path) -> list[Member]:
        """A swarm file, a bootstrap peer, and nodes that each lend memory for half of the model."""
        self._audience.scene(f"Founding a swarm, starting its bootstrap peer and {NODES} nodes on loopback")
        await asyncio.to_thread(local.create, model)
        await asyncio.to_thread(local.bootstrap)
        memory = await asyncio.to_thread(memory_for_half, model)
        return [local.node(f"node-{number}", "--memory", str(memory)) for number in range(1, NODES + 1)]

    async def _watch_them_choose(self, client: SwarmClient, nodes: list[Member]) -> dict[str, list[int]]:
        self._audience.scene("The nodes look around and choose their spans")

        async def until_ready() -> None:
            while True:
                status = client.status()
                self._audience.swarm(status)
                ready = [peer for peer in status["peers"] if peer["state"] == "ready" and peer["span"][1]]
                if status["covered"] and len(ready) == NODES:
                    return
                await client.changed()

        try:
            await asyncio.wait_for(until_ready(), COVER_TIMEOUT_S)
        except asyncio.TimeoutError:
            logs = "; ".join(f"{node.name}: {node.tail(200)}" for node in nodes)
            raise LocalError(f"the nodes did not cover the model within {COVER_TIMEOUT_S:.0f} s. {logs}") from None
        return {peer["name"]: peer["span"] for peer in client.status()["peers"] if peer["span"][1]}

    async def _generate(self, client: SwarmClient, nodes: list[Member]) -> tuple[TextStream, str]:
        """Stream text, and kill -9 the node that serves the last stage in the middle of it."""
        self._audience.scene(f"Generating {TOKENS} tokens; a node in use dies at token {KILL_AT}")
        stream = await client.stream(PROMPT, max_new_tokens=TOKENS)
        killed = ""
        number = 0
        async for piece in stream:
            number += 1
            self._audience.text(piece.text or f"{piece.id} ")
            if number == KILL_AT:
                victim = stream.result.route[-1]
                member = next(node for node in nodes if node.peer == victim.peer)
                member.kill()
                killed = member.name
                self._audience.killed(killed, [victim.start, victim.end])
        return stream, killed


def memory_for_half(model: Path) -> int:
    """Bytes to lend for about half of the model's units and some cache: two stages with two replicas come about."""
    from swarmnode.compute.checkpoint import Checkpoint
    from swarmnode.compute.memory import limit_bytes_for, unit_sizes
    from swarmnode.config import StageConfig

    checkpoint = Checkpoint(model)
    sizes = unit_sizes(checkpoint, dtype=checkpoint.dtype)
    half = len(sizes.weight_bytes) // 2
    need_bytes = max(sizes.need_bytes(start, start + half, StageConfig.cache_tokens) for start in range(half + 1))
    return limit_bytes_for(need_bytes)
