"""The demo, scene by scene: a swarm that chooses its spans, learns the Zen of Python by heart, loses a node in the middle of it,
and recites what it has learnt.

Each scene is a method.
"""

from __future__ import annotations

import asyncio
import itertools
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swarmnode.client.swarm_client import SwarmClient
from swarmnode.demo.lesson import (
    PROMPT,
    STEPS,
    TOKENS,
    TOKENS_A_STEP,
    found,
    generate_alone,
    import_all,
    memory_for_half,
    original,
    recipe,
    write_text,
)
from swarmnode.errors import LocalError
from swarmnode.localswarm import LocalSwarm, NodeProcess
from swarmnode.net.tasks import cancel_and_wait

if TYPE_CHECKING:
    from swarmnode.client.training.client import TrainingClient
    from swarmnode.compute.training.local import StepSummary
    from swarmnode.swarm.records.run import Run
    from swarmnode.swarm.storage.swarmfile import Swarm

NODES = 4
COVER_TIMEOUT_S = 60.0
STEP_TIMEOUT_S = 120.0
EXPORT_PATIENCE_S = 30.0


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


class Spectators:
    """Who watches the demo. This one sees nothing; the command line's draws."""

    def scene(self, text: str) -> None:
        """A new scene begins."""

    def swarm(self, status: dict[str, Any]) -> None:
        """The swarm as it is now."""

    def step(self, report: StepSummary, steps: int) -> None:
        """A step of the training is over, of so many."""

    def text(self, piece: str) -> None:
        """A piece of generated text."""

    def killed(self, name: str, span: list[int]) -> None:
        """A node has just been killed."""


class Lesson:
    """A `Listener` to the training that tells the spectators of each step, and at half of them does `half_way`."""

    def __init__(self, spectators: Spectators, steps: int, half_way: Callable[[], None]) -> None:
        self.reports: list[StepSummary] = []
        self.killed_at_step = steps // 2
        self._spectators = spectators
        self._steps = steps
        self._half_way = half_way

    def __repr__(self) -> str:
        return f"<Lesson of {len(self.reports)} of {self._steps} steps>"

    def begun(self, run: Run) -> None:
        """See `Listener`."""

    def step(self, report: StepSummary) -> None:
        """See `Listener`."""
        self.reports.append(report)
        self._spectators.step(report, self._steps)
        if report.step == self.killed_at_step:
            self._half_way()

    def waiting(self, why: str, missing: tuple[int, ...]) -> None:
        """See `Listener`."""

    async def follow(self, training: asyncio.Future[int]) -> None:
        """Wait for the training's end. Raises LocalError where a step takes too long."""
        try:
            while not training.done():
                done = len(self.reports)
                await asyncio.wait({training}, timeout=STEP_TIMEOUT_S)
                if not training.done() and len(self.reports) == done:
                    raise LocalError(f"no step {done} within {STEP_TIMEOUT_S:.0f} s")
            training.result()
        finally:
            await cancel_and_wait(training)

    def loss(self, reports: slice) -> float:
        """The mean of some steps."""
        return round(statistics.fmean(report.loss for report in self.reports[reports]), 3)


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
                swarm, nodes = await self._start(local, folder)
                async with await SwarmClient.join(swarm, home=folder / "client") as client:
                    spans = await self._watch_them_choose(client, nodes)
                    async with await _trainer(swarm, folder / "trainer") as trainer:
                        lesson, victim, training_s = await self._teach(trainer, nodes, folder / "text", spans)
                        text, tokens_per_s, ids = await self._complete(client)
                        identical = await self._compare(trainer, folder / "taught", ids)
                self._spectators.scene("Stopping everything")
                await asyncio.to_thread(local.stop)
            left = sum(member.process.poll() is None for member in local.members)
        reports = lesson.reports
        return DemoReport(
            nodes=len(nodes),
            spans=spans,
            steps=len(reports),
            first_loss=lesson.loss(slice(1)),
            last_loss=lesson.loss(slice(-10, None)),
            trained_tokens_per_s=round(len(reports) * TOKENS_A_STEP / training_s, 1),
            training_s=round(training_s, 1),
            killed=victim,
            killed_at_step=lesson.killed_at_step,
            stall_s=max(report.step_s for report in reports[lesson.killed_at_step :]),
            text=text,
            original=original(),
            tokens_per_s=round(tokens_per_s, 1),
            identical=identical,
            left_running=left,
            seconds=round(self._clock() - started_s, 1),
        )

    async def _start(self, local: LocalSwarm, folder: Path) -> tuple[Swarm, list[NodeProcess]]:
        """A swarm file, a bootstrap peer, and nodes that each lend memory for half of the model."""
        size = await asyncio.to_thread(write_text, folder / "text")
        self._spectators.scene(
            f"Founding a swarm that shall learn the Zen of Python by heart, {size} bytes, from random weights; "
            f"starting its bootstrap peer and {NODES} nodes on loopback"
        )
        await asyncio.to_thread(import_all)
        swarm = await asyncio.to_thread(found, local.file)
        await asyncio.to_thread(local.bootstrap)
        memory = f"{memory_for_half(swarm)}B"
        return swarm, [local.node(f"node-{number}", "--memory", memory) for number in range(1, NODES + 1)]

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
        self, trainer: TrainingClient, nodes: list[NodeProcess], text: Path, spans: dict[str, list[int]]
    ) -> tuple[Lesson, str, float]:
        """Train, and kill -9 a node that has a replica in the middle of it: how it went, who was killed, and the seconds."""
        self._spectators.scene(f"Training for {self._steps} steps; a node dies half-way")
        held = list(spans.values())
        victim = next(node for node in reversed(nodes) if held.count(spans[node.name]) > 1)

        def kill() -> None:
            victim.kill()
            self._spectators.killed(victim.name, spans[victim.name])

        began_s = self._clock()
        lesson = Lesson(self._spectators, self._steps, kill)
        training = trainer.train(text, recipe(self._steps), lesson, asyncio.Event())
        await lesson.follow(asyncio.ensure_future(training))
        return lesson, victim.name, self._clock() - began_s

    async def _complete(self, client: SwarmClient) -> tuple[str, float, list[int]]:
        """The swarm serves what it has learnt."""
        self._spectators.scene(f"The same swarm is given {PROMPT!r} and goes on")
        self._spectators.text(PROMPT)
        stream = await client.stream(PROMPT, max_new_tokens=TOKENS)
        async for piece in stream:
            self._spectators.text(piece.text or "")
        return PROMPT + (stream.result.text or ""), stream.result.tokens_per_s, stream.result.ids

    async def _compare(self, trainer: TrainingClient, out: Path, ids: list[int]) -> bool:
        """Whether a single process with the exported model writes the same."""
        self._spectators.scene("Exporting the model, and comparing with a single process that holds the whole of it")
        await trainer.export(out, force=False, patience_s=EXPORT_PATIENCE_S)
        alone = await asyncio.to_thread(generate_alone, out, list(PROMPT.encode()), TOKENS)
        return alone == ids


async def _trainer(swarm: Swarm, home: Path) -> TrainingClient:
    """Who brings the text. It is in this process, which has imported by now what it takes."""
    from swarmnode.client.training.client import TrainingClient

    return await TrainingClient.join(swarm, home)
