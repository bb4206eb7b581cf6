"""The demo, scene by scene: a swarm that chooses its spans, learns the Zen of Python by heart, loses a node in the middle of it,
and recites what it has learnt.

Each scene is a method.
"""

from __future__ import annotations

import asyncio
import itertools
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from swarmnode.client.swarm_client import SwarmClient
from swarmnode.demo.lesson import SEQUENCE, generate_alone, import_all, poem, write_config, write_text
from swarmnode.errors import LocalError
from swarmnode.localswarm import LocalSwarm, NodeProcess
from swarmnode.swarm.storage.swarmfile import load_swarm

NODES = 4
PROMPT = "Beautiful is better"
TOKENS = 76  # three lines
STEPS = 130
LEARNING_RATE = 4e-3  # twice as much learns no text by heart in so few steps, half as much learns less of it
BATCH = 16
MICROBATCH = 4
COVER_TIMEOUT_S = 60.0
STEP_TIMEOUT_S = 120.0
WARMUP_STEPS = 10


@dataclass(frozen=True)
class DemoReport:
    """What happened; times in seconds. `text` is what the swarm recites, `original` what it was to recite; `identical` compares the
    swarm's text with a single process's."""

    nodes: int
    spans: dict[str, list[int]]
    steps: int
    first_loss: float
    last_loss: float
    trained_tokens_per_s: float
    training_s: float
    killed: str
    killed_at_step: int
    stall_s: float
    text: str
    original: str
    tokens_per_s: float
    identical: bool
    left_running: int
    seconds: float

    @property
    def recited(self) -> int:
        """How many characters are right, up to the first that is not."""
        pairs = zip(self.text, self.original, strict=False)
        return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))

    @property
    def succeeded(self) -> bool:
        """Whether all of it happened as it should."""
        learnt = self.last_loss < 0.8 * self.first_loss
        return learnt and bool(self.killed) and self.identical and self.left_running == 0

    def to_json(self) -> dict[str, Any]:
        """For scripts."""
        return {**asdict(self), "recited": self.recited, "succeeded": self.succeeded}


@dataclass(frozen=True)
class Lesson:
    """How the training went: its steps as the trainer told them, and who was killed when."""

    lines: list[dict[str, Any]]
    killed: str
    killed_at_step: int
    seconds: float

    def tail(self, lines: list[dict[str, Any]]) -> float:
        """The mean loss of some steps."""
        return sum(line["loss"] for line in lines) / len(lines)


class Spectators:
    """Who watches the demo. This one sees nothing; the command line's draws."""

    def scene(self, text: str) -> None:
        """A new scene begins."""

    def swarm(self, status: dict[str, Any]) -> None:
        """The swarm as it is now."""

    def step(self, line: dict[str, Any], steps: int) -> None:
        """A step of the training is over, of so many."""

    def text(self, piece: str) -> None:
        """A piece of generated text."""

    def killed(self, name: str, span: list[int]) -> None:
        """A node has just been killed."""


class Story:
    """One run of the demo in a folder of its own, with processes that end with it. `steps` is how long it trains."""

    def __init__(
        self, spectators: Spectators, *, steps: int = STEPS, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._spectators = spectators
        self._steps = steps
        self._clock = clock

    async def tell(self) -> DemoReport:
        """All scenes in order. Raises SwarmnodeError where one cannot be played."""
        started_s = self._clock()
        with tempfile.TemporaryDirectory(prefix="swarmnode-demo-") as name:
            folder = Path(name)
            with LocalSwarm(folder) as local:
                nodes = await self._start(local, folder)
                client = await SwarmClient.join(load_swarm(local.file), home=folder / "client")
                try:
                    spans = await self._watch_them_choose(client, nodes)
                    lesson = await self._teach(local, nodes, folder / "text", spans)
                    text, tokens_per_s, ids = await self._complete(client)
                finally:
                    await client.close()
                identical = await self._compare(local, folder / "taught", ids)
                self._spectators.scene("Stopping everything")
                await asyncio.to_thread(local.stop)
            left = sum(member.process.poll() is None for member in local.members)
        return DemoReport(
            nodes=len(nodes),
            spans=spans,
            steps=len(lesson.lines),
            first_loss=round(lesson.tail(lesson.lines[:1]), 3),
            last_loss=round(lesson.tail(lesson.lines[-10:]), 3),
            trained_tokens_per_s=round(len(lesson.lines) * BATCH * SEQUENCE / lesson.seconds, 1),
            training_s=round(lesson.seconds, 1),
            killed=lesson.killed,
            killed_at_step=lesson.killed_at_step,
            stall_s=max(line["step_s"] for line in lesson.lines[lesson.killed_at_step :]),
            text=text,
            original=original(),
            tokens_per_s=round(tokens_per_s, 1),
            identical=identical,
            left_running=left,
            seconds=round(self._clock() - started_s, 1),
        )

    async def _start(self, local: LocalSwarm, folder: Path) -> list[NodeProcess]:
        """A swarm file, a bootstrap peer, and nodes that each lend memory for half of the model."""
        size = await asyncio.to_thread(write_text, folder / "text")
        write_config(folder / "config")
        self._spectators.scene(
            f"Founding a swarm that shall learn the Zen of Python by heart, {size} bytes, from random weights; "
            f"starting its bootstrap peer and {NODES} nodes on loopback"
        )
        arguments = ["create", str(local.file.with_suffix("")), "--mode", "train", "--config", str(folder / "config")]
        importing = asyncio.to_thread(import_all)
        await asyncio.gather(asyncio.to_thread(local.command, *arguments), importing)
        await asyncio.to_thread(local.bootstrap)
        memory = await asyncio.to_thread(memory_for_half, local.file)
        return [local.node(f"node-{number}", "--memory", f"{memory}B") for number in range(1, NODES + 1)]

    async def _watch_them_choose(self, client: SwarmClient, nodes: list[NodeProcess]) -> dict[str, list[int]]:
        self._spectators.scene("The nodes look around and choose their spans")

        async def until_ready() -> None:
            while True:
                status = client.status()
                self._spectators.swarm(status)
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

    async def _teach(
        self, local: LocalSwarm, nodes: list[NodeProcess], text: Path, spans: dict[str, list[int]]
    ) -> Lesson:
        """Train, and kill -9 a node that has a replica in the middle of it."""
        self._spectators.scene(f"Training for {self._steps} steps; a node dies half-way")
        settings = {
            "data": text, "steps": self._steps, "batch": BATCH, "microbatch": MICROBATCH, "sequence": SEQUENCE, "lr": LEARNING_RATE,
            "warmup": WARMUP_STEPS, "checkpoint-steps": max(10, self._steps // 4),
        }  # fmt: skip
        began_s = self._clock()
        trainer = local.trainer(
            "trainer", *(word for name, value in settings.items() for word in (f"--{name}", str(value)))
        )
        held = list(spans.values())
        victim = next(node for node in reversed(nodes) if held.count(spans[node.name]) > 1)
        lines: list[dict[str, Any]] = []
        while len(lines) < self._steps:
            number = len(lines)
            line = await asyncio.to_thread(_wait_for_step, trainer, number)
            lines.append(line)
            self._spectators.step(line, self._steps)
            if number == self._steps // 2:
                victim.kill()
                self._spectators.killed(victim.name, spans[victim.name])
        return Lesson(lines, victim.name, self._steps // 2, self._clock() - began_s)

    async def _complete(self, client: SwarmClient) -> tuple[str, float, list[int]]:
        """The swarm serves what it has learnt."""
        self._spectators.scene(f"The same swarm is given {PROMPT!r} and goes on")
        self._spectators.text(PROMPT)
        stream = await client.stream(PROMPT, max_new_tokens=TOKENS)
        async for piece in stream:
            self._spectators.text(piece.text or "")
        return PROMPT + (stream.result.text or ""), stream.result.tokens_per_s, stream.result.ids

    async def _compare(self, local: LocalSwarm, out: Path, ids: list[int]) -> bool:
        """Whether a single process with the exported model writes the same."""
        self._spectators.scene("Exporting the model, and comparing with a single process that holds the whole of it")
        await asyncio.to_thread(local.command, "export", str(local.file), str(out))
        alone = await asyncio.to_thread(generate_alone, out, list(PROMPT.encode()), TOKENS)
        return alone == ids


def original() -> str:
    """What the swarm recites if it has learnt all of it."""
    text = poem()
    start = text.index(PROMPT)
    return text[start : start + len(PROMPT) + TOKENS]


def _wait_for_step(trainer: NodeProcess, number: int) -> dict[str, Any]:
    return trainer.wait_until(lambda line: line.get("step") == number, f"step {number}", STEP_TIMEOUT_S)


def memory_for_half(swarm: Path) -> int:
    """Bytes to lend for about half of the model's units: two stages with two replicas come about."""
    from swarmnode.compute.memory import limit_bytes_for, training_sizes
    from swarmnode.compute.model.checkpoint import Checkpoint

    folder = load_swarm(swarm).checkpoint
    assert folder is not None
    sizes = training_sizes(Checkpoint(folder))
    half = len(sizes.weight_bytes) // 2
    return limit_bytes_for(max(sizes.need_bytes(start, start + half, 0) for start in range(half + 1)))
