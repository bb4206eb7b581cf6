"""Gradient compressors: rounds of an agreement on a sum among the replicas of some blocks, and state kept for the next step.

A compressor only does arithmetic: `run` is a generator of rounds, and its driver (`training/averaging`, over links) goes on when
all parts of a round are taken. The kept state changes only by `accept`, when the step is committed, so that a failed attempt leaves
no trace.

Memory besides the two vectors: none of their size without error feedback. With it (int4, int2, top-k, PowerSGD) there is the
attempt's residual, which takes the place of the last one when the step is committed.

Shape letter: N elements of all tensors together.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Iterable, Mapping, Sequence
from itertools import accumulate
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Size, Tensor

from swarmnode.codec.tensors import SPARSE_CODECS, Codec
from swarmnode.compute.training.averaging.parts import FlatVector, Forms
from swarmnode.compute.training.averaging.robust_aggregation import CentredClipping
from swarmnode.compute.training.averaging.round import Round
from swarmnode.swarm.records.run import Averaging

COARSE = frozenset({Codec.INT8, Codec.INT4, Codec.INT2, *SPARSE_CODECS})  # codecs for matrices only
ACCOUNTED = frozenset({Codec.INT4, Codec.INT2, *SPARSE_CODECS})  # codecs that lose too much without error feedback
DECAY = {Codec.TOPK2: 0.95}  # factor of the residual, each time: SparseLoCo's, in place of an outer momentum

Rounds = Generator[Round, None, None]


class Exchange(NamedTuple):
    """Attempt of a member to agree on a sum.

    `weight` is this member's share of the step's samples, and `local` is scaled by it. A listener has weight 0: its values are
    not used. `total` may share its memory with `local`. `clipping` adds up robustly; None adds plainly. `forms` holds the codecs if
    the links decide them. `warm_start`: all members have the last sum, and may go on from its factors.
    """

    local: FlatVector
    total: FlatVector
    weight: float
    clipping: CentredClipping | None = None
    forms: Forms | None = None
    warm_start: bool = False


class Carried(NamedTuple):
    """State that a compressor carries from one step to the next, only for better learning: a replica that lost it starts without.

    `residual_N` is the part of its vectors that this member has not sent yet (None: nothing). `factors` are a low-rank
    compressor's, by the matrix's place, for the columns or, if `transposed`, for the rows.
    """

    residual_N: Tensor | None = None
    factors: Mapping[int, Tensor] = MappingProxyType({})
    transposed: bool = False


class GradientCompressor(ABC):
    """Way of agreeing on the sum of a flat vector. `shapes` are those of the tensors that it strings together."""

    def __init__(self, averaging: Averaging, shapes: Sequence[Size]) -> None:
        self.averaging = averaging
        self.codec = Codec(averaging.codec)
        self.shapes = list(shapes)
        self.sizes = [shape.numel() for shape in shapes]
        self.carried = Carried()
        self._next = self.carried  # adopted once the sum of the last run is committed

    def __repr__(self) -> str:
        residual_N = self.carried.residual_N
        residual = "nothing" if residual_N is None else f"{float(residual_N.norm()):.3g}"
        return f"{type(self).__name__}({self.codec.name}, {sum(self.sizes)} elements, residual {residual})"

    @abstractmethod
    def run(self, exchange: Exchange) -> Rounds:
        """Yield rounds. When all parts of the last one are taken, `exchange.total` is the agreed sum of all members' vectors.

        Raises ValueError if a vector has the wrong length.
        """

    def accept(self) -> None:
        """Adopt the state after the last run, whose sum was committed."""
        self.carried = self._next

    def _begin(self, exchange: Exchange) -> None:
        """Check the vectors, and forget a failed attempt. Raises ValueError if a vector has the wrong length."""
        for vector in (exchange.local, exchange.total):
            if len(vector) != sum(self.sizes):
                raise ValueError(f"a vector of {len(vector)} elements for tensors of {sum(self.sizes)}")
        self._next = self.carried

    def _residuals(self, weight: float) -> Sequence[Tensor] | None:
        """Return the residual by tensor; None if there is none, or this member only listens."""
        residual_N = self.carried.residual_N
        return torch.split(residual_N, self.sizes) if weight and residual_N is not None else None


class PlainGradientCompressor(GradientCompressor):
    """Compressor that sends every element in the run's codec. If that is coarse, 1-D tensors go before, uncompressed.

    Vectors (biases, norms, running statistics) are few, and a codec's group of 64 that mixes a gradient with a counter would lose
    the gradient.
    """

    def run(self, exchange: Exchange) -> Rounds:
        self._begin(exchange)
        total, weight = exchange.total, exchange.weight
        codec, keep, codecs = exchange.forms or Forms(self.codec, self.averaging.keep, frozenset({self.codec}))
        if COARSE.isdisjoint(codecs):
            yield Round(exchange.local, total, weight, codec, codecs=codecs, clipping=exchange.clipping)
            return
        places = range(len(self.shapes))
        vectors = [place for place in places if len(self.shapes[place]) < 2]
        matrices = [place for place in places if len(self.shapes[place]) >= 2]
        if vectors:
            yield self._round(exchange, vectors, Codec.NONE)
        if matrices:
            residuals = self._residuals(weight)
            accounted = weight > 0 and feeds_back(self.averaging)
            left_N = torch.zeros(len(total), device=total.device) if accounted else None
            yield self._round(
                exchange,
                matrices,
                codec,
                keep=keep,
                codecs=codecs,
                residual=None if residuals is None else _pick(residuals, matrices),
                left_over=None if left_N is None else _pick(torch.split(left_N, self.sizes), matrices),
            )
            if left_N is not None:
                self._next = Carried(left_N.mul_(DECAY.get(codec, 1.0)))

    def _round(self, exchange: Exchange, places: Sequence[int], codec: Codec, **options: Any) -> Round:
        """Return a round of averaging of only the tensors at these `places`, encoded by `codec`."""
        local, total = (_pick(vector.split(self.sizes), places) for vector in (exchange.local, exchange.total))
        ends = list(accumulate(self.sizes))
        stretches = [slice(ends[place] - self.sizes[place], ends[place]) for place in places]
        return Round(local, total, exchange.weight, codec, clipping=exchange.clipping, stretches=stretches, **options)


def feeds_back(averaging: Averaging) -> bool:
    """Return whether a member keeps a residual, which is as long as the vector."""
    return averaging.codec in ACCOUNTED or averaging.rank > 0 or averaging.by_line


def _pick(tensors: Sequence[Tensor], places: Iterable[int]) -> FlatVector:
    return FlatVector([tensors[place] for place in places])
