"""Post: a volunteer's place in a training swarm. It trains its units, conducts when it is its turn, and serves what is trained."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from swarmnode.compute.checkpoint import Checkpoint
from swarmnode.compute.executor import Executor, Urgency
from swarmnode.compute.graph.checkpoint import GraphCheckpoint
from swarmnode.compute.graph.estimate import UnitEstimate, estimate_units
from swarmnode.compute.graph.segment import load_segment as load_graph_segment
from swarmnode.compute.graph.span_estimate import estimate_span
from swarmnode.compute.speed import Speeds, measure_training
from swarmnode.compute.training.lm import SpanSegment, load_segment, load_twin
from swarmnode.compute.training.segment import Segment
from swarmnode.metrics import table
from swarmnode.metrics.metric import Reading, Readings
from swarmnode.net.interfaces import PeerId
from swarmnode.plan.compression import Choice
from swarmnode.plan.view import Span
from swarmnode.presence import Presence
from swarmnode.roles.capability import Capability, SpeedCache
from swarmnode.roles.meters import TRAIN
from swarmnode.roles.stage import SPEEDS_FILE, Hardware, Stage
from swarmnode.roles.training.compressor import Compressor
from swarmnode.roles.training.crew import Crew
from swarmnode.roles.training.keeper import Keeper
from swarmnode.roles.training.memory import TrainingMemory
from swarmnode.roles.training.stage import TrainingStage
from swarmnode.swarm.announcement import MAX_RTTS, peer_digest
from swarmnode.swarm.run import Run

log = logging.getLogger(__name__)


class Post:
    """The training twin of `Stage`: made by `load`, ended by `close`. Modules that are no language models are not served."""

    def __init__(
        self, training: TrainingStage, crew: Crew, keeper: Keeper, serving: Stage | None, capability: Capability
    ) -> None:
        self._training = training
        self._capability = capability
        self._crew = crew
        self._keeper = keeper
        self._serving = serving

    def __repr__(self) -> str:
        return f"<Post {self._training!r}, {self._crew!r}>"

    @classmethod
    async def load(
        cls, presence: Presence, checkpoint: Checkpoint, hardware: Hardware, units: Span, executor: Executor
    ) -> Post:
        """Load units whose weights are here, and train them as the swarm asks. Raises CheckpointError, LocalError."""
        segment = await asyncio.to_thread(load, checkpoint, units, hardware)
        serving = None
        if isinstance(segment, SpanSegment):
            twin = await asyncio.to_thread(load_twin, checkpoint, segment)
            serving = await Stage.serve(presence, twin, hardware, executor)
        folder = presence.config.home / "training" / presence.swarm.id.hex()[:16]
        keeper = Keeper(presence.network, presence.hello, presence.link_config, folder)
        assert presence.swarm.manifest is not None
        training = TrainingStage(
            presence.network,
            presence.hello,
            presence.link_config,
            segment,
            keeper,
            executor,
            compressor=Compressor(hardware.config.compress, presence.swarm.manifest.codecs),
            memory=TrainingMemory(hardware.ledger, segment, functools.partial(estimates, checkpoint)),
        )
        cache = SpeedCache(presence.config.home / SPEEDS_FILE)
        conditions = replace(hardware.conditions(presence.swarm.id, units.units), number_format="training")
        capability = await executor.call(
            Urgency.CONTROL, lambda: Capability.of(conditions, cache, lambda: measure(segment))
        )
        crew = Crew(presence.directory, training, checkpoint.units)
        await training.start()
        crew.start()
        return cls(training, crew, keeper, serving, capability)

    @property
    def bound(self) -> bool:
        """Whether these units hold something that others may not have: a training has begun."""
        return self._training.step > 0

    def figures(self) -> Mapping[str, Any]:
        """What the announcement says of this stage."""
        self._compare_with_real_work()
        own = {"training_step": self._training.step, "sends": self._sends(), **self._capability.figures()}
        return own if self._serving is None else {**self._serving.figures(), **own}

    def _compare_with_real_work(self) -> None:
        unit_s, run = self._training.pace.unit_s, self._training.run
        if unit_s and run is not None:
            self._capability.note("training_units_per_s", unit_s / (run.microbatch * max(1, run.sequence)))

    def readings(self) -> Readings:
        """What Prometheus may know of this stage."""
        training, span = self._training, self._training.meter.label
        norm, loss = training.last
        yield Reading(table.TRAINING_STEP, training.step, (span,))
        if training.step:
            yield Reading(table.TRAINING_LOSS, loss, (span,))
            yield Reading(table.TRAINING_NORM, norm, (span,))
        links = Counter((choice.codec, direction) for (_, direction), choice in training.compressor.choices.items())
        for (codec, direction), count in links.items():
            yield Reading(table.CODEC_LINKS, count, (span, codec.name.lower(), direction))
        yield Reading(table.QUEUE, training.bench.queued, (span, TRAIN))
        yield from training.meter.readings()
        if self._serving is not None:
            yield from self._serving.readings()

    def _sends(self) -> dict[bytes, int]:
        """The strongest codec to each peer."""
        sends: dict[bytes, int] = {}
        for (peer, _), choice in self._training.compressor.choices.items():
            if choice.codec:
                digest = peer_digest(peer)
                sends[digest] = max(choice.codec, sends.get(digest, 0))
        return dict(list(sends.items())[-MAX_RTTS:])

    def listen(self, tell: Callable[..., None]) -> None:
        """Let a node say what links travel as, whenever that changes."""
        loop = asyncio.get_running_loop()

        def on_choice(peer: PeerId, direction: str, choice: Choice) -> None:  # on the bench
            codec = choice.codec.name.lower()
            text = f"To {peer[-8:]}, {direction}: {codec} from now on ({choice.reason})"
            details = {"peer": peer, "direction": direction, "codec": codec, "reason": choice.reason}
            loop.call_soon_threadsafe(functools.partial(tell, "compressing", text, **details))

        self._training.compressor.on_choice = on_choice

    async def drain(self, timeout_s: float) -> None:
        """Hand the conductor's role on, and let the sessions move to other peers."""
        await self._crew.close()
        if self._serving is not None:
            await self._serving.drain(timeout_s)

    async def close(self) -> None:
        """Keep the step that is reached, and free everything."""
        await self._crew.close()
        await self._training.close()
        await self._keeper.close()
        if self._serving is not None:
            await self._serving.close()


def estimates(checkpoint: Checkpoint, run: Run) -> Sequence[UnitEstimate]:
    """Of all units for a microbatch. Raises CheckpointError where the work cannot be estimated."""
    if isinstance(checkpoint, GraphCheckpoint):
        return estimate_units(checkpoint.graph, run.microbatch)
    return estimate_span(checkpoint, run.microbatch, run.sequence)


def measure(segment: Segment) -> Speeds:
    """Before anything is trained. What a graph's inputs are is known to its data alone: its first real work tells."""
    return measure_training(segment) if isinstance(segment, SpanSegment) else Speeds()


def load(checkpoint: Checkpoint, units: Span, hardware: Hardware) -> Segment:
    """The units, ready to be trained. Raises CheckpointError, LocalError."""
    device = hardware.device.torch_device
    if isinstance(checkpoint, GraphCheckpoint):
        return load_graph_segment(checkpoint.path, units.start, units.end, device=device)
    return load_segment(checkpoint, units.start, units.end, device=device)
