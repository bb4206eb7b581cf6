"""The demo, scene by scene: a swarm chooses its spans, learns the Zen of Python by heart, loses a node meanwhile, and
recites the poem.

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
    from swarmnode.data.rules import DataSummary
    from swarmnode.swarm.records.run import Run
    from swarmnode.swarm.storage.swarmfile import Swarm

NODES = 4
COVER_TIMEOUT_S = 60.0
STEP_TIMEOUT_S = 120.0
EXPORT_PATIENCE_S = 30.0


@dataclass(frozen=True)
class DemoReport:
    """The result of the demo; times in seconds. `text` is the swarm's text, `original` the expected one; `identical` tells
    whether the swarm generates the same ids as a single process."""

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
        """Number of correct characters before the first wrong one."""
        pairs = zip(self.text, self.original, strict=False)
        return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))

    @property
    def succeeded(self) -> bool:
        """Whether the loss fell by more than a fifth, a node was killed, the texts were identical and no process was left
        running."""
        learnt = self.last_loss < 0.8 * self.first_loss
        return learnt and bool(self.killed) and self.identical and self.left_running == 0

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON values for scripts."""
        return {**asdict(self), "recited": self.recited, "succeeded": self.succeeded}


class Spectators:
    """The audience of the demo. This base class shows nothing; the command line's subclass draws."""

    def scene(self, text: str) -> None:
        """Announce the next scene of the demonstration with `text`."""

    def swarm(self, status: dict[str, Any]) -> None:
        """Show the swarm's present `status`."""

    def step(self, report: StepSummary, steps: int) -> None:
        """Show a finished training step, out of `steps`."""

    def text(self, piece: str) -> None:
        """Show a piece of generated text."""

    def killed(self, name: str, span: list[int]) -> None:
        """Show that the node `name`, which held `span`, was just killed."""


class Lesson:
    """The training's `Listener` in the demo: it reports each step to the spectators, and calls `half_way` at the end of step
    `steps // 2`, counted from 0."""

    def __init__(self, spectators: Spectators, steps: int, half_way: Callable[[], None]) -> None:
        self.reports: list[StepSummary] = []
        self.killed_at_step = steps // 2
        self._spectators = spectators
        self._steps = steps
        self._half_way = half_way

    def __repr__(self) -> str:
        return f"<Lesson of {len(self.reports)} of {self._steps} steps>"

    def begun(self, run: Run, data: DataSummary) -> None:
        """Take the run's settings; the demo needs none of them."""

    def step(self, report: StepSummary) -> None:
        """Record a step, show it to the spectators, and call `half_way` after half of the steps."""
        self.reports.append(report)
        self._spectators.step(report, self._steps)
        if report.step == self.killed_at_step:
            self._half_way()

    def waiting(self, why: str, missing: tuple[int, ...]) -> None:
        """Ignore that the training waits."""

    async def follow(self, training: asyncio.Future[int]) -> None:
        """Wait for the training's end. Raises LocalError if no step ends within STEP_TIMEOUT_S."""
        try:
            while not training.done():
                done = len(self.reports)
                await asyncio.wait({training}, timeout=STEP_TIMEOUT_S)
                if not training.done() and len(self.reports) == done:
                    raise LocalError(f"no step {done} within {STEP_TIMEOUT_S:.0f} s; end other programs and try again")
            training.result()
        finally:
            await cancel_and_wait(training)

    def loss(self, reports: slice) -> float:
        """Return the mean loss of these reports."""
        return round(statistics.fmean(report.loss for report in self.reports[reports]), 3)


class Story:
    """Run of the demo in a folder of its own. Its processes end with it. The training takes `steps` steps."""

    def __init__(
        self, spectators: Spectators, *, steps: int = STEPS, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._spectators = spectators
        self._steps = steps
        self._clock = clock

    async def tell(self) -> DemoReport:
        """Play all scenes in order and return the report. Raises SwarmnodeError if a scene fails."""
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
        """Found the swarm; start a bootstrap peer, and nodes that each lend memory for half of the model."""
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
        """Train, and kill (SIGKILL) a replicated node half-way. Returns the lesson, the victim's name and the seconds that
        the training took."""
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
        """Generate from the prompt with the trained swarm. Returns the text, the tokens per second and the generated ids."""
        self._spectators.scene(f"The same swarm is given {PROMPT!r} and goes on")
        self._spectators.text(PROMPT)
        stream = await client.stream(PROMPT, max_new_tokens=TOKENS)
        async for piece in stream:
            self._spectators.text(piece.text or "")
        return PROMPT + (stream.result.text or ""), stream.result.tokens_per_s, stream.result.ids

    async def _compare(self, trainer: TrainingClient, out: Path, ids: list[int]) -> bool:
        """Export the model and return whether a single process generates the same ids from it."""
        self._spectators.scene("Exporting the model, and comparing with a single process that holds the whole of it")
        await trainer.export(out, force=False, patience_s=EXPORT_PATIENCE_S)
        alone = await asyncio.to_thread(generate_alone, out, list(PROMPT.encode()), TOKENS)
        return alone == ids


async def _trainer(swarm: Swarm, home: Path) -> TrainingClient:
    """Join the swarm as the trainer, in this process, which has already imported the modules that training needs."""
    from swarmnode.client.training.client import TrainingClient

    return await TrainingClient.join(swarm, home)
