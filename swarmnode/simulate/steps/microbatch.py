"""A microbatch on its way: forward along its route, and its gradient back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from swarmnode.compute.executor import Urgency
from swarmnode.net.interfaces import PeerId
from swarmnode.plan.view import Span
from swarmnode.simulate.clock import SimulatedClock
from swarmnode.simulate.environment.peers import Peer
from swarmnode.simulate.environment.world import World
from swarmnode.simulate.settings import TrainSettings
from swarmnode.simulate.steps.bench import SimulatedBench
from swarmnode.simulate.steps.encoder import BACKWARD, FORWARD, Encoder


@dataclass(eq=False)
class SimulatedStage:
    """A peer that trains, in one of its lives."""

    peer: Peer
    name: PeerId
    bench: SimulatedBench
    life: int
    layers: Callable[[Span], float]

    @property
    def lives(self) -> bool:
        """Whether it still answers."""
        return self.peer.life == self.life


class MicrobatchOwner(Protocol):
    """What a microbatch needs of the training that it belongs to (`training.py`)."""

    world: World
    clock: SimulatedClock
    settings: TrainSettings
    encoder: Encoder

    def done(self, attempt: SimulatedMicrobatch) -> None:
        """Its gradient is back, and counted by every hop."""


class SimulatedMicrobatch:
    """One attempt at microbatch `number` along `route`. `counted`: the hops that have its gradient."""

    def __init__(self, training: MicrobatchOwner, number: int, route: Sequence[tuple[SimulatedStage, Span]]) -> None:
        self.number = number
        self.route = list(route)
        self.counted: set[int] = set()
        self.called_back = False
        self._training = training
        self._tokens = training.settings.tokens

    def __repr__(self) -> str:
        return f"<SimulatedMicrobatch of microbatch {self.number}: {len(self.counted)} of {len(self.route)} hops have counted it>"

    def start(self, place: int) -> None:
        """Its samples go from the trainer, who stands at `place` of the links, to the first hop."""
        settings, model = self._training.settings, self._training.world.model
        self._travel(place, 0, model.input_bytes(settings.microbatch, settings.sequence), self._forward)

    def passes(self, name: PeerId) -> bool:
        """Whether a peer is on its route."""
        return any(stage.name == name for stage, _ in self.route)

    def _travel(self, sender: int, index: int, size_bytes: float, arrive: Callable[[int], None]) -> None:
        clock, links = self._training.clock, self._training.world.links
        receiver = self.route[index][0]
        arrives_s = links.send(clock.now_s, sender, receiver.peer.index, size_bytes)
        clock.at(arrives_s, lambda: arrive(index) if receiver.lives and not self.called_back else None)

    def _hand_on(self, index: int, step: int, direction: str, arrive: Callable[[int], None]) -> None:
        sender, receiver = self.route[index][0].peer.index, self.route[index + step][0].peer.index
        settings, model = self._training.settings, self._training.world.model
        unit = self.route[max(index, index + step)][1].start
        shape = model.crossing(unit, settings.microbatch, settings.sequence, back=direction == BACKWARD)
        size_bytes = self._training.encoder.size_bytes((sender, receiver, direction), shape)
        self._travel(sender, index + step, size_bytes, arrive)

    def _forward(self, index: int) -> None:
        stage, span = self.route[index]
        takes_s = stage.peer.device.prompt_s(stage.layers(span), self._tokens)
        stage.bench.submit(Urgency.FORWARD, takes_s, lambda: self._forwarded(index))

    def _forwarded(self, index: int) -> None:
        if self.called_back:
            return
        if index + 1 < len(self.route):
            self._hand_on(index, 1, FORWARD, self._forward)
        else:
            self._backward(index)

    def _backward(self, index: int) -> None:
        stage, span = self.route[index]
        takes_s = stage.peer.device.backward_s(stage.layers(span), self._tokens)
        stage.bench.submit(Urgency.BACKWARD, takes_s, lambda: self._backwarded(index))

    def _backwarded(self, index: int) -> None:
        if self.called_back:
            return
        self.counted.add(index)
        if index:
            self._hand_on(index, -1, BACKWARD, self._backward)
        else:
            self._training.done(self)
