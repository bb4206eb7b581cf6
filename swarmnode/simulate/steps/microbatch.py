"""Simulated microbatch: its passage through peers that may be lost, over the simulated links, and the encoder of its messages."""

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
from swarmnode.plan.training.step_forecast import Bench, Passage, Way
from swarmnode.plan.view import Span
from swarmnode.plan.virtual_clock import VirtualClock
from swarmnode.simulate.environment.links import Links
from swarmnode.simulate.environment.peers import Peer
from swarmnode.simulate.environment.world import World
from swarmnode.simulate.settings import TrainSettings

AUTO = "auto"
LARGEST_RATIO = 100.0  # largest compression ratio of top-k
FIXED = tuple(codec.name.lower() for codec in Codec if codec not in SPARSE_CODECS)

Direction = tuple[int, int, Way]
"""(sender, receiver, forward or backward): one direction of a link, with peers by index."""


class Encoder:
    """Choice of the codec for each direction of a link. `mode` is auto, the name of a codec for all links, or a rule of top-k
    (`plan/compression.py`). `beat_s` is the coordinator's seconds between two microbatches. Values are float32, as on stages.
    Raises UsageError if `mode` is unknown."""

    def __init__(self, links: Links, mode: str) -> None:
        if mode not in (AUTO, *SPARSE_RULES, *FIXED):
            raise UsageError(f"--compress {mode}: choose {', '.join((AUTO, *FIXED, *SPARSE_RULES))}")
        self.beat_s = 0.0
        self._links = links
        self._mode = mode
        self._controllers: dict[Direction, Controller] = {}
        self._slowest_s = 0.0  # longest transfer of all links seen, uncompressed
        self._last_bytes: dict[tuple[int, int], int] = {}  # size of the last message between two peers

    def size_bytes(self, link: Direction, shape: tuple[int, ...]) -> int:
        """Return the bytes of values of `shape`, encoded for the direction `link`."""
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
        """Return [N, N] bytes of values between `peers`: the size of the last message from row to column. If there was none,
        the size of `shape` with the fixed codec, or uncompressed."""
        fixed = Codec.NONE if self._mode not in FIXED else Codec[self._mode.upper()]
        size_NN = np.full((len(peers), len(peers)), encoded_bytes([TensorInfo(fixed, DType.FLOAT32, shape)], fixed))
        places = {peer: number for number, peer in enumerate(peers)}
        for (sender, receiver), size_bytes in self._last_bytes.items():
            if sender in places and receiver in places:
                size_NN[places[sender], places[receiver]] = size_bytes
        return size_NN.astype(float)

    def choices(self) -> dict[Direction, Codec]:
        """Return the current codec of each direction; empty unless `mode` is auto."""
        return {link: controller.choice.codec for link, controller in self._controllers.items()}

    def _choose(self, link: Direction, info: TensorInfo) -> Codec:
        if link not in self._controllers:
            self._controllers[link] = Controller(LADDER)
        directions = 2  # a stage in the middle sends both ways
        look = Look([info], self._links.bandwidth_bps(link[0], link[1]), self.beat_s, directions)
        return self._controllers[link].look(look).codec

    def _topk_bytes(self, link: Direction, info: TensorInfo) -> int:
        """Return the bytes of `info` by the top-k rule of the mode, which may depend on the slowest link seen; a ratio of 1
        leaves it uncompressed."""
        link_s = encoded_bytes([info], Codec.NONE) * 8 / self._links.bandwidth_bps(link[0], link[1])
        self._slowest_s = max(self._slowest_s, link_s)
        ratio = topk_ratio(self._mode, link_s, self._slowest_s, LARGEST_RATIO)
        if ratio <= 1:
            return encoded_bytes([info], Codec.NONE)
        kept = max(1, int(math.prod(info.shape) / ratio))
        return payload_bytes(TensorInfo(Codec.TOPK, info.dtype, info.shape, kept))


@dataclass(eq=False)
class SimulatedStage:
    """Training stage of a simulated peer, from the peer's start until it vanishes or loads other layers."""

    peer: Peer
    name: PeerId
    bench: Bench
    life: int
    layers: Callable[[Span], float]

    @property
    def lives(self) -> bool:
        """Whether the peer has neither vanished nor moved to other layers since, so that this stage still answers."""
        return self.peer.life == self.life


class MicrobatchOwner(Protocol):
    """Interface of the training that a microbatch belongs to (`training.py`)."""

    world: World
    clock: VirtualClock
    settings: TrainSettings
    encoder: Encoder

    def done(self, attempt: SimulatedMicrobatch) -> None:
        """Take in `attempt`, whose backward pass has reached the first hop."""


class SimulatedMicrobatch(Passage):
    """Attempt at a simulated microbatch `number` along a `route` of stages."""

    def __init__(self, training: MicrobatchOwner, number: int, route: Sequence[tuple[SimulatedStage, Span]]) -> None:
        super().__init__([stage.bench for stage, _ in route])
        self.number = number
        self.route = list(route)
        self._training = training

    def start(self, place: int) -> None:
        """Send the samples from the trainer, whose index in the links is `place`, to the first hop."""
        settings, model = self._training.settings, self._training.world.model
        self._travel(place, 0, model.input_bytes(settings.microbatch, settings.sequence), Way.FORWARD)

    def passes(self, name: PeerId) -> bool:
        """Return whether the peer `name` is on the route."""
        return any(stage.name == name for stage, _ in self.route)

    def takes_s(self, way: Way, hop: int) -> float:
        """Return the seconds that the device of hop `hop` takes for a pass in direction `way`."""
        stage, span = self.route[hop]
        device = stage.peer.device
        computes_s = device.prompt_s if way is Way.FORWARD else device.backward_s
        return computes_s(stage.layers(span), self._training.settings.tokens)

    def hand_on(self, way: Way, sender: int, receiver: int) -> None:
        """Send the values or gradients from hop `sender` to hop `receiver`, encoded for that link."""
        settings, model = self._training.settings, self._training.world.model
        here, there = (self.route[hop][0].peer.index for hop in (sender, receiver))
        unit = self.route[max(sender, receiver)][1].start
        shape = model.crossing(unit, settings.microbatch, settings.sequence, back=way is Way.BACKWARD)
        self._travel(here, receiver, self._training.encoder.size_bytes((here, there, way), shape), way)

    def done(self) -> None:
        """Report the end of the microbatch to the training."""
        self._training.done(self)

    def _travel(self, sender: int, hop: int, size_bytes: float, way: Way) -> None:
        clock, links = self._training.clock, self._training.world.links
        arrives_s = links.send(clock.now_s, sender, self.route[hop][0].peer.index, size_bytes)
        clock.at(arrives_s, partial(self._came, way, hop))

    def _came(self, way: Way, hop: int) -> None:
        if self.route[hop][0].lives and not self.called_back:
            self.arrived(way, hop)
