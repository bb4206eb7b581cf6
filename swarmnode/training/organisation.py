"""Organisation of a training swarm: the rule of placement in training, with loads and links as peers announce them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache, partial

import numpy as np

from swarmnode.compute.capacity.memory import STATE_BYTES, TRAINING_BYTES
from swarmnode.measuring.hardware import Hardware
from swarmnode.peer.host import Host
from swarmnode.peer.placement import Placement, PlacementConfig
from swarmnode.plan.routes.delays import HomeLines, bandwidths, likely_delays, shared_homes
from swarmnode.plan.spans.placement import PlacementRule
from swarmnode.plan.training.averaging import averaged_bytes
from swarmnode.plan.training.rule import SETTLING, StepOutlook, TrainingRule
from swarmnode.plan.training.step_forecast import TrainingLoad, TrainingNetwork
from swarmnode.plan.view import PeerView, View
from swarmnode.swarm.peers.directory import Directory
from swarmnode.swarm.records.announcement import State
from swarmnode.swarm.records.manifest import GRAPH
from swarmnode.swarm.records.run import Run
from swarmnode.swarm.records.sections import StepLoad, middle_load

MICROBATCHES = 32  # of a usual step: places are taken before a trainer comes
POSITIONS, SAMPLES = 1024, 32  # of one of its microbatches, of a language model and of a module
COMMANDS = 5  # of a step: what is fed, leases, what is done; to average, to commit
REMEMBERED_S = 30.0  # what a run asks, after the last one has announced it
FLOAT32_BYTES = 4
MANY_PARAMETERS = 10**6
BELIEVED = 4.0  # times the usual speed, at most: nobody makes all others stand by with what it says of itself


def training_placement(host: Host, hardware: Hardware, config: PlacementConfig) -> Placement:
    """Of one node. It is a step's time that counts, and that every unit has a second holder."""
    assert host.swarm.manifest is not None
    positions = SAMPLES if host.swarm.manifest.kind == GRAPH else POSITIONS
    rule = training_rule(host.directory, hardware, positions, host.clock.monotonic)
    move_policy = replace(config.move_policy, for_gain=False, hysteresis=SETTLING)
    placement_rule = PlacementRule(rule.choose, rule.reconsider, lambda: rule.first_places.awaited)
    return Placement(host, hardware.capacity_units, replace(config, move_policy=move_policy), placement_rule)


def training_rule(directory: Directory, hardware: Hardware, positions: int, clock: Callable[[], float]) -> TrainingRule:
    """Of one swarm. Stages are laid for the run that is announced, and for a usual one before a trainer comes. `positions`: of a
    microbatch of a usual one; samples, of a module."""
    capacity_of = lru_cache(maxsize=1024)(hardware.capacity_of)

    def capacity(peer: PeerView) -> int:
        return max(peer.span.units, capacity_of(peer.memory_bytes))

    usual = StepLoad(MICROBATCHES, positions, 1000 * FLOAT32_BYTES)

    announced = AnnouncedLoad(directory, clock)

    def told() -> StepLoad:
        return known if (known := announced()).all_positions else usual

    load_of = lru_cache(maxsize=8)(partial(training_load, hardware))

    lines = HomeLines(clock)

    def network(view: View, peers: Sequence[PeerView]) -> TrainingNetwork:
        return announced_network(lines.held(view, peers), peers, told().positions)

    return TrainingRule(
        StepOutlook(lambda: load_of(told()), network, clock=clock),
        capacity,
        lambda: has_begun(directory),
        under_way=lambda: bool(announced().all_positions),
        clock=clock,
    )


class AnnouncedLoad:
    """What a step of the run asks that peers announce. It is remembered for a while: where all have just moved, nobody is in the
    run again yet, and they would go back. `clock`: seconds."""

    def __init__(self, directory: Directory, clock: Callable[[], float]) -> None:
        self._directory = directory
        self._clock = clock
        self._newest, self._until_s = StepLoad(), 0.0

    def __repr__(self) -> str:
        return f"<AnnouncedLoad {self._newest}>"

    def __call__(self) -> StepLoad:
        """Nothing where no run is known."""
        ready = [peer for peer in self._directory.peers().values() if peer.life is State.READY]
        newest = middle_load(StepLoad(*peer.step_load) for peer in ready)
        if newest.all_positions:
            self._newest, self._until_s = newest, self._clock() + REMEMBERED_S
        return newest if newest.all_positions or self._clock() >= self._until_s else self._newest


def step_load_of(run: Run, width: int) -> StepLoad:
    """Of a run, of a model of that width."""
    averaging = run.averaging
    each_bytes = averaged_bytes(MANY_PARAMETERS, width, averaging) / averaging.every / MANY_PARAMETERS
    return StepLoad(run.microbatches, run.positions, round(1000 * each_bytes))


def training_load(hardware: Hardware, step: StepLoad) -> TrainingLoad:
    """Of the model."""
    size_bytes_U = np.array(hardware.sizes.weight_bytes, dtype=float)
    return TrainingLoad(
        step.microbatches,
        float(FLOAT32_BYTES * step.positions * hardware.width),
        size_bytes_U / TRAINING_BYTES * step.averaged_millibytes / 1000,
        np.ones(len(size_bytes_U)),  # units are alike to those who announce units/s
        size_bytes_U * STATE_BYTES / TRAINING_BYTES,
        commands=COMMANDS,
    )


def announced_network(view: View, peers: Sequence[PeerView], positions: int = POSITIONS) -> TrainingNetwork:
    """Speeds as announced, the usual one where they were not measured, and links by round trips, coordinates and lines."""
    told_N = np.array([peer.decode_units_per_s for peer in peers])
    usual = float(np.median(told_N[told_N > 0])) if told_N.any() else 1.0
    units_per_s_N = np.where(told_N > 0, np.minimum(told_N, BELIEVED * usual), usual)
    names = [peer.peer for peer in peers]
    homes = shared_homes([peer.home or peer.peer for peer in peers])
    return TrainingNetwork(units_per_s_N / positions, likely_delays(view, names), bandwidths(view, names), homes)


def has_begun(directory: Directory) -> bool:
    """Whether anybody has trained already."""
    return any(peer.training_step > 0 for peer in directory.peers().values() if peer.life is State.READY)
