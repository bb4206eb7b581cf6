"""Gradient compressors: in which rounds the replicas of some blocks come to one sum, and what they keep for the next time.

A compressor only does arithmetic: `run` is a generator of rounds, and its driver (`training/averaging`, over links) goes on when
all parts of a round are taken. What is kept changes only by `accept`, when the step is
committed, so that a failed attempt leaves no trace.

Memory beside the two vectors: none of their size, but with error feedback (int4, top-k, PowerSGD) the residual of the attempt,
which takes the place of the last one when the step is committed.

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

COARSE = frozenset({Codec.INT8, Codec.INT4, *SPARSE_CODECS})  # codecs for matrices only
ACCOUNTED = frozenset({Codec.INT4, *SPARSE_CODECS})  # codecs that lose too much without error feedback
DECAY = {
    Codec.TOPK2: 0.95
}  # of what is left over, each time: SparseLoCo's, where it takes the place of an outer momentum

Rounds = Generator[Round, None, None]


class Exchange(NamedTuple):
    """One attempt of a member to agree on a sum.

    `weight` is this member's share of the step's samples, and `local` scaled by it. A listener has weight 0: its values do not
    matter. `total` may share its memory with `local`. `clipping`: how owners add up, where sums are to be robust. `forms`: what
    values travel as, where that follows from lines. `warm_start`: all members have had the last sum, and may go on from what it
    left.
    """

    local: FlatVector
    total: FlatVector
    weight: float
    clipping: CentredClipping | None = None
    forms: Forms | None = None
    warm_start: bool = False


class Carried(NamedTuple):
    """What a compressor carries from one step into the next, for better learning only: a replica that lost it starts without.

    `residual_N`: what this member could not say yet (None: nothing). `factors` of matrices, by place, of the columns or,
    `transposed`, of the rows: for the next step of a low-rank compressor.
    """

    residual_N: Tensor | None = None
    factors: Mapping[int, Tensor] = MappingProxyType({})
    transposed: bool = False


class GradientCompressor(ABC):
    """How the sum of a flat vector is agreed on. `shapes`: of the tensors that it strings together."""

    def __init__(self, averaging: Averaging, shapes: Sequence[Size]) -> None:
        self.averaging = averaging
        self.codec = Codec(averaging.codec)
        self.shapes = list(shapes)
        self.sizes = [shape.numel() for shape in shapes]
        self.carried = Carried()
        self._next = self.carried  # once the sum of the last run is committed

    def __repr__(self) -> str:
        residual_N = self.carried.residual_N
        residual = "nothing" if residual_N is None else f"{float(residual_N.norm()):.3g}"
        return f"{type(self).__name__}({self.codec.name}, {sum(self.sizes)} elements, residual {residual})"

    @abstractmethod
    def run(self, exchange: Exchange) -> Rounds:
        """Yield rounds; when all parts of the last one are taken, `exchange.total` is the agreed sum of all members' vectors.
        Raises ValueError if a vector has the wrong length."""

    def accept(self) -> None:
        """Adopt what the last run left over: its sum was committed."""
        self.carried = self._next

    def _begin(self, exchange: Exchange) -> None:
        """Check the vectors, and forget an attempt that came to nothing."""
        for vector in (exchange.local, exchange.total):
            if len(vector) != sum(self.sizes):
                raise ValueError(f"a vector of {len(vector)} elements for tensors of {sum(self.sizes)}")
        self._next = self.carried

    def _residuals(self, weight: float) -> Sequence[Tensor] | None:
        """What this member could not say before, by tensor; None: nothing, or it says nothing now."""
        residual_N = self.carried.residual_N
        return torch.split(residual_N, self.sizes) if weight and residual_N is not None else None


class PlainGradientCompressor(GradientCompressor):
    """Every element in the codec of the run; where that is a coarse one, vectors travel before, as they are.

    Vectors (biases, norms, running statistics) are few, and a group of 64 in which a gradient meets a counter has
    nothing left of the gradient.
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
        """A round of the tensors at these places alone."""
        local, total = (_pick(vector.split(self.sizes), places) for vector in (exchange.local, exchange.total))
        ends = list(accumulate(self.sizes))
        stretches = [slice(ends[place] - self.sizes[place], ends[place]) for place in places]
        return Round(local, total, exchange.weight, codec, clipping=exchange.clipping, stretches=stretches, **options)


def feeds_back(averaging: Averaging) -> bool:
    """Whether a member remembers what it could not say: a residual as long as the vector."""
    return averaging.codec in ACCOUNTED or averaging.rank > 0 or averaging.by_line


def _pick(tensors: Sequence[Tensor], places: Iterable[int]) -> FlatVector:
    return FlatVector([tensors[place] for place in places])
