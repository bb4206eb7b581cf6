"""Training worker: a volunteer's stage in a training swarm. It trains its layers, leads if it is its turn, and serves the
learnt model.

Restoration: it fetches the last state of a stage's layers from disks if no other node holds them any more.

It runs after the last holder of a layer was lost for good and this node took its place. The coordinator then finds the step
on this disk and leads all stages back to it (`plan/training/coordination.py`).
"""

from __future__ import annotations

import asyncio
import functools
import logging
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from swarmnode.checkpoints.checkpoint_manager import CheckpointManager, SharedStates
from swarmnode.checkpoints.state_backups import BackupSender
from swarmnode.checkpoints.votes import Electorate
from swarmnode.codec.training_messages import Condition
from swarmnode.compute.graph.serialise import GraphCheckpoint
from swarmnode.compute.model.checkpoint import Checkpoint
from swarmnode.decisions import Topic
from swarmnode.errors import NetworkDown, PeerError, SwarmnodeError
from swarmnode.measuring.capability import Capability, at_once, speeds_section
from swarmnode.measuring.hardware import Hardware, StageResources
from swarmnode.measuring.meters import TRAIN
from swarmnode.metrics import table
from swarmnode.metrics.metric import Reading, Readings
from swarmnode.net.identity import verify
from swarmnode.net.interfaces import PeerId
from swarmnode.net.tasks import Tasks
from swarmnode.peer.host import Host
from swarmnode.plan.audits import AuditBudget
from swarmnode.plan.compression import Choice
from swarmnode.plan.spans.span_placement import HOLDING
from swarmnode.plan.training.backups import learnt_alone
from swarmnode.plan.view import Span
from swarmnode.serving.serving_stage import ServingStage
from swarmnode.serving.stage import Stage
from swarmnode.swarm.records.announcement import MAX_RTTS, Section, State, StepLoad, TrainingNews, peer_digest
from swarmnode.training.coordinator.election import CoordinatorElection
from swarmnode.training.coordinator.link_times import LinkTimes
from swarmnode.training.organisation import step_load_of
from swarmnode.training.spot_checks.spot_checks import SpotChecks
from swarmnode.training.spot_checks.step_records import Committer
from swarmnode.training.worker.activation_compressor import ActivationCompressor
from swarmnode.training.worker.training_parts import (
    LoadedSegments,
    TrainingPart,
    TrainingParts,
    load_served,
    load_units,
    make_part,
    measure_part,
)
from swarmnode.training.worker.training_stage import TrainingStage

log = logging.getLogger(__name__)

LOOK_S = 2.0


class Restoration:
    """Restoration of one stage, while it has no state: it is in no run yet, or in one without a peer that could send the state."""

    def __init__(self, host: Host, stage: TrainingStage, checkpoint_manager: CheckpointManager, units: int) -> None:
        segment = stage.segment
        self._host = host
        self._stage = stage
        self._checkpoint_manager = checkpoint_manager
        self._units = units
        self._blocks: Sequence[int] = sorted({*segment.parameters(), *range(segment.start, segment.end)})
        self._tasks = Tasks("restoration", on_crash=host.supervisor.ends_peer)

    def start(self) -> None:
        """Start to watch whether a restoration is needed."""
        self._tasks.spawn(self._watch(), "watch")

    async def close(self) -> None:
        """Stop watching for layers whose states must be restored."""
        await self._tasks.close()

    async def _watch(self) -> None:
        while True:
            if self._stage.state.condition != Condition.READY and self._is_needed():
                await self._bring()
            await asyncio.sleep(LOOK_S)

    def _others(self) -> list[PeerId]:
        return [peer for peer in self._host.directory.peers() if peer != self._host.peer_id]

    @property
    def is_last(self) -> bool:
        """Whether some layer of this stage has been learnt by no other node. Once the stage is ready, only peers that have
        averaged with it count."""
        held, announced = range(self._stage.segment.start, self._stage.segment.end), self._host.directory.peers()
        met = self._stage.state.replicas if self._stage.state.condition == Condition.READY else None
        return bool(learnt_alone(announced.values(), self._host.peer_id, held, self._units, met))

    @property
    def is_gap(self) -> bool:
        """Whether some layer of the model has no holder, so that training stands still."""
        holding = [peer for peer in self._host.directory.peers().values() if peer.life in HOLDING]
        return any(not any(peer.holds(unit) for peer in holding) for unit in range(self._units))

    @property
    def has_trained(self) -> bool:
        """Whether the swarm has trained already: this stage, or a peer that is ready."""
        announced = self._host.directory.peers()
        ready = (announced[peer] for peer in self._others() if announced[peer].life is State.READY)
        return self._stage.state.step > 0 or any(peer.training_step > 0 for peer in ready)

    def _is_needed(self) -> bool:
        """Return whether the swarm has trained already and only this node holds some layer of the stage."""
        return self.has_trained and self.is_last

    async def _bring(self) -> None:
        try:
            step = await self._checkpoint_manager.restore(
                self._others, self._blocks, self._units, lambda: self._stage.state.is_stateless
            )
        except (PeerError, NetworkDown) as error:
            log.info("your node cannot fetch the state of layers %s: %s", list(self._blocks), error)
            return
        except SwarmnodeError as error:
            log.warning("%s", error)
            return
        if step is not None:
            log.warning("your node has restored step %d of layers %s from stored states", step, list(self._blocks))
            self._stage.tell_status()


class StepTime:
    """Mean seconds of a training step, since the first step that was seen."""

    def __init__(self) -> None:
        self._first = self._last = (0, 0.0)  # step, and its time

    @property
    def step_s(self) -> float:
        """Mean seconds of a step; infinite before two steps have been seen."""
        (first, since_s), (last, until_s) = self._first, self._last
        return (until_s - since_s) / (last - first) if last > first else math.inf

    def record(self, step: int, now_s: float) -> None:
        """Note that the run is at `step`. A lower step than before means that the run was led back or is another one."""
        if not self._first[0] or step < self._last[0]:
            self._first = step, now_s
        if step != self._last[0]:
            self._last = step, now_s

    def rest_s(self, steps: int) -> float:
        """Return the seconds until `steps` steps are done."""
        return max(0, steps - self._last[0]) * self.step_s if steps > self._last[0] else 0.0


@dataclass(eq=False)
class TrainingWorker(Stage):
    """The training counterpart of `ServingStage`: made by `load`, ended by `close`. Modules that are not language models
    are not served."""

    host: Host
    hardware: Hardware
    training: TrainingStage
    checkpoint_manager: CheckpointManager
    serving: ServingStage | None
    capabilities: Sequence[Capability]
    units: int
    awaits_others: Callable[[], bool]

    def __post_init__(self) -> None:
        self._width = self.hardware.wide or self.hardware.width
        self._step_time = StepTime()
        self._capabilities = dict(zip(self.training.parts, self.capabilities, strict=True))
        self._backups = BackupSender(self.host, lambda: self.checkpoint_manager.store, self.hardware.config.min_holders)
        self._restoration = Restoration(self.host, self.training, self.checkpoint_manager, self.units)
        if self.serving is not None:
            self.serving.server.is_behind = self._is_behind
        clock = self.host.clock.monotonic
        self._election = CoordinatorElection(
            self.host.directory,
            self.training,
            self.units,
            LinkTimes(
                self.host.directory,
                self.units,
                self.hardware.width,
                self.hardware.parameters,
                matrix_width=self._width,
                clock=clock,
            ),
            clock=clock,
            on_crash=self.host.supervisor.ends_peer,
            decisions=self.host.decisions,
            awaits_others=self.awaits_others,
        )

    def __repr__(self) -> str:
        return f"<TrainingWorker {self.training!r}, {self._election!r}>"

    @classmethod
    async def load(
        cls,
        place: StageResources,
        checkpoint: Checkpoint,
        units: Span,
        states: SharedStates,
        awaits_others: Callable[[], bool],
    ) -> TrainingWorker:
        """Load the layers `units`, whose weights are on this machine, and start to train them. Raises CheckpointError,
        LocalError."""
        host, hardware = place.host, place.hardware
        layout = hardware.lay_out(units, place.speed_cache, host.swarm.id)
        loaded = [[await load_units(checkpoint, part, hardware) for part in replica] for replica in layout]
        serving = await _serve(place, checkpoint, loaded)
        parts = TrainingParts([[make_part(place, checkpoint, *one) for one in replica] for replica in loaded])
        checkpoint_manager = _checkpoint_manager(host, states, parts)
        training = _stage(host, hardware, parts, checkpoint_manager)
        devices = [device for replica in loaded for device, _ in replica]
        capabilities = [
            await measure_part(place, part, hardware.lent[device]) for part, device in zip(parts, devices, strict=True)
        ]
        worker = cls(
            host, hardware, training, checkpoint_manager, serving, capabilities, checkpoint.units, awaits_others
        )
        await training.start()
        worker._election.start()
        worker._backups.start()
        worker._restoration.start()
        return worker

    @property
    def bound(self) -> bool:
        """Whether the stage has learnt a layer that no other node has. False while a layer of the model has no holder.

        In that case this node may take the uncovered layers beside its own, whose last saved state is on its disk
        (`plan/training/training_placement.py`).
        """
        return self.training.state.learnt_step > 0 and self._restoration.is_last and not self._restoration.is_gap

    def _is_behind(self) -> bool:
        """Return whether the swarm has trained, by the states on this disk or by what peers announce, and this stage has no state
        of it: it would write texts with the founder's weights."""
        if self.training.state.condition == Condition.READY:
            return False
        return bool(self.checkpoint_manager.stored_steps()) or self._restoration.has_trained

    async def settled(self) -> None:
        """Wait until an averaging under way is committed, as `TrainingStage.settled`."""
        await self.training.settled()

    def rest_s(self) -> float:
        """Return the seconds until the end of the run at its mean speed; infinite if unknown."""
        run = self.training.state.run
        return math.inf if run is None else self._step_time.rest_s(run.steps)

    def sections(self) -> tuple[Section, ...]:
        """Return the sections of the node's announcement that describe training and serving."""
        self._compare_with_real_work()
        self._step_time.record(self.training.state.step, self.host.clock.monotonic())
        step = self.training.state.learnt_step
        run = self.training.state.run
        step_load = StepLoad() if run is None else step_load_of(run, self._width)
        news = TrainingNews(training_step=step, step_load=step_load, sends=self._sends())
        # The speeds of all devices together, since microbatches follow one another.
        replicas = self.training.parts.replicas
        speeds = speeds_section(
            at_once([(part.span.units, self._capabilities[part].speeds) for part in replica] for replica in replicas)
        )
        own = news, speeds
        return own if self.serving is None else (*self.serving.sections(), *own)

    def _compare_with_real_work(self) -> None:
        """Correct the capabilities by the current run: by timed microbatches, or before by the estimate of one."""
        if (run := self.training.state.run) is None:
            return
        for part, capability in self._capabilities.items():
            unit_time = part.unit_time
            if unit_time.timed_s:
                capability.record("training_units_per_s", unit_time.timed_s / run.positions)
                self._record_estimate(part)
            elif unit_time.expected_s:
                capability.correct("training_units_per_s", run.positions / unit_time.expected_s)

    def _record_estimate(self, part: TrainingPart) -> None:
        """Log a decision on the accuracy of the current run's estimate."""
        units, unit_time = part.span.units, part.unit_time
        if not unit_time.expected_s:
            return
        off = unit_time.timed_s / unit_time.expected_s - 1
        facts = (
            f"it takes {units * unit_time.timed_s:.3g} s, {off:+.0%} off the {units * unit_time.expected_s:.3g} s estimated",
            f"the next run's estimate is multiplied by {unit_time.correction:.2f}",
        )
        self.host.decisions.record(
            Topic.TRAINING, "estimates a microbatch before it has computed one", facts, units=part.span
        )

    def readings(self) -> Readings:
        """Yield the metrics of this stage."""
        training, span = self.training, self.training.meter.label
        norm, loss = training.state.last
        yield Reading(table.TRAINING_STEP, training.state.step, (span,))
        if training.state.step:
            yield Reading(table.TRAINING_LOSS, loss, (span,))
            yield Reading(table.TRAINING_NORM, norm, (span,))
        links = Counter((choice.codec, direction) for (_, direction), choice in training.compressor.choices.items())
        for (codec, direction), count in links.items():
            yield Reading(table.CODEC_LINKS, count, (span, codec.name.lower(), direction))
        yield Reading(table.QUEUE, training.shared_executor.queued, (span, TRAIN))
        yield from training.meter.readings()
        yield from training.spot_checks.readings()
        if self.serving is not None:
            yield from self.serving.readings()

    def _sends(self) -> dict[bytes, int]:
        """Return the strongest codec in use on links to each peer; the keys are digests of the peers' ids."""
        sends: dict[bytes, int] = {}
        for (peer, _), choice in self.training.compressor.choices.items():
            if choice.codec:
                digest = peer_digest(peer)
                sends[digest] = max(choice.codec, sends.get(digest, 0))
        return dict(list(sends.items())[-MAX_RTTS:])

    def listen(self, tell: Callable[..., None]) -> None:
        """Call `tell` with an event whenever the codec of a link changes."""
        loop = asyncio.get_running_loop()

        def on_choice(peer: PeerId, direction: str, choice: Choice) -> None:  # on the bench
            codec = choice.codec.name.lower()
            text = f"To {peer[-8:]}, {direction}: {codec} from now on ({choice.reason})"
            details = {"peer": peer, "direction": direction, "codec": codec, "reason": choice.reason}
            loop.call_soon_threadsafe(functools.partial(tell, "compressing", text, **details))

        self.training.compressor.on_choice = on_choice

    async def drain(self, timeout_s: float) -> None:
        """Stop coordinating the training, and let serving sessions move to other peers, for at most `timeout_s` seconds."""
        await self._election.close()
        if self.serving is not None:
            await self.serving.drain(timeout_s)

    async def close(self, *, keep_span: bool = False) -> None:
        """Save the current step, send states that no other peer has to another disk, and free everything."""
        await self._restoration.close()
        await self._election.close()
        await self.training.close()
        left = await self._backups.hand_over()
        if left:
            log.warning("the newest state of layers %s is on this disk only: no other peer took it", list(left))
        await self._backups.close()
        await self.checkpoint_manager.close()
        if self.serving is not None:
            await self.serving.close()


async def _serve(place: StageResources, checkpoint: Checkpoint, loaded: LoadedSegments) -> ServingStage | None:
    """Start serving the weights as they are trained. Returns None for a graph, which is not served."""
    if isinstance(checkpoint, GraphCheckpoint):
        return None
    twins = [[await load_served(checkpoint, *one) for one in replica] for replica in loaded]
    return await ServingStage.serve(replace(place, adapters=None), twins)


def _checkpoint_manager(host: Host, states: SharedStates, parts: TrainingParts) -> CheckpointManager:
    return CheckpointManager(
        host,
        host.config.home / "training" / host.swarm.id.hex()[:16],
        states.state_server,
        states.backups,
        blocks=frozenset(parts.segment.parameters()),
        electorate=lambda: Electorate.of(host.directory),
    )


def _stage(
    host: Host, hardware: Hardware, parts: TrainingParts, checkpoint_manager: CheckpointManager
) -> TrainingStage:
    assert host.swarm.manifest is not None
    spot_checks = SpotChecks(
        host,
        Committer(host.peer_id, host.swarm.id, host.identity.sign, verify),
        parts.shared_executor,
        host.standing,
        parts.ledger,
        budget=AuditBudget(hardware.config.audit_share),
    )
    return TrainingStage(
        host,
        parts,
        checkpoint_manager,
        compressor=ActivationCompressor(
            hardware.config.compress,
            host.swarm.manifest.codecs,
            parts.ledger,
            narrow=bool(host.swarm.manifest.bottleneck),
        ),
        spot_checks=spot_checks,
    )
