"""A microbatch on its way through simulated peers, which may be lost, over links as they really are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from swarmnode.net.interfaces import PeerId
from swarmnode.plan.training.step_model import Bench, Passage, Way
from swarmnode.plan.view import Span
from swarmnode.plan.virtual_clock import VirtualClock
from swarmnode.simulate.environment.peers import Peer
from swarmnode.simulate.environment.world import World
from swarmnode.simulate.settings import TrainSettings
from swarmnode.simulate.steps.encoder import Encoder


@dataclass(eq=False)
class SimulatedStage:
    """A peer that trains, in one of its lives."""

    peer: Peer
    name: PeerId
    bench: Bench
    life: int
    layers: Callable[[Span], float]

    @property
    def lives(self) -> bool:
        """Whether it still answers."""
        return self.peer.life == self.life


class MicrobatchOwner(Protocol):
    """What a microbatch needs of the training that it belongs to (`training.py`)."""

    world: World
    clock: VirtualClock
    settings: TrainSettings
    encoder: Encoder

    def done(self, attempt: SimulatedMicrobatch) -> None:
        """Its gradient is back, and counted by every hop."""


class SimulatedMicrobatch(Passage):
    """One attempt at microbatch `number` along `route`."""

    def __init__(self, training: MicrobatchOwner, number: int, route: Sequence[tuple[SimulatedStage, Span]]) -> None:
        super().__init__([stage.bench for stage, _ in route])
        self.number = number
        self.route = list(route)
        self._training = training

    def __repr__(self) -> str:
        return f"<SimulatedMicrobatch of microbatch {self.number}: {len(self.counted)} of {len(self.route)} hops have counted it>"

    def start(self, place: int) -> None:
        """Its samples go from the trainer, who stands at `place` of the links, to the first hop."""
        settings, model = self._training.settings, self._training.world.model
        self._travel(place, 0, model.input_bytes(settings.microbatch, settings.sequence), Way.FORWARD)

    def passes(self, name: PeerId) -> bool:
        """Whether a peer is on its route."""
        return any(stage.name == name for stage, _ in self.route)

    def takes_s(self, way: Way, hop: int) -> float:
        """Return what the device of a hop takes for a pass."""
        stage, span = self.route[hop]
        device = stage.peer.device
        computes_s = device.prompt_s if way is Way.FORWARD else device.backward_s
        return computes_s(stage.layers(span), self._training.settings.tokens)

    def hand_on(self, way: Way, sender: int, receiver: int) -> None:
        """Send it over the simulated links, encoded as these need it."""
        settings, model = self._training.settings, self._training.world.model
        here, there = (self.route[hop][0].peer.index for hop in (sender, receiver))
        unit = self.route[max(sender, receiver)][1].start
        shape = model.crossing(unit, settings.microbatch, settings.sequence, back=way is Way.BACKWARD)
        self._travel(here, receiver, self._training.encoder.size_bytes((here, there, way), shape), way)

    def done(self) -> None:
        """Tell the training."""
        self._training.done(self)

    def _travel(self, sender: int, hop: int, size_bytes: float, way: Way) -> None:
        clock, links = self._training.clock, self._training.world.links
        arrives_s = links.send(clock.now_s, sender, self.route[hop][0].peer.index, size_bytes)
        clock.at(arrives_s, partial(self._came, way, hop))

    def _came(self, way: Way, hop: int) -> None:
        if self.route[hop][0].lives and not self.called_back:
            self.arrived(way, hop)
