"""Simulation: runs a scenario with its settings and returns the result."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass

from swarmnode.errors import UsageError
from swarmnode.plan.offline.planner_files import Scenario
from swarmnode.plan.view import Span
from swarmnode.plan.virtual_clock import VirtualClock
from swarmnode.simulate.environment.links import Links
from swarmnode.simulate.environment.model import Model
from swarmnode.simulate.environment.peers import Change, Peer, SimulatedDevice, device_of, steady_churn
from swarmnode.simulate.environment.world import SimulatedWorkload, World
from swarmnode.simulate.results.measures import Measures
from swarmnode.simulate.sessions.serving import Serving
from swarmnode.simulate.settings import Settings
from swarmnode.simulate.steps.simulated_training import Training

Progress = Callable[[float, float], None]
"""Function called with the seconds already simulated and the total."""


@dataclass(frozen=True)
class SimulationResult:
    """Result of a simulation: all measures, and the final state of the world."""

    scenario: Scenario
    model: Model
    settings: Settings
    world: World
    workload: SimulatedWorkload
    measures: Measures
    events: int

    def __repr__(self) -> str:
        return f"<SimulationResult of {self.settings.seconds:.0f} s: {self.events} events, {self.world!r}>"


@dataclass(eq=False)
class Simulation:
    """Simulation of a swarm on `scenario` and `model`.

    `peers` is the number of peers, 0 for one per device; if the scenario has fewer devices they are repeated in turn. `trace`
    replaces the random churn. `spans` is a plan, one span per peer, that replaces the choices of the peers. `pipelines` fixes
    the routes of microbatches; without them coordinators wire each. Raises UsageError if a device has no known speed or
    no device holds one layer.
    """

    scenario: Scenario
    model: Model
    settings: Settings
    _: KW_ONLY
    peers: int = 0
    trace: Sequence[Change] | None = None
    spans: Sequence[Span] | None = None
    pipelines: Sequence[Sequence[int]] = ()

    def __post_init__(self) -> None:
        self.clock = VirtualClock()
        self.measures = Measures(self.settings.sample_s)
        count = self.peers or self.scenario.devices
        links = Links(
            self.scenario, [*(index % self.scenario.devices for index in range(count)), *range(self.scenario.devices)]
        )
        self.world = World(
            self.clock,
            self.model,
            links,
            _peers(self.scenario, self.model, self.settings, links, count),
            self.settings.swarm,
            self.measures,
            self._chance("world"),
            trains=self.settings.workload == "train",
        )
        churn = steady_churn(count, self.settings.churn, self.settings.seconds, self._chance("churn"))
        self._changes = churn if self.trace is None else self.trace
        self._sampled_busy_s = 0.0

    def __repr__(self) -> str:
        return f"<Simulation {self.settings.workload} on {self.scenario!r}, {self.world!r}>"

    @property
    def left_out(self) -> list[int]:
        """Indexes of the peers that the plan gives no layers; empty without a plan."""
        return [index for index, span in enumerate(self.spans or ()) if not span.units]

    def run(
        self, progress: Progress = lambda _done, _of: None, workload: SimulatedWorkload | None = None
    ) -> SimulationResult:
        """Simulate until the end and return the result.

        `progress` is called after every sample. `workload` replaces the workload of the settings. Raises UsageError if the
        workload cannot run on these peers.
        """
        workload = workload or self._make_workload()
        self.world.begin(workload, self.spans)
        workload.begin()
        for change in self._changes:
            self.clock.at(change.at_s, lambda change=change: self._happen(change))  # type: ignore[misc]
        seconds = self.settings.seconds
        while self.clock.now_s < seconds:
            self.clock.run(min(seconds, self.clock.now_s + self.settings.sample_s))
            self._sample(workload)
            progress(self.clock.now_s, seconds)
        return SimulationResult(
            self.scenario, self.model, self.settings, self.world, workload, self.measures, self.clock.events
        )

    def _make_workload(self) -> SimulatedWorkload:
        if self.settings.workload == "train":
            return Training(self.world, self.settings.train, self.pipelines)
        return Serving(self.world, self.settings.serve, self._chance("sessions"))

    def _happen(self, change: Change) -> None:
        peer = self.world.peers[change.device]
        if change.up:
            self.world.join(peer)
        else:
            self.world.vanish(peer)

    def _sample(self, workload: SimulatedWorkload) -> None:
        alive = [peer for peer in self.world.peers if peer.alive]
        busy_s = sum(peer.busy_s for peer in self.world.peers)
        share = (busy_s - self._sampled_busy_s) / (self.settings.sample_s * max(1, len(alive)))
        self._sampled_busy_s = busy_s
        gauges = {"peers": float(len(alive)), "share of time computing": share, **workload.gauges()}
        self.measures.sample(self.clock.now_s, gauges)

    def _chance(self, what: str) -> random.Random:
        """Return the random source of one part. Each part has its own, so that more draws of one do not change the others."""
        return random.Random(f"{self.settings.seed} {what}")


def _peers(scenario: Scenario, model: Model, settings: Settings, links: Links, count: int) -> list[Peer]:
    devices = [device_of(scenario, index, model) for index in range(scenario.devices)]
    trains = settings.workload == "train"
    cache_tokens = 0 if trains else settings.swarm.cache_tokens
    capacities = [
        model.capacity_units(device.memory_bytes, trains=trains, cache_tokens=cache_tokens) for device in devices
    ]
    if not any(capacities):
        raise UsageError(
            f"no device of {scenario.name} has the memory for one layer of {model.name}; use larger devices"
        )
    kinds: list[tuple[SimulatedDevice, int]] = list(zip(devices, capacities, strict=True))
    return [
        Peer(index, "", *kinds[index % len(kinds)], links.uplink_bps(index), links.best_bps(index))
        for index in range(count)
    ]
