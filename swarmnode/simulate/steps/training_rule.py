"""The rule by which simulated peers that train choose their units: the nodes' own (`plan/training/rule.py`), on what all have
announced, with the speeds and links of the model."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from swarmnode.compute.capacity.memory import STATE_BYTES
from swarmnode.plan.training.averaging import averaged_bytes, may_cluster
from swarmnode.plan.training.rule import StepOutlook, TrainingRule
from swarmnode.plan.training.step_forecast import TrainingLoad, TrainingNetwork
from swarmnode.plan.view import PeerView, View
from swarmnode.simulate.environment.world import World
from swarmnode.simulate.settings import TrainSettings
from swarmnode.simulate.steps.microbatch import Encoder


def simulated_rule(
    world: World, settings: TrainSettings, encoder: Encoder, has_begun: Callable[[], bool]
) -> TrainingRule:
    """Of one world and one run."""
    model = world.model
    values = (settings.microbatch, settings.sequence, model.hidden)
    gradient_bytes = (
        averaged_bytes(model.parameters[unit], model.matrix_width, settings.averaging) for unit in range(model.units)
    )
    load = TrainingLoad(
        settings.microbatches,
        float(encoder.expected_bytes([0], values)[0, 0]),
        np.array(list(gradient_bytes)) / settings.averaging.every,
        np.ones(model.units),  # units are alike to those who announce units/s
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
    """How fast peers compute, and the links between them."""
    peers = [world.met[peer.peer] for peer in seen]
    there_and_back_s = [peer.device.prompt_s(1, tokens) + peer.device.backward_s(1, tokens) for peer in peers]
    return TrainingNetwork(1 / np.array(there_and_back_s), *world.links.between([peer.index for peer in peers]))
