"""Averaging among several trainers of one adapter: their vectors as bytes, the bound on each of them, and the mean.

A vector strings together the adapter's trained tensors, layer by layer: gradients of a step, or changes of weights. Shape letter: N
elements of all tensors together.
"""

from __future__ import annotations

import asyncio
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Protocol

import safetensors.torch
import torch
from torch import Tensor

from swarmnode.codec.tensors import SPARSE_CODECS, Codec, DType, TensorInfo, payload_bytes
from swarmnode.codec.training_messages import MAX_NORM
from swarmnode.codec.tuning_messages import MAX_SHARE_LABELS, PIECE_BYTES, SharePiece
from swarmnode.compress.codecs import LARGEST_IN_FP16, decode_values, encode_values, payload_of
from swarmnode.compute.training.averaging.gradient_compressor import ACCOUNTED
from swarmnode.errors import ErrorCode, ProtocolError
from swarmnode.links.link_config import LinkConfig
from swarmnode.net.interfaces import Buffer
from swarmnode.swarm.records.run import Run
from swarmnode.tuning.adapter_parts import decode_state
from swarmnode.tuning.client.state_shapes import WEIGHT, AdapterState, StateShapes

BOUND = 4.0
"""Largest norm of another trainer's vector, relative to the leader's own or to the median of others"""
MOST_NORM = 1e19
"""Largest norm of a vector: sums over trainers, and squares as AdamW takes them, are still float32"""
MEASURING_HOMES = 3
"""Fewest homes of other trainers whose median is a measure: of two, either one would decide it"""


def patient(links: LinkConfig) -> LinkConfig:
    """Return the settings of links between trainers. A trainer that reads data or loads libraries may say nothing for seconds."""
    return replace(links, heartbeat=replace(links.heartbeat, min_silence_s=links.heartbeat.max_silence_s))


@dataclass(frozen=True)
class SharedRun:
    """Rule of averaging among trainers of one adapter: the gradients of each step, or the changes of weights in `every` steps."""

    run: Run
    every: int
    codec: Codec

    def check(self) -> None:
        """Raise ValueError if vectors cannot be encoded so."""
        if self.codec in SPARSE_CODECS:
            raise ValueError(f"{self.codec.name} is no codec between trainers of an adapter")

    def ends_at(self, step: int) -> bool:
        """Return whether a round of averaging ends `step`."""
        return (step + 1) % self.every == 0 or step + 1 == self.run.steps

    def next_end(self, step: int) -> int:
        """Return the last step of the round that has `step` in it."""
        return min(step - step % self.every + self.every, self.run.steps) - 1

    @property
    def most_labels(self) -> int:
        """Upper bound of the labels of one trainer in a round."""
        return self.every * self.run.batch * max(1, self.run.sequence)


@dataclass(frozen=True)
class TrainerPart:
    """Vector of one trainer, or the mean of several: vector_N (float32), a mean over `labels` labels, and their mean loss.

    `home` is the address group of another trainer; trainers of one home count as one measure. Raises ProtocolError if the loss is
    NaN, or too large for the sums that it is part of.
    """

    vector_N: Tensor
    labels: int
    loss: float
    home: str = ""

    def __post_init__(self) -> None:
        if not abs(self.loss) <= MAX_NORM:
            raise ProtocolError(f"a loss of {self.loss:g} is no loss", code=ErrorCode.NOT_FINITE)

    @property
    def norm(self) -> float:
        """Norm of the vector."""
        return float(torch.linalg.vector_norm(self.vector_N, dtype=torch.float64))


def mean_of(parts: Sequence[TrainerPart], norm_before: float = 0.0) -> TrainerPart:
    """Return the mean of the trainers' parts, each weighed by its labels. The first one is the leader's own.

    Another part is scaled down if its norm is above `BOUND` times the leader's, or `norm_before`, the leader's in its last round
    with labels, if it has none now. If others of at least `MEASURING_HOMES` homes have labels, their median takes the place of the
    leader's norm if it is larger; of each home the smallest norm counts.
    """
    norms = [part.norm for part in parts]
    measure = norms[0] if parts[0].labels else norm_before
    homes: dict[str, float] = {}
    for part, norm in zip(parts[1:], norms[1:], strict=True):
        if part.labels:
            homes[part.home] = min(norm, homes.get(part.home, norm))
    if len(homes) >= MEASURING_HOMES:
        measure = max(measure, statistics.median_low(homes.values()))
    most = BOUND * measure
    labels = sum(part.labels for part in parts)
    mean_N = torch.zeros_like(parts[0].vector_N)
    for part, norm in zip(parts, norms, strict=True):
        bound = 1.0 if part is parts[0] or norm <= most else most / norm
        mean_N.add_(part.vector_N, alpha=bound * part.labels / max(1, labels))
    loss = math.fsum(part.loss * part.labels for part in parts) / max(1, labels)
    return TrainerPart(mean_N, labels, loss)


def share_pieces(step: int, part: TrainerPart, raw: bytes) -> Iterator[tuple[SharePiece, bytes]]:
    """Yield the messages for a part whose vector is encoded as `raw`, each with its payload."""
    labels = min(part.labels, MAX_SHARE_LABELS)  # of a mean, only told
    for offset in range(0, len(raw), PIECE_BYTES):
        yield SharePiece(step, offset, len(raw), labels, part.loss), raw[offset : offset + PIECE_BYTES]


@dataclass(frozen=True)
class VectorLayout:
    """Order and shapes of the tensors in an adapter's vectors, as (layer, name, shape). Made by `of`."""

    shapes: StateShapes
    tensors: tuple[tuple[int, str, tuple[int, ...]], ...]

    @classmethod
    def of(cls, shapes: StateShapes) -> VectorLayout:
        """Return the layout of an adapter with tensors of these shapes."""
        named = sorted((unit, name, shape) for unit, tensors in shapes.units.items() for name, shape in tensors.items())
        return cls(shapes, tuple(named))

    def vector(self, layers: Mapping[int, bytes]) -> Tensor:
        """Return the weights, or the sums of gradients, in the files of all layers as a vector_N."""
        found = {unit: decode_state(raw) for unit, raw in layers.items()}
        return torch.cat([found[unit][f"{WEIGHT}{name}"].flatten() for unit, name, _ in self.tensors])

    def files(self, vector_N: Tensor) -> dict[int, bytes]:
        """Return the files of all layers with the tensors of a vector, as a hop takes gradients."""
        return {unit: safetensors.torch.save(tensors) for unit, tensors in self._by_layer(vector_N).items()}

    def with_weights(self, state: AdapterState, vector_N: Tensor) -> AdapterState:
        """Return the state with other weights."""
        changed = self._by_layer(vector_N)
        layers = {
            unit: safetensors.torch.save({**decode_state(raw), **changed[unit]}) for unit, raw in state.layers.items()
        }
        return AdapterState(state.step, layers)

    def _by_layer(self, vector_N: Tensor) -> dict[int, dict[str, Tensor]]:
        found: dict[int, dict[str, Tensor]] = {unit: {} for unit in self.shapes.units}
        for (unit, name, _), part in zip(self.tensors, self._split(vector_N), strict=True):
            found[unit][f"{WEIGHT}{name}"] = part.clone()
        return found

    def _split(self, vector_N: Tensor) -> list[Tensor]:
        parts = torch.split(vector_N, [prod(shape) for _, _, shape in self.tensors])
        return [part.view(shape) for part, (_, _, shape) in zip(parts, self.tensors, strict=True)]

    # -- as bytes

    def size_bytes(self, codec: Codec) -> int:
        """Return the bytes of an encoded vector."""
        return sum(map(payload_bytes, self._infos(codec)))

    def encode(self, vector_N: Tensor, codec: Codec) -> bytes:
        """Return a vector as bytes. Only matrices are compressed."""
        return payload_of(encode_values(self._split(vector_N), codec)[1])

    def decode(self, raw: Buffer, codec: Codec) -> Tensor:
        """Return the vector_N in `raw`. Raises ProtocolError if the length is another one, or the norm NaN or above `MOST_NORM`."""
        vector_N = torch.cat([one.flatten() for one in decode_values(self._infos(codec), raw, "cpu")])
        if not torch.linalg.vector_norm(vector_N, dtype=torch.float64) <= MOST_NORM:
            raise ProtocolError("a vector holds NaN, infinity or huge numbers", code=ErrorCode.NOT_FINITE)
        return vector_N

    def _infos(self, codec: Codec) -> list[TensorInfo]:
        return [
            TensorInfo(codec if len(shape) > 1 else Codec.NONE, DType.FLOAT32, shape) for _, _, shape in self.tensors
        ]


class VectorEncoder:
    """Encoder of the vectors that one trainer sends. Coarse codecs have error feedback: the rest is added the next time."""

    def __init__(self, layout: VectorLayout, codec: Codec) -> None:
        self._layout = layout
        self._codec = codec
        self._rest_N: Tensor | None = None

    def encode(self, vector_N: Tensor) -> tuple[bytes, Tensor]:
        """Return the bytes of a vector, and the vector that a receiver reads from them."""
        wanted_N = vector_N if self._rest_N is None else vector_N + self._rest_N
        if self._codec == Codec.FP16:
            # else a mean of large vectors would be infinite
            wanted_N = wanted_N.clamp(-LARGEST_IN_FP16, LARGEST_IN_FP16)
        raw = self._layout.encode(wanted_N, self._codec)
        read_N = self._layout.decode(bytearray(raw), self._codec)
        if self._codec in ACCOUNTED:
            self._rest_N = wanted_N - read_N
        return raw, read_N

    def forget(self) -> None:
        """Forget the rest: its round went on without this trainer."""
        self._rest_N = None


class Moved(Exception):
    """Signal that the other trainers are at another step. This trainer goes on from `state`, the leader's."""

    def __init__(self, state: AdapterState) -> None:
        super().__init__(f"the leader is at step {state.step}")
        self.state = state


class Ended(Exception):
    """Signal that the leader has ended the tuning in order."""


class Partners(Protocol):
    """Interface of a trainer to the others of its adapter: the leader's to its followers, or a follower's to the leader."""

    averaging: SharedRun
    layout: VectorLayout

    @property
    def wants_state(self) -> bool:
        """Whether a trainer waits for this one's state, to take part from now on."""

    async def begin(self, stop: asyncio.Event) -> AdapterState | None:
        """Wait until the tuning begins or `stop` is set. Returns the state to begin from; None: this trainer's own.

        Raises LeaderLost.
        """

    def give(self, state: AdapterState) -> None:
        """Send a state to the trainers that wait for it."""

    async def average(self, step: int, part: TrainerPart) -> TrainerPart:
        """Return the mean of all trainers' parts, which end `step`; equal for all of them.

        Raises Moved if the others went on without this trainer, LeaderLost, Ended.
        """
