"""The rule by which simulated peers that train choose their units: that of live nodes (`plan/training/rule.py`), on what all have
announced and with speeds and links as measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from swarmnode.compute.memory import STATE_BYTES
from swarmnode.net.interfaces import PeerId
from swarmnode.plan.training.averaging_forecast import averaged_bytes
from swarmnode.plan.training.rule import TrainingRule
from swarmnode.plan.training.step_forecast import TrainingLoad, TrainingNetwork
from swarmnode.plan.view import PeerView, View
from swarmnode.simulate.environment.peers import Peer
from swarmnode.simulate.environment.world import World
from swarmnode.simulate.settings import TrainSettings
from swarmnode.simulate.steps.encoder import Encoder


def simulated_rule(
    world: World, settings: TrainSettings, encoder: Encoder, has_begun: Callable[[], bool]
) -> TrainingRule:
    """Of one world and one run."""
    model, met = world.model, _Met(world, settings.tokens)
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
    )
    return TrainingRule(load, met.network, lambda peer: met.peer(peer.peer).capacity_units, has_begun)


class _Met:
    """Peers by name, also those that are gone, of which not everybody has heard."""

    def __init__(self, world: World, tokens: int) -> None:
        self._world = world
        self._tokens = tokens
        self._known: dict[PeerId, Peer] = {}

    def peer(self, name: PeerId) -> Peer:
        """The one of this name."""
        if name not in self._known:
            self._known.update(self._world.by_id)
        return self._known[name]

    def network(self, _view: View, seen: Sequence[PeerView]) -> TrainingNetwork:
        """How fast they compute, and the links between them."""
        peers = [self.peer(peer.peer) for peer in seen]
        there_and_back_s = [
            peer.device.prompt_s(1, self._tokens) + peer.device.backward_s(1, self._tokens) for peer in peers
        ]
        return TrainingNetwork(
            1 / np.array(there_and_back_s), *self._world.links.between([peer.index for peer in peers])
        )
