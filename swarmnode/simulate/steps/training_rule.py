"""The rule by which simulated peers that train choose their units: `plan/training/placement.py`, on what all have announced and
with links as measured. As long as units have nobody, whoever comes takes all that fits, where most are missing."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from swarmnode.net.interfaces import PeerId
from swarmnode.plan.spans.placement import HOLDING, Joiner, choose_span
from swarmnode.plan.training.layout import StageLayout, common_layout
from swarmnode.plan.training.placement import TrainingPeers, choose_training_place
from swarmnode.plan.training.step_forecast import StepForecast, TrainingLoad, TrainingNetwork
from swarmnode.plan.view import Span, View
from swarmnode.simulate.environment.peers import Peer
from swarmnode.simulate.environment.world import World
from swarmnode.simulate.settings import TrainSettings
from swarmnode.simulate.steps.all_reduce import averaged_bytes
from swarmnode.simulate.steps.encoder import Encoder


class TrainingRule:
    """Of one world and one run."""

    def __init__(self, world: World, settings: TrainSettings, encoder: Encoder) -> None:
        model = world.model
        values = (settings.microbatch, settings.sequence, model.hidden)
        gradient_bytes = (averaged_bytes(model.parameters[unit], settings.averaging) for unit in range(model.units))
        self._load = TrainingLoad(
            settings.microbatches,
            float(encoder.expected_bytes([0], values)[0, 0]),
            np.array(list(gradient_bytes)) / settings.averaging.every,
            np.ones(model.units),  # units are alike to those who announce units/s
        )
        self._world = world
        self._tokens = settings.tokens
        self._met: dict[PeerId, Peer] = {}  # also those that are gone, of which not everybody has heard
        self._common: tuple[list[Peer], StepForecast, StageLayout] | None = None  # of the peers that were seen last

    def __repr__(self) -> str:
        return f"<TrainingRule for {self._load.units} units and {self._load.microbatches} microbatches>"

    def choose(self, view: View, joiner: Joiner) -> Span:
        """Where this peer should stand."""
        self._met.update(self._world.by_id)
        others = [peer for peer in view.peers if peer.state in HOLDING and peer.peer != joiner.peer]
        seen = sorted([*others, joiner.seen_in(view)], key=lambda peer: peer.peer)
        met = [self._met[peer.peer] for peer in seen]
        forecast, layout = self._look_at(met)
        peers = TrainingPeers([peer.span for peer in seen], [peer.capacity_units for peer in met])
        own = [peer.peer for peer in seen].index(joiner.peer)
        place = choose_training_place(forecast, layout, peers, own)
        return choose_span(view, joiner) if place is None else place.span

    def _look_at(self, peers: list[Peer]) -> tuple[StepForecast, StageLayout]:
        """The same for all who see the same peers."""
        if self._common is None or self._common[0] != peers:
            forecast = StepForecast(self._load, self._network(peers))
            layout = common_layout(forecast, [peer.capacity_units for peer in peers])
            self._common = peers, forecast, layout
        return self._common[1:]

    def _network(self, peers: Sequence[Peer]) -> TrainingNetwork:
        there_and_back_s = [
            peer.device.prompt_s(1, self._tokens) + peer.device.backward_s(1, self._tokens) for peer in peers
        ]
        return TrainingNetwork(
            1 / np.array(there_and_back_s), *self._world.links.between([peer.index for peer in peers])
        )
