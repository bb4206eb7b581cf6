"""Simulated microbatch: its way through peers that may be lost, over links as they really are, and the encoder of what hops hand
on."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np

from swarmnode.codec.tensors import SPARSE_CODECS, Codec, DType, TensorInfo, payload_bytes
from swarmnode.errors import UsageError
from swarmnode.net.interfaces import PeerId
from swarmnode.plan.compression import LADDER, SPARSE_RULES, Controller, Look, encoded_bytes, topk_ratio
from swarmnode.plan.spans.flow import Floats
from swarmnode.plan.training.step_model import Bench, Passage, Way
from swarmnode.plan.view import Span
from swarmnode.plan.virtual_clock import VirtualClock
from swarmnode.simulate.environment.links import Links
from swarmnode.simulate.environment.peers import Peer
from swarmnode.simulate.environment.world import World
from swarmnode.simulate.settings import TrainSettings

AUTO = "auto"
LARGEST_RATIO = 100.0  # of top-k
FIXED = tuple(codec.name.lower() for codec in Codec if codec not in SPARSE_CODECS)

Direction = tuple[int, int, Way]
"""(sender, receiver, which way through the model)"""


class Encoder:
    """`mode`: auto, the name of a codec for all links, or a rule of top-k (`plan/compression.py`). `beat_s`: as the coordinator
    tells it. Values are float32, as stages compute."""

    def __init__(self, links: Links, mode: str) -> None:
        if mode not in (AUTO, *SPARSE_RULES, *FIXED):
            raise UsageError(f"--compress {mode}: choose {', '.join((AUTO, *FIXED, *SPARSE_RULES))}")
        self.beat_s = 0.0
        self._links = links
        self._mode = mode
        self._controllers: dict[Direction, Controller] = {}
        self._slowest_s = 0.0  # of all links so far, uncompressed
        self._last_bytes: dict[tuple[int, int], int] = {}  # of what went from one peer to another

    def __repr__(self) -> str:
        return f"<Encoder {self._mode}, {len(self._controllers)} directions, beat {self.beat_s:.3g} s>"

    def size_bytes(self, link: Direction, shape: tuple[int, ...]) -> int:
        """Of values of this shape, encoded for a direction of a link."""
        plain = TensorInfo(Codec.NONE, DType.FLOAT32, shape)
        if self._mode == AUTO:
            size_bytes = encoded_bytes([plain], self._choose(link, plain))
        elif self._mode in SPARSE_RULES:
            size_bytes = self._topk_bytes(link, plain)
        else:
            size_bytes = encoded_bytes([plain], Codec[self._mode.upper()])
        self._last_bytes[link[:2]] = size_bytes
        return size_bytes

    def expected_bytes(self, peers: Sequence[int], shape: tuple[int, ...]) -> Floats:
        """[N, N]: what values of this shape would weigh from each of these peers to each other: as the last ones there."""
        fixed = Codec.NONE if self._mode not in FIXED else Codec[self._mode.upper()]
        size_NN = np.full((len(peers), len(peers)), encoded_bytes([TensorInfo(fixed, DType.FLOAT32, shape)], fixed))
        places = {peer: number for number, peer in enumerate(peers)}
        for (sender, receiver), size_bytes in self._last_bytes.items():
            if sender in places and receiver in places:
                size_NN[places[sender], places[receiver]] = size_bytes
        return size_NN.astype(float)

    def choices(self) -> dict[Direction, Codec]:
        """What each direction travels as now."""
        return {link: controller.choice.codec for link, controller in self._controllers.items()}

    def _choose(self, link: Direction, info: TensorInfo) -> Codec:
        if link not in self._controllers:
            self._controllers[link] = Controller(LADDER)
        directions = 2  # a stage in the middle sends both ways
        look = Look([info], self._links.bandwidth_bps(link[0], link[1]), self.beat_s, directions)
        return self._controllers[link].look(look).codec

    def _topk_bytes(self, link: Direction, info: TensorInfo) -> int:
        """Against the slowest link of all so far."""
        link_s = encoded_bytes([info], Codec.NONE) * 8 / self._links.bandwidth_bps(link[0], link[1])
        self._slowest_s = max(self._slowest_s, link_s)
        ratio = topk_ratio(self._mode, link_s, self._slowest_s, LARGEST_RATIO)
        if ratio <= 1:
            return encoded_bytes([info], Codec.NONE)
        kept = max(1, int(math.prod(info.shape) / ratio))
        return payload_bytes(TensorInfo(Codec.TOPK, info.dtype, info.shape, kept))


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
