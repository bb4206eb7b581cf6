"""The demo, scene by scene: a swarm chooses its spans, learns the Zen of Python by heart, loses a node meanwhile, and
recites the poem.

Each scene is a method.

The demo's lesson: a small byte-level Llama with random weights, and the Zen of Python, which every Python contains, as
its text.
"""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import importlib
import io
import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swarmnode.client.swarm_client import SwarmClient
from swarmnode.errors import LocalError
from swarmnode.localswarm import LocalSwarm, NodeProcess
from swarmnode.net.tasks import cancel_and_wait

if TYPE_CHECKING:
    from swarmnode.client.training.client import TrainingClient
    from swarmnode.compute.training.local import StepSummary
    from swarmnode.data.samples import DataSummary
    from swarmnode.swarm.records.run import Run
    from swarmnode.swarm.storage.swarmfile import Swarm


BYTES = 256
LAYERS, HIDDEN, SEQUENCE = 2, 128, 128
COPIES = 256  # one after another, so that samples begin anywhere in the poem
PROMPT = "Beautiful is better"
TOKENS = 76  # three lines
STEPS = 130
BATCH, MICROBATCH = 16, 4
TOKENS_A_STEP = BATCH * SEQUENCE
LEARNING_RATE = 4e-3  # at twice the rate the text is not learnt in this many steps, at half the rate less of it is
WARMUP_STEPS = 10
IMPORTED = (
    "swarmnode.founding.model_source",
    "swarmnode.client.training.client",
    "swarmnode.compute.capacity.capacity",
    "transformers.models.llama.modeling_llama",
)


def poem() -> str:
    """Return the Zen of Python, by Tim Peters (PEP 20)."""
    with contextlib.redirect_stdout(io.StringIO()):  # the module prints the poem when it is imported
        import this
    return codecs.decode(this.s, "rot13") + "\n"


def original() -> str:
    """Return the text that the swarm recites if it has learnt all of it."""
    text = poem()
    start = text.index(PROMPT)
    return text[start : start + len(PROMPT) + TOKENS]


def write_text(path: Path) -> int:
    """Write the lesson's text, COPIES copies of the poem, to `path`. Returns the bytes of one copy."""
    text = poem().encode()
    path.write_bytes(text * COPIES)
    return len(text)


def write_config(folder: Path, layers: int = LAYERS) -> None:
    """Write the transformers config of the model that learns the poem, with `layers` layers, into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    values = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": BYTES,
        "hidden_size": HIDDEN,
        "intermediate_size": 3 * HIDDEN,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": 4 * SEQUENCE,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        "tie_word_embeddings": False,
    }
    (folder / "config.json").write_text(json.dumps(values))


def write_untaught(folder: Path, layers: int) -> None:
    """Write a checkpoint of the lesson's model with `layers` layers and random weights into `folder`."""
    from swarmnode.compute.model.fresh import write_fresh_model

    write_config(folder, layers)
    write_fresh_model(folder, folder, 0)


def import_all() -> None:
    """Import the modules for founding, training, measuring a model and generating with transformers."""
    for module in IMPORTED:
        importlib.import_module(module)


def create_lesson_swarm(file: Path) -> Swarm:
    """Found a swarm that trains the lesson's model from random weights. Its .swarm file is `file`; the config and weights
    lie beside it."""
    from swarmnode.founding.model_source import from_config
    from swarmnode.founding.swarm_creation import Bootstraps, create_swarm
    from swarmnode.swarm.records.manifest import TRAIN
    from swarmnode.swarm.storage.swarmfile import save_swarm

    write_config(file.with_name("config"))
    source = from_config(file.with_name("config"), file.with_name("weights"))
    swarm = create_swarm(file.stem, source, Bootstraps(), mode=TRAIN)
    save_swarm(swarm, file)
    return swarm


def memory_for_half(swarm: Swarm) -> int:
    """Return the bytes of memory to lend for about half of the model's units, so that two stages with two replicas each form."""
    from swarmnode.compute.capacity.capacity import limit_bytes_for, training_sizes
    from swarmnode.compute.model.checkpoint import Checkpoint

    assert swarm.checkpoint is not None
    sizes = training_sizes(Checkpoint(swarm.checkpoint))
    half = len(sizes.weight_bytes) // 2
    return limit_bytes_for(max(sizes.need_bytes(start, start + half, 0) for start in range(half + 1)))


def recipe(steps: int) -> Run:
    """Return the training run of the lesson, with `steps` steps."""
    from swarmnode.client.training.preparation import NO_DATA
    from swarmnode.swarm.records.run import Run

    return Run(
        data=NO_DATA,
        steps=steps,
        batch=BATCH,
        microbatch=MICROBATCH,
        sequence=SEQUENCE,
        learning_rate=LEARNING_RATE,
        warmup_steps=WARMUP_STEPS,
        checkpoint_steps=max(10, steps // 4),
    )


def generate_alone(folder: Path, prompt: list[int], max_new_tokens: int) -> list[int]:
    """Generate greedily with transformers and the whole checkpoint in this process: the reference for the swarm's text."""
    import torch
    from transformers.models.auto.modeling_auto import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        output = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_new_tokens, do_sample=False
        )
    return list(output[0, len(prompt) :].tolist())


NODES = 4
COVER_TIMEOUT_S = 300.0
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
                        raise LocalError(
                            f"the nodes did not cover the model within {COVER_TIMEOUT_S:.0f} s. {logs}"
                        ) from None
                    spans = {peer["name"]: peer["span"] for peer in client.status()["peers"] if peer["span"][1]}
                    async with await _trainer(swarm, folder / "trainer") as trainer:
                        lesson, victim, training_s = await self._teach(trainer, nodes, folder / "text", spans)
                        # Generate from the prompt with the trained swarm
                        self._spectators.scene(f"The same swarm is given {PROMPT!r} and goes on")
                        self._spectators.text(PROMPT)
                        stream = await client.stream(PROMPT, max_new_tokens=TOKENS)
                        async for piece in stream:
                            self._spectators.text(piece.text or "")
                        result, out = stream.result, folder / "taught"
                        # Export the model, and compare what a single process generates from it
                        self._spectators.scene(
                            "Exporting the model, and comparing with a single process that holds the whole of it"
                        )
                        await trainer.export(out, force=False, patience_s=EXPORT_PATIENCE_S)
                        alone = await asyncio.to_thread(generate_alone, out, list(PROMPT.encode()), TOKENS)
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
            text=PROMPT + (result.text or ""),
            original=original(),
            tokens_per_s=round(result.tokens_per_s, 1),
            identical=alone == result.ids,
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
        swarm = await asyncio.to_thread(create_lesson_swarm, local.file)
        await asyncio.to_thread(local.bootstrap)
        memory = f"{memory_for_half(swarm)}B"
        return swarm, [local.node(f"node-{number}", "--memory", memory) for number in range(1, NODES + 1)]

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


async def _trainer(swarm: Swarm, home: Path) -> TrainingClient:
    """Join the swarm as the trainer, in this process, which has already imported the modules that training needs."""
    from swarmnode.client.training.client import TrainingClient

    return await TrainingClient.join(swarm, home)
