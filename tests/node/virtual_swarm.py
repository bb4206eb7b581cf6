"""A whole swarm in one process and in virtual time: the nodes, doors and clients that users run, on the in-memory network.

What `swarmnode.localswarm` is for real processes. A node that is killed is cut off in the middle of what it does, as by
kill -9; one that hangs is not heard and hears nothing, as by SIGSTOP.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import secrets
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from swarmnode.cli.options.node_options import parse_span
from swarmnode.client.swarm_client import SwarmClient
from swarmnode.client.training.client import TrainingClient
from swarmnode.compute import stopwatch
from swarmnode.compute.executor import WorkItem
from swarmnode.compute.graph.costs.rates import REFERENCE
from swarmnode.compute.training.local import StepSummary
from swarmnode.config import StageConfig
from swarmnode.data.samples import DataRules, DataSummary
from swarmnode.errors import CheckpointError
from swarmnode.founding.model_source import ModelSource, from_checkpoint
from swarmnode.founding.swarm_creation import Bootstraps, create_swarm
from swarmnode.net.clock import Clock
from swarmnode.net.interfaces import PeerId
from swarmnode.net.memory.medium import Path as NetworkPath
from swarmnode.net.memory.network import FakeWorld
from swarmnode.node.bootstrap import Bootstrap
from swarmnode.node.node import Node
from swarmnode.node.node_config import NodeConfig
from swarmnode.peer.host_config import HostConfig
from swarmnode.platform import Platform
from swarmnode.swarm.records.manifest import SERVE
from swarmnode.swarm.records.run import Run
from swarmnode.swarm.storage.swarmfile import Swarm, load_swarm, save_swarm
from swarmnode.training.worker import training_parts
from tests.compute.inline_executor import InlineExecutor

LATENCY_S = 0.001
PASS_S = 0.002  # that the device takes for whatever it does
TICK_S = 0.0001
PATIENCE_S = 600.0  # of the virtual clock, so that it costs nothing


def pass_s(_item: WorkItem) -> float:
    """Every device is as fast."""
    return PASS_S


class DeviceTime:
    """What a device's own clock says: each look takes a tick, and a throttle holds it up."""

    def __init__(self) -> None:
        self._now_s = 0.0

    def __repr__(self) -> str:
        return f"<DeviceTime {self._now_s:.4f} s>"

    def now(self) -> float:
        self._now_s += TICK_S
        return self._now_s

    def hold_up(self, seconds: float) -> None:
        self._now_s += seconds


class VirtualMember:
    """A node and what it has told so far; `run` in a task, as the command does."""

    def __init__(self, name: str, node: Node, swarm: VirtualSwarm, home: Path) -> None:
        self.name = name
        self.node = node
        self.home = home
        self.seen: list[dict[str, Any]] = []
        self._swarm = swarm
        self._stop = asyncio.Event()
        self._news = asyncio.Event()
        self.task: asyncio.Task[None] = asyncio.ensure_future(node.run(self._stop))
        self.task.add_done_callback(lambda _task: self._news.set())

    def __repr__(self) -> str:
        told = self.seen[-1]["event"] if self.seen else "nothing"
        return f"<VirtualMember {self.name} {'over' if self.over else 'running'}, told {told}>"

    @property
    def over(self) -> bool:
        """Whether it has ended, in whatever way."""
        return self.task.done()

    @property
    def peer(self) -> PeerId:
        """Known once it has joined."""
        return next(str(event["peer"]) for event in self.seen if event["event"] == "joined")

    def tell(self, event: str, text: str, **details: Any) -> None:
        self.seen.append({"event": event, "text": text, **details})
        self._news.set()

    async def wait_for(self, event: str, timeout_s: float = PATIENCE_S) -> dict[str, Any]:
        """The first event of that name, waiting for it. Raises what ended the node before."""
        return await self.wait_until(lambda told: told["event"] == event, f"'{event}'", timeout_s)

    async def wait_until(
        self, holds: Callable[[dict[str, Any]], bool], what: str, timeout_s: float = PATIENCE_S
    ) -> dict[str, Any]:
        """The first event for which `holds`, waiting for it."""
        deadline_s = asyncio.get_running_loop().time() + timeout_s
        while True:
            self._news.clear()
            for event in self.seen:
                if holds(event):
                    return event
            if self.over:
                self.task.result()
                raise AssertionError(f"{self!r} ended before {what}")
            try:
                await asyncio.wait_for(self._news.wait(), deadline_s - asyncio.get_running_loop().time())
            except asyncio.TimeoutError:
                raise AssertionError(f"{self!r}: no {what} within {timeout_s:.0f} s") from None

    async def kill(self) -> None:
        """As by kill -9."""
        self._swarm.world.kill(self.peer)
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)

    def leave(self) -> None:
        """As by Ctrl-C or SIGTERM; does not wait."""
        self._stop.set()

    async def stop(self) -> None:
        """Leave in order. Raises what went wrong in its life."""
        self.leave()
        await self.task

    @contextlib.contextmanager
    def hanging(self) -> Any:
        """As by SIGSTOP, until the end."""
        peer = self.peer
        self._swarm.world.hang(peer)
        try:
            yield
        finally:
            self._swarm.world.wake(peer)


class VirtualTrainer:
    """Somebody who feeds a training, and what they hear of it; `train` in a task, as the command does."""

    def __init__(self, swarm: VirtualSwarm, name: str, data: Path, settings: Run, rules: DataRules) -> None:
        self.name = name
        self.losses: dict[int, float] = {}
        self.held_out: dict[int, float] = {}
        self.expert_loads: dict[int, float] = {}
        self.peers: dict[int, int] = {}
        self.step_s: dict[int, tuple[float, float]] = {}  # as it was expected, and as it was
        self.why = ""  # the training waited last
        self.missing: tuple[int, ...] | None = None  # and for which units
        self._swarm = swarm
        self._news = asyncio.Event()
        self._client: TrainingClient | None = None
        self.task = asyncio.ensure_future(self._train(data, settings, rules))
        self.task.add_done_callback(lambda _task: self._news.set())

    def __repr__(self) -> str:
        return f"<VirtualTrainer {self.name} after step {max(self.losses, default=-1)}>"

    async def _train(self, data: Path, settings: Run, rules: DataRules) -> int:
        swarm = self._swarm
        self._client = await TrainingClient.join(
            swarm.load(), swarm.folder / "homes" / self.name, platform=swarm.platform()
        )
        try:
            return await self._client.train(data, settings, self, asyncio.Event(), rules)
        finally:
            await self._client.close()

    def begun(self, run: Run, _data: DataSummary) -> None:
        """Nothing to keep."""

    def step(self, report: StepSummary) -> None:
        self.losses[report.step], self.expert_loads[report.step] = report.loss, report.expert_load
        if report.held_out_loss is not None:
            self.held_out[report.step] = report.held_out_loss
        self.peers[report.step] = report.peers
        self.step_s[report.step] = report.expected_s, report.step_s
        self._news.set()

    def waiting(self, why: str, missing: tuple[int, ...]) -> None:
        self.why = why
        self.missing = missing
        self._news.set()

    @property
    def fed(self) -> int:
        """Microbatches that it has fed."""
        return 0 if self._client is None else self._client.fed

    async def wait_until(self, holds: Callable[[], bool]) -> None:
        """Wait until something is so. Raises what ended the trainer before."""
        deadline_s = asyncio.get_running_loop().time() + PATIENCE_S
        while not holds():
            if self.task.done():
                self.task.result()
                raise AssertionError(f"{self!r} ended before")
            self._news.clear()
            await asyncio.wait_for(self._news.wait(), deadline_s - asyncio.get_running_loop().time())

    async def wait_for_step(self, step: int) -> None:
        """Wait until this step is over."""
        await self.wait_until(lambda: max(self.losses, default=-1) >= step)

    async def finish(self) -> int:
        """Wait for the end of the run; how many steps are done."""
        return await asyncio.wait_for(asyncio.shield(self.task), PATIENCE_S)

    async def kill(self) -> None:
        """As by kill -9."""
        assert self._client is not None
        self._swarm.world.kill(self._client.peer_id)
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


def _no_dummy_run(*_: object, **__: object) -> float:
    raise CheckpointError("what a virtual device takes follows from what it does, not from how long that takes here")


class VirtualSwarm:
    """A swarm's file, its door and its nodes. `async with VirtualSwarm(folder) as swarm: ...` ends them all.

    Whatever somebody draws meanwhile (identities, ids of sessions, keys) follows from `seed`."""

    def __init__(self, folder: Path, *, seed: int = 1, epoch_s: float | None = None) -> None:
        folder.mkdir(exist_ok=True)
        self.folder = folder
        self.file = folder / "virtual.swarm"
        self.members: dict[str, VirtualMember] = {}
        self._trainers: list[VirtualTrainer] = []
        self._seed = seed
        self._epoch_s = time.time() if epoch_s is None else epoch_s
        self._loop = asyncio.get_running_loop()
        self.world = FakeWorld(seed, clock=self.unix)
        self.world.default_path = NetworkPath(latency_s=LATENCY_S)
        self._clients = itertools.count()
        self._ends = contextlib.AsyncExitStack()

    def __repr__(self) -> str:
        return f"<VirtualSwarm {list(self.members.values())}>"

    async def __aenter__(self) -> VirtualSwarm:
        chance = random.Random(f"drawn by peers, {self._seed}")  # the world draws, too
        patch = self._ends.enter_context(pytest.MonkeyPatch.context())
        patch.setattr(secrets, "token_bytes", chance.randbytes)
        patch.setattr(secrets, "randbelow", chance.randrange)
        patch.setattr(stopwatch, "MOST_PASSES", 1)  # by its own clock a device takes a tick for each
        patch.setattr(training_parts, "measure_rates", lambda *_, **__: REFERENCE)  # every device is as fast
        patch.setattr(training_parts, "dummy_run_s", _no_dummy_run)
        return self

    async def __aexit__(self, *_: object) -> None:
        tasks = [one.task for one in (*self._trainers, *self.members.values())]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._ends.aclose()

    def unix(self) -> float:
        """Unix time in seconds: from when the swarm was made, as fast as the loop says."""
        return self._epoch_s + self._loop.time()

    def platform(self, cost_s: Callable[[WorkItem], float] = pass_s, ahead_s: Callable[[], float] = float) -> Platform:
        """What a peer of this swarm stands on; its device takes `cost_s` for what it does, and its clock is `ahead_s` ahead."""
        device, now = DeviceTime(), self._loop.time
        clock = Clock(lambda: self.unix() + ahead_s(), now, now, device.now, device.hold_up)
        return Platform(self.world.start, lambda _threads: InlineExecutor(cost_s), clock)

    # -- founding

    def create(self, model: Path | ModelSource, *, mode: str = SERVE, **options: Any) -> Swarm:
        """Found the swarm, on a checkpoint where it is a folder, and write its file."""
        source = model if isinstance(model, ModelSource) else from_checkpoint(str(model), self.folder / "weights")
        swarm = create_swarm("virtual", source, Bootstraps(), mode=mode, **options)
        save_swarm(swarm, self.file)
        return swarm

    def load(self) -> Swarm:
        """The swarm as its file has it."""
        return load_swarm(self.file)

    # -- who takes part

    async def bootstrap(self) -> Bootstrap:
        """Open the door."""
        home = self.folder / "homes" / "bootstrap"
        door = await Bootstrap.start(self.load(), HostConfig(home), file=self.file, platform=self.platform())
        self._ends.push_async_callback(door.close)
        return door

    def node(
        self,
        name: str,
        span: str | None = None,
        *,
        swarm: str | Path | None = None,
        cost_s: Callable[[WorkItem], float] = pass_s,
        ahead_s: Callable[[], float] = float,
        config: NodeConfig | None = None,
        **stage: Any,
    ) -> VirtualMember:
        """Start a volunteer's node; does not wait. `stage` are StageConfig's fields, `swarm` an invite where not the file."""
        home = self.folder / "homes" / name
        config = config or NodeConfig(HostConfig(home, name=name), StageConfig(**stage))
        config = replace(config, span=parse_span(span) if span else None)
        told: list[VirtualMember] = []
        node = Node(
            load_swarm(swarm or self.file),
            config,
            lambda event, text, **details: told[0].tell(event, text, **details),
            platform=self.platform(cost_s, ahead_s),
        )
        told.append(VirtualMember(name, node, self, home))
        self.members[name] = told[0]
        return told[0]

    def trainer(self, name: str, data: Path, settings: Run, rules: DataRules = DataRules()) -> VirtualTrainer:
        """Start a trainer; does not wait."""
        trainer = VirtualTrainer(self, name, data, settings, rules)
        self._trainers.append(trainer)
        return trainer

    def member(self, peer: PeerId) -> VirtualMember:
        """The node with this peer id."""
        return next(member for member in self.members.values() if member.peer == peer)

    @contextlib.asynccontextmanager
    async def client(
        self, swarm: str | Path | None = None, *, home: Path | None = None, **options: Any
    ) -> AsyncIterator[SwarmClient]:
        """A client, once it sees every unit held. It audits nobody unless it is told to."""
        options.setdefault("audit_share", 0.0)
        home = home or self.folder / f"client-{next(self._clients)}"
        client = await SwarmClient.join(load_swarm(swarm or self.file), home=home, platform=self.platform(), **options)
        try:
            while not client.status()["covered"]:
                await client.changed()
            yield client
        finally:
            await client.close()


async def sees_ready(client: SwarmClient, nodes: int) -> None:
    """Wait until a client sees so many nodes that are ready."""
    while sum(peer["state"] == "ready" for peer in client.status()["peers"]) < nodes:
        await client.changed()
