"""Organisation of a training swarm: the placement rule for training, with the loads and links that peers announce."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache, partial

import numpy as np

from swarmnode.compute.capacity.capacity import STATE_BYTES, TRAINING_BYTES
from swarmnode.measuring.hardware import Hardware
from swarmnode.peer.host import Host
from swarmnode.peer.placement import Placement, PlacementConfig
from swarmnode.plan.routes.delays import HomeLines, bandwidths, likely_delays, shared_homes
from swarmnode.plan.spans.span_placement import PlacementRule
from swarmnode.plan.training.averaging import averaged_bytes
from swarmnode.plan.training.rule import SETTLING, StepOutlook, TrainingRule
from swarmnode.plan.training.step_forecast import TrainingLoad, TrainingNetwork
from swarmnode.plan.view import PeerView, View
from swarmnode.swarm.peers.directory import Directory
from swarmnode.swarm.records.announcement import State, StepLoad, middle_load
from swarmnode.swarm.records.manifest import GRAPH
from swarmnode.swarm.records.run import Run

MICROBATCHES = 32  # of a usual step: nodes take their spans before a trainer comes
POSITIONS, SAMPLES = 1024, 32  # of a usual microbatch: of a language model, and of a module
COMMANDS = 5  # of a step: feeding, leases, results, averaging, commit
REMEMBERED_S = 30.0  # how long a run's load counts after its last announcement
FLOAT32_BYTES = 4
MANY_PARAMETERS = 10**6
BELIEVED = 4.0  # times the usual speed, at most: no peer can make all others stand by through its own claim


def training_placement(host: Host, hardware: Hardware, config: PlacementConfig) -> Placement:
    """Create the placement of one node, which aims at the shortest step and a second holder of every layer."""
    assert host.swarm.manifest is not None
    positions = SAMPLES if host.swarm.manifest.kind == GRAPH else POSITIONS
    rule = training_rule(host.directory, hardware, positions, host.clock.monotonic)
    move_policy = replace(config.move_policy, for_gain=False, hysteresis=SETTLING)
    placement_rule = PlacementRule(rule.choose, rule.reconsider, lambda: rule.first_places.awaited)
    return Placement(host, hardware.capacity_units, replace(config, move_policy=move_policy), placement_rule)


def training_rule(directory: Directory, hardware: Hardware, positions: int, clock: Callable[[], float]) -> TrainingRule:
    """Create the rule for one swarm. It plans for the announced run, or for a usual run before a trainer comes. `positions`: of a
    usual microbatch; samples, for a module."""
    capacity_of = lru_cache(maxsize=1024)(hardware.capacity_of)

    def capacity(peer: PeerView) -> int:
        return max(peer.span.units, capacity_of(peer.memory_bytes))

    usual = StepLoad(MICROBATCHES, positions, 1000 * FLOAT32_BYTES)

    announced = AnnouncedLoad(directory, clock)

    def announced_load() -> StepLoad:
        return known if (known := announced()).all_positions else usual

    load_of = lru_cache(maxsize=8)(partial(training_load, hardware))

    lines = HomeLines(clock)

    def network(view: View, peers: Sequence[PeerView]) -> TrainingNetwork:
        return announced_network(lines.held(view, peers), peers, announced_load().positions)

    return TrainingRule(
        StepOutlook(lambda: load_of(announced_load()), network, clock=clock),
        capacity,
        lambda: has_begun(directory),
        under_way=lambda: bool(announced().all_positions),
        clock=clock,
    )


class AnnouncedLoad:
    """The load of a step of the current run, as peers announce it. `clock`: seconds. It is remembered for REMEMBERED_S: after a
    move of all nodes none is in the run for a moment, and they would move back."""

    def __init__(self, directory: Directory, clock: Callable[[], float]) -> None:
        self._directory = directory
        self._clock = clock
        self._newest, self._until_s = StepLoad(), 0.0

    def __call__(self) -> StepLoad:
        """Return the announced load; an empty `StepLoad` if no run is known."""
        ready = [peer for peer in self._directory.peers().values() if peer.life is State.READY]
        newest = middle_load(StepLoad(*peer.step_load) for peer in ready)
        if newest.all_positions:
            self._newest, self._until_s = newest, self._clock() + REMEMBERED_S
        return newest if newest.all_positions or self._clock() >= self._until_s else self._newest


def step_load_of(run: Run, width: int) -> StepLoad:
    """Return the load of a step of `run` for a model of this width."""
    averaging = run.averaging
    each_bytes = averaged_bytes(MANY_PARAMETERS, width, averaging) / averaging.every / MANY_PARAMETERS
    return StepLoad(run.microbatches, run.positions, round(1000 * each_bytes))


def training_load(hardware: Hardware, step: StepLoad) -> TrainingLoad:
    """Return the work and the traffic of one training step, for forecasts: per microbatch, and per layer of the model in
    `hardware`."""
    size_bytes_U = np.array(hardware.sizes.weight_bytes, dtype=float)
    return TrainingLoad(
        step.microbatches,
        float(FLOAT32_BYTES * step.positions * hardware.width),
        size_bytes_U / TRAINING_BYTES * step.averaged_millibytes / 1000,
        np.ones(len(size_bytes_U)),  # units are alike for peers that announce units/s
        size_bytes_U * STATE_BYTES / TRAINING_BYTES,
        commands=COMMANDS,
    )


def announced_network(view: View, peers: Sequence[PeerView], positions: int = POSITIONS) -> TrainingNetwork:
    """Return the network of `peers`: their speeds, and links estimated from round trips, coordinates and lines. Speeds are as
    announced, but at most BELIEVED times the median; a peer without a speed gets the median."""
    told_N = np.array([peer.decode_units_per_s for peer in peers])
    usual = float(np.median(told_N[told_N > 0])) if told_N.any() else 1.0
    units_per_s_N = np.where(told_N > 0, np.minimum(told_N, BELIEVED * usual), usual)
    names = [peer.peer for peer in peers]
    homes = shared_homes([peer.home or peer.peer for peer in peers])
    return TrainingNetwork(units_per_s_N / positions, likely_delays(view, names), bandwidths(view, names), homes)


def has_begun(directory: Directory) -> bool:
    """Return whether a ready peer announces that it has finished a training step."""
    return any(peer.training_step > 0 for peer in directory.peers().values() if peer.life is State.READY)
