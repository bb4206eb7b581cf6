"""Rule for the choice of layers by simulated peers that train, and shares of the pipelines of a plan."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from swarmnode.compute.capacity.memory import STATE_BYTES
from swarmnode.net.interfaces import PeerId
from swarmnode.plan.training.averaging import averaged_bytes, may_cluster
from swarmnode.plan.training.rule import StepOutlook, TrainingRule
from swarmnode.plan.training.step_forecast import TrainingLoad, TrainingNetwork
from swarmnode.plan.training.wiring import Replica
from swarmnode.plan.view import PeerView, View
from swarmnode.simulate.environment.world import World
from swarmnode.simulate.settings import TrainSettings
from swarmnode.simulate.steps.microbatch import Encoder


def beat_s(pipeline: Sequence[PeerId], workers: Mapping[PeerId, Replica]) -> float:
    """Return the seconds between two microbatches that leave `pipeline`: those of its slowest stage. Lost peers are skipped;
    the result is infinite if all are lost."""
    return max(
        (workers[peer].span.units * workers[peer].unit_s for peer in pipeline if peer in workers), default=math.inf
    )


def share_out(microbatches: int, beats_s: Sequence[float]) -> list[int]:
    """Return the pipeline number of each microbatch: the pipeline that would finish it first, if all begin at once."""
    given = [0] * len(beats_s)
    shared = []
    for _ in range(microbatches):
        first = min(range(len(beats_s)), key=lambda number: ((given[number] + 1) * beats_s[number], given[number]))
        given[first] += 1
        shared.append(first)
    return shared


def simulated_rule(
    world: World, settings: TrainSettings, encoder: Encoder, has_begun: Callable[[], bool]
) -> TrainingRule:
    """Build the placement rule of `world` for the run in `settings`. `has_begun` tells whether a step has been trained."""
    model = world.model
    values = (settings.microbatch, settings.sequence, model.hidden)
    gradient_bytes = (
        averaged_bytes(model.parameters[unit], model.matrix_width, settings.averaging) for unit in range(model.units)
    )
    load = TrainingLoad(
        settings.microbatches,
        float(encoder.expected_bytes([0], values)[0, 0]),
        np.array(list(gradient_bytes)) / settings.averaging.every,
        np.ones(model.units),  # peers announce units/s, so all units count alike
        STATE_BYTES * np.array(model.parameters, dtype=float),
        may_cluster(settings.averaging),
    )

    def network(_view: View, seen: Sequence[PeerView]) -> TrainingNetwork:
        return _network(world, settings.tokens, seen)

    return TrainingRule(
        StepOutlook(lambda: load, network),
        lambda peer: world.met[peer.peer].capacity_units,
        has_begun,
        under_way=lambda: world.clock.now_s > 0,
    )


def _network(world: World, tokens: int, seen: Sequence[PeerView]) -> TrainingNetwork:
    """Return the speeds of the `seen` peers in layers/s, and the links between them."""
    peers = [world.met[peer.peer] for peer in seen]
    there_and_back_s = [peer.device.prompt_s(1, tokens) + peer.device.backward_s(1, tokens) for peer in peers]
    return TrainingNetwork(1 / np.array(there_and_back_s), *world.links.between([peer.index for peer in peers]))
