"""A training swarm of the toy segment on the fake network: real stages, coordinators and trainers, each with its crew."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from swarmnode.checkpoints.checkpoint_manager import CheckpointManager
from swarmnode.checkpoints.state_exchange import StateServer
from swarmnode.codec.body import VERSION
from swarmnode.codec.messages import Hello
from swarmnode.codec.training_messages import Condition, StepReport
from swarmnode.compute.executor import Executor, Urgency
from swarmnode.compute.graph.costs.estimate import UnitEstimate
from swarmnode.compute.graph.costs.rates import ComputeWork
from swarmnode.compute.stopwatch import Stopwatch
from swarmnode.compute.training.datasets.batches import ArrayBatches, Batches
from swarmnode.compute.training.local import train_locally
from swarmnode.compute.training.segment import Segment
from swarmnode.ledger import MemoryLedger
from swarmnode.links.link_config import LinkConfig
from swarmnode.links.switchboard import Switchboard
from swarmnode.net.interfaces import Network, PeerId
from swarmnode.net.memory.network import FakeNetwork, FakeWorld
from swarmnode.net.network_config import OPEN_GATE, Gate
from swarmnode.peer.findings_record import Findings
from swarmnode.plan.spans.flow import Floats
from swarmnode.swarm.peers.directory import Directory
from swarmnode.swarm.records.announcement import State
from swarmnode.swarm.records.run import Averaging, Run
from swarmnode.training.coordinator.election import CoordinatorElection, ready_peers
from swarmnode.training.coordinator.link_times import LinkTimes
from swarmnode.training.spot_checks.spot_checks import SpotChecks
from swarmnode.training.spot_checks.step_records import Committer
from swarmnode.training.trainer import Trainer
from swarmnode.training.worker.activation_compressor import ActivationCompressor
from swarmnode.training.worker.memory import TrainingMemory
from swarmnode.training.worker.training_parts import TrainingPart, TrainingParts
from swarmnode.training.worker.training_stage import TRAIN_PROTOCOL, TrainingStage
from tests.compute.inline_executor import InlineExecutor
from tests.compute.training.toy import CLASSES, FEATURES, ToySegment
from tests.peer.toy_peer import ToyPeer

HELLO = Hello(VERSION, bytes(32), "toy")
PATIENCE_S = 3600.0  # of what comes, however slow the machine is: the suite's own timeout ends what does not
ACTIVATION_BYTES, BOUNDARY_BYTES = 1000, 100  # of one unit for a microbatch
ITEM_S = 0.002  # of virtual time, for whatever an executor does
SUSPICION_S = 15.0  # until its next announcement is believed


def toy_batches() -> ArrayBatches:
    generator = np.random.default_rng(0)
    return ArrayBatches(
        {
            "x": generator.normal(size=(48, FEATURES)).astype(np.float32),
            "labels": generator.integers(0, CLASSES, 48),
        },
        ["x"],
        ["labels"],
    )


def toy_run(batches: Batches, steps: int, **settings: Any) -> Run:
    settings = {"batch": 24, "microbatch": 4, "learning_rate": 1e-2, **settings}
    return Run(data=batches.fingerprint, steps=steps, **settings)


def local_losses(run: Run, batches: Batches) -> list[float]:
    """What one process makes of the run, which names its data. Each is computed once."""
    if run.id not in _LOCAL_LOSSES:
        _LOCAL_LOSSES[run.id] = [report.loss for report in train_locally(ToySegment(), run, batches)]
    return _LOCAL_LOSSES[run.id]


_LOCAL_LOSSES: dict[bytes, list[float]] = {}


async def until(condition: Callable[[], bool], what: str) -> None:
    """Wait for something that nobody tells; fails after a while."""
    loop = asyncio.get_running_loop()
    end_s = loop.time() + PATIENCE_S
    while not condition():
        assert loop.time() < end_s, f"never came: {what}"
        await asyncio.sleep(0.005)


class NoLinkTimes:
    """Nothing is known of any link."""

    def between(self, peers: Sequence[PeerId], _positions: int) -> tuple[Floats, Floats]:
        return np.zeros((len(peers), len(peers))), np.zeros((len(peers), len(peers)))

    def homes(self, _peers: Sequence[PeerId]) -> tuple[int, ...]:
        return ()

    def line_bps(self, _peer: PeerId) -> float:
        return 0.0

    def paths_bps(self, peers: Sequence[PeerId]) -> Floats:
        return np.zeros((len(peers), len(peers)))

    def averaged_bytes(self, _blocks: Sequence[int], _how: Averaging) -> float:
        return 0.0


class Announced:
    """What all peers know of one another, at once."""

    def __init__(self) -> None:
        self.peers: dict[PeerId, Any] = {}
        self._ages = itertools.count()
        self._revision = 0
        self._news = asyncio.Event()

    def add(self, peer: PeerId, span: tuple[int, int]) -> None:
        age = float(next(self._ages))
        self.peers[peer] = SimpleNamespace(peer=peer, life=State.READY, started_at=age, span=span)
        self._tell()

    def remove(self, peer: PeerId) -> None:
        self.peers.pop(peer, None)
        self._tell()

    def _tell(self) -> None:
        self._revision += 1
        self._news.set()
        self._news = asyncio.Event()

    async def changed(self, since: int) -> int:
        while self._revision <= since:
            await self._news.wait()
        return self._revision


class ToyDirectory:
    """One peer's view of them."""

    def __init__(self, network: Network, announced: Announced) -> None:
        self.network = network
        self.suspected: dict[PeerId, float] = {}  # until when, by the loop's time
        self._announced = announced

    def peers(self) -> Mapping[PeerId, Any]:
        now_s = asyncio.get_running_loop().time()
        return {peer: news for peer, news in self._announced.peers.items() if self.suspected.get(peer, 0.0) <= now_s}

    async def changed(self, since: int) -> int:
        return await self._announced.changed(since)

    async def refresh(self) -> None:
        """Nothing to be read that is not known."""

    def suspect(self, peer: PeerId, _reason: str) -> None:
        self.suspected[peer] = asyncio.get_running_loop().time() + SUSPICION_S


class StallingExecutor(InlineExecutor):
    """`stall` lets it stand still, as a device that hangs does, while everything else at its node goes on."""

    def __init__(self) -> None:
        self._item_s = ITEM_S
        super().__init__(lambda _item: self._item_s)

    def stall(self) -> None:
        """What is begun from now on does not end."""
        self._item_s = float("inf")


def toy_estimates(_run: Run) -> list[UnitEstimate]:
    """Every unit keeps ACTIVATION_BYTES of a microbatch."""
    return [UnitEstimate(ComputeWork(), ComputeWork(), ACTIVATION_BYTES, 0, BOUNDARY_BYTES)] * ToySegment.units


def sign_as(peer: PeerId) -> Callable[[bytes], bytes]:
    """Signatures of peers that have no keys."""
    return lambda data: hashlib.sha256(peer.encode() + data).digest()


def is_signed_by(peer: PeerId, data: bytes, signature: bytes) -> bool:
    return signature == sign_as(peer)(data)


def one_part(segment: Segment, executor: Executor, **own: Any) -> TrainingParts:
    """Of a node with one device."""
    given = {"memory": TrainingMemory(MemoryLedger(), segment), "stopwatch": Stopwatch(segment.device), **own}
    return TrainingParts([[TrainingPart(segment, executor, **given)]])


class Volunteer:
    """A node that trains some units, and leads when it is its turn."""

    def __init__(
        self,
        network: Network,
        directory: ToyDirectory,
        segment: Segment,
        folder: Path,
        config: LinkConfig,
        executor: Executor,
    ) -> None:
        self.network = network
        self.segment = segment
        self.folder = folder
        peer = ToyPeer(network, config, HELLO)
        self.states = StateServer(peer)
        self.checkpoint_manager = CheckpointManager(peer, folder, self.states)
        self.executor = executor
        self.ledger = MemoryLedger()
        parts = one_part(
            segment,
            executor,
            memory=TrainingMemory(self.ledger, segment, toy_estimates),
            stopwatch=Stopwatch(segment.device, clock=config.clock),
        )
        peer = replace(peer, link_config=replace(config, ledger=self.ledger))
        loop = asyncio.get_running_loop()
        self.standing = Findings(folder / "standing.json", loop.time)
        committer = Committer(network.peer_id, HELLO.swarm, sign_as(network.peer_id), is_signed_by)
        dice = random.Random(network.peer_id)
        self.spot_checks = SpotChecks(peer, committer, executor, self.standing, self.ledger, dice=dice)
        self.stage = TrainingStage(
            peer,
            parts,
            self.checkpoint_manager,
            compressor=ActivationCompressor("none", ()),
            spot_checks=self.spot_checks,
        )
        links = cast("LinkTimes", NoLinkTimes())
        self.election = CoordinatorElection(
            cast("Directory", directory), self.stage, ToySegment.units, links, clock=loop.time
        )
        self.alive = True

    def __repr__(self) -> str:
        return f"<Volunteer {self.stage!r}>"

    @property
    def peer(self) -> PeerId:
        return self.network.peer_id

    @property
    def ready(self) -> bool:
        return self.stage.state.condition == Condition.READY

    @property
    def leads(self) -> bool:
        return self.alive and self.stage.following.coordinator == self.peer

    async def close(self) -> None:
        await self.election.close()
        await self.stage.close()
        await self.executor.close()
        await self.checkpoint_manager.close()
        await self.states.close()
        await self.network.close()


class TrainingSwarm:
    """Volunteers by number, in the order in which they came; the first one is the eldest. On a VirtualLoop.

    `wrap` stands between a peer and the network; `segment_of` makes another model's units than the toy's, as many."""

    def __init__(
        self,
        folder: Path,
        gate: Gate = OPEN_GATE,
        *,
        wrap: Callable[[FakeNetwork], Network] = lambda network: network,
        segment_of: Callable[[int, int], Segment] | None = None,
    ) -> None:
        self._segment_of = segment_of
        self.world = FakeWorld(seed=1)
        self._gate = gate  # of everybody
        self._wrap = wrap
        self.announced = Announced()
        self.volunteers: list[Volunteer] = []
        self._folder = folder
        self._trainers: list[Switchboard] = []

    async def __aenter__(self) -> TrainingSwarm:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def _config(self) -> LinkConfig:
        return LinkConfig(gate=self._gate, clock=asyncio.get_running_loop().time)

    async def _network(self) -> Network:
        network = self._wrap(self.world.join())
        for volunteer in self.volunteers:
            if volunteer.alive:
                await network.connect(await volunteer.network.addresses(), timeout_s=1)
                break
        return network

    async def join(
        self, start: int, end: int, *, breaks: int | None = None, disk_of: Volunteer | None = None
    ) -> Volunteer:
        """A new volunteer for these units; or with the disk of one that was killed."""
        network = await self._network()
        segment = ToySegment(start, end, breaks=breaks) if self._segment_of is None else self._segment_of(start, end)
        folder = self._folder / f"{len(self.volunteers)}"
        if disk_of is not None:
            await disk_of.checkpoint_manager.close()
            folder = disk_of.folder
        directory = ToyDirectory(network, self.announced)
        volunteer = Volunteer(network, directory, segment, folder, self._config(), StallingExecutor())
        self.volunteers.append(volunteer)
        await volunteer.states.serve()
        await volunteer.stage.start()
        volunteer.election.start()
        self.announced.add(volunteer.peer, (start, end))
        return volunteer

    def kill(self, volunteer: Volunteer) -> None:
        """As by kill -9; the others' announcements of it go with it."""
        volunteer.alive = False
        self.world.kill(volunteer.peer)
        self.announced.remove(volunteer.peer)

    async def trainer(
        self,
        run: Run,
        batches: Batches,
        on_step: Callable[[StepReport], None],
        on_waiting: Callable[[str, tuple[int, ...]], None] = lambda _text, _missing: None,
    ) -> tuple[Network, Trainer]:
        """A trainer with a network of its own."""
        network = await self._network()
        directory = cast("Directory", ToyDirectory(network, self.announced))
        board = Switchboard(network, TRAIN_PROTOCOL, HELLO, self._config())
        self._trainers.append(board)
        return network, Trainer(board, lambda: ready_peers(directory), run, batches, on_step, on_waiting)

    @property
    def live(self) -> list[Volunteer]:
        return [volunteer for volunteer in self.volunteers if volunteer.alive]

    @property
    def coordinator(self) -> Volunteer | None:
        return next((volunteer for volunteer in self.live if volunteer.leads), None)

    async def settled(self, steps: int) -> None:
        """Everybody has made the update of the last step."""
        for volunteer in self.live:
            await until(lambda v=volunteer: v.ready and v.stage.state.step == steps, f"step {steps} at {volunteer}")
            await volunteer.stage.shared_executor.call(Urgency.IDLE, lambda: None, kind="try")

    def replicas(self) -> Iterator[tuple[int, list[Mapping[str, Tensor]]]]:
        """(unit, the parameters that each live replica has)."""
        for unit in range(ToySegment.units):
            held = [v.segment for v in self.live if v.segment.start <= unit < v.segment.end]
            yield unit, [segment.parameters()[unit] for segment in held]

    def assert_replicas_are_equal(self) -> None:
        for unit, replicas in self.replicas():
            for other in replicas[1:]:
                for name, parameter in replicas[0].items():
                    assert torch.equal(parameter, other[name]), f"{name} of unit {unit}"

    async def close(self) -> None:
        for board in self._trainers:
            await board.close()
        await asyncio.gather(*(volunteer.close() for volunteer in self.volunteers))
