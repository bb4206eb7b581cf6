"""What values travel as, link by link and direction by direction: as the controllers of
nodes choose it (`plan/compression.py`)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from swarmnode.codec.tensors import SPARSE_CODECS, Codec, DType, TensorInfo, payload_bytes
from swarmnode.errors import UsageError
from swarmnode.plan.compression import LADDER, Controller, Look, encoded_bytes
from swarmnode.plan.spans.flow import Floats
from swarmnode.plan.sparsity import SPARSE_RULES, topk_ratio
from swarmnode.plan.training.step_model import Way
from swarmnode.simulate.environment.links import Links

AUTO = "auto"
LARGEST_RATIO = 100.0  # of top-k
FIXED = tuple(codec.name.lower() for codec in Codec if codec not in SPARSE_CODECS)

Direction = tuple[int, int, Way]
"""(sender, receiver, which way through the model)"""


class Encoder:
    """`mode`: auto, the name of a codec for all links, or a rule of top-k (`plan/sparsity.py`). `beat_s`: as the coordinator
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
