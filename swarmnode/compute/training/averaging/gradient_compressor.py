"""Gradient compressors: rounds of an agreement on a sum among the replicas of some blocks, and state kept for the next step.

A compressor only does arithmetic: `run` is a generator of rounds, and its driver (`training/averaging`, over links) goes on when
all parts of a round are taken. The kept state changes only by `accept`, when the step is committed, so that a failed attempt leaves
no trace.

Memory besides the two vectors: none of their size without error feedback. With it (int4, int2, top-k, PowerSGD) there is the
attempt's residual, which takes the place of the last one when the step is committed.

Shape letter: N elements of all tensors together.

Low-rank compressors (PowerSGD, ACP-SGD): matrices as products of two factors, one of them orthonormal.

Shape letters: N elements of a tensor; O rows and I columns of a matrix, R rank, X either O or I.

Round: one vector that the members of a group sum up part by part, with an account of the losses in what each member sent.

The losses of a codec must not be lost for good (error feedback: Stich et al., arXiv 1809.07599). So each member keeps account of
its *said* values: those that it sent, as decoded, and for the parts that it owns also the loss in encoding the sum. So all said
values add up to the decoded sum. The difference between a member's wanted and said values is its residual, which it adds to its
next vector.

With top-k, the mean of the members that sent an element stands for all, and the sum's elements are all sent. Only the senders
account for an element. Charging the others with the mean, so that accounts add up, was tried and diverges: two members that
disagree then answer each other with ever larger corrections.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Size, Tensor

from swarmnode.codec.tensors import SPARSE_CODECS, Codec, DType, TensorInfo
from swarmnode.compress.codecs import LARGEST_IN_FP16, Buffer, decode, encode
from swarmnode.compute.training.averaging.parts import (
    Contribution,
    Encoded,
    FlatVector,
    Forms,
    contribution,
    reduce_part,
    share_of_nonzeros,
)
from swarmnode.compute.training.averaging.robust_aggregation import CentredClipping
from swarmnode.compute.training.saved_activations import LARGEST_SUM, is_finite, is_within
from swarmnode.errors import NotFinite, ProtocolError
from swarmnode.swarm.records.run import Averaging

UNKNOWN_UNIT = -1


@dataclass(repr=False, eq=False)
class Round:
    """View that one member has of a sum.

    A contributor (weight above 0) offers every part to the part's owner, itself included. The owner settles its parts. Every
    member takes all settled parts into `total`, which may share its memory with `local`. Parts are copied whole only to encode
    them.

    `topk_share` is the share of elements that top-k sends, `codecs` are others' codecs. `residual` is added to the sent values.
    `left_over`, zeros at first, gets the unsent values; None keeps no account. `clipping` adds up an owner's parts robustly; None
    adds plainly. `stretches` are the places of this round's elements in the whole vector, in order; empty if they are all of it.
    """

    local: FlatVector
    total: FlatVector
    weight: float
    codec: Codec
    topk_share: float = 1.0
    codecs: Collection[Codec] = ()
    residual: FlatVector | None = None
    left_over: FlatVector | None = None
    clipping: CentredClipping | None = None
    stretches: Sequence[slice] = ()

    def __post_init__(self) -> None:
        self.codecs = frozenset({self.codec, *self.codecs})

    def __repr__(self) -> str:
        return f"Round({len(self)} elements, {self.codec.name}, weight {self.weight:.3f})"

    def __len__(self) -> int:
        """Return the number of elements of the vector."""
        return len(self.total)

    def offer(self, part: slice) -> Encoded:
        """Return this member's values of a part, encoded for the part's owner. Raises NotFinite if the codec cannot hold them."""
        wanted_M = self.local.read(part)
        if self.residual is not None:
            wanted_M = wanted_M + self.residual.read(part)
        encoded, said_M = self._encode(wanted_M, self.topk_share)
        if self.left_over is not None:
            self.left_over.write(part, wanted_M - said_M)
        return encoded

    def accept(self, part: slice, weight: float, info: TensorInfo, payload: Buffer) -> Contribution:
        """Decode the offer of a contributor of this weight.

        Raises ProtocolError if it is not as agreed, or holds NaN or infinity.
        """
        return contribution(weight, self._decode(part, info, payload), self.codec)

    def settle(self, part: slice, contributions: Sequence[Contribution]) -> Encoded:
        """Return the encoded sum of all contributions, which are in the order of the members. For the owner. Raises NotFinite."""
        clipping = self.clipping
        total_M = reduce_part(contributions) if clipping is None else clipping.reduce(part, contributions)
        encoded, said_M = self._encode(total_M, share_of_nonzeros(total_M) if self.codec in SPARSE_CODECS else 1.0)
        if self.left_over is not None and self.codec != Codec.TOPK:
            self.left_over.write(part, self.left_over.read(part) + (total_M - said_M))
        return encoded

    def in_vector(self, part: slice, values_M: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Yield the values of a part by their places in the whole vector."""
        start = 0
        for stretch in self.stretches or [slice(0, len(self))]:
            end = start + stretch.stop - stretch.start
            first, last = max(part.start, start), min(part.stop, end)
            if first < last:
                behind = stretch.start - start
                yield slice(first + behind, last + behind), values_M[first - part.start : last - part.start]
            start = end

    def write_settled(self, part: slice, info: TensorInfo, payload: Buffer) -> None:
        """Write a settled part into `total`. Raises ProtocolError if it is not as agreed, or holds NaN or infinity."""
        self.total.write(part, self._decode(part, info, payload))

    def _encode(self, values_M: Tensor, topk_share: float) -> tuple[Encoded, Tensor]:
        """Encode values, and return them also as they will be decoded. Those beyond float16's range are cut to it with FP16: the
        owner of a sum is not at fault for what others contribute.

        Raises NotFinite for values that are not finite: other members would take them for a breach of the protocol.
        """
        if self.codec == Codec.FP16 and is_finite([values_M]):
            values_M = values_M.clamp(-LARGEST_IN_FP16, LARGEST_IN_FP16)
        param = round(topk_share * len(values_M)) if self.codec in SPARSE_CODECS else 0  # top-k sends about this many
        encoded = encode(values_M, self.codec, param=param)
        said_M = values_M if self.codec == Codec.NONE else self._read(len(values_M), *encoded)
        if not is_finite([said_M]):
            raise NotFinite(
                f"a sum holds values that {self.codec.name} "
                "makes NaN or infinite; lower --lr or --clip, or check the data",
                unit=UNKNOWN_UNIT,
            )
        return encoded, said_M

    def _decode(self, part: slice, info: TensorInfo, payload: Buffer) -> Tensor:
        values_M = self._read(part.stop - part.start, info, payload)
        if not is_within([values_M], LARGEST_SUM):
            raise ProtocolError("a part holds NaN, infinity or values that would overflow")
        return values_M

    def _read(self, length: int, info: TensorInfo, payload: Buffer) -> Tensor:
        if info.codec not in self.codecs or (info.dtype, info.shape) != (DType.FLOAT32, (length,)):
            names = " or ".join(sorted(Codec(codec).name for codec in self.codecs))
            raise ProtocolError(f"a part is {info}; agreed are {length} elements of float32 in codec {names}")
        return decode(info, payload, device=self.total.device, max_elements=length)


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
        codec, topk_share, codecs = exchange.forms or Forms(self.codec, self.averaging.keep, frozenset({self.codec}))
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
                topk_share=topk_share,
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


SMALLEST_NORM = 1e-30


def basis_of(product_OR: Tensor) -> Tensor:
    """Return orthonormal columns, the same on all members.

    They are computed on the CPU in float64, since devices differ in columns that are nearly zero.
    """
    basis_OR: Tensor = torch.linalg.qr(product_OR.to("cpu", torch.float64)).Q
    return basis_OR.to(product_OR)


def is_worth(shape: Size, rank: int) -> bool:
    """Return whether two factors of `rank` are smaller than the tensor, taken as a matrix with its first size as rows."""
    if len(shape) < 2 or not shape.numel():
        return False
    rows, columns = shape[0], shape.numel() // shape[0]
    return rank * (rows + columns) < rows * columns


class LowRankCompressor(GradientCompressor):
    """Compressor that sends two small factors instead of a large matrix. `_matrices` are the numbers of the tensors that factors
    make smaller, `_others` those of the rest."""

    def __init__(self, averaging: Averaging, shapes: Sequence[Size]) -> None:
        super().__init__(averaging, shapes)
        places = range(len(shapes))
        self._matrices = [place for place in places if is_worth(shapes[place], averaging.rank)]
        self._others = [place for place in places if place not in set(self._matrices)]

    def _wanted(self, exchange: Exchange) -> Wanted:
        return Wanted(exchange.local.split(self.sizes), self._residuals(exchange.weight), self.shapes)

    def _small_round(self, exchange: Exchange, wanted: Wanted, products: Sequence[Tensor]) -> SmallRound:
        """Return a round of all tensors that factors do not make smaller, and of products."""
        return SmallRound([*(wanted.vector(place) for place in self._others), *products], exchange.weight, self.codec)

    def _end(
        self,
        exchange: Exchange,
        wanted: Wanted,
        others: SmallRound,
        factors: SmallRound,
        bases: Sequence[Tensor],
        *,
        transposed: bool = True,
    ) -> None:
        """Keep the residual of this member, and write the sums: small tensors, and products of bases and factors.

        Round `factors` holds the factors at its end. `transposed`: they belong to the columns.
        """
        few, count = len(self._others), len(self._matrices)
        if exchange.weight:
            left_N = torch.empty(len(exchange.total), device=exchange.total.device)
            self._next = self._next._replace(residual_N=left_N)
            left = torch.split(left_N, self.sizes)
            said = factors.transmitted()[len(factors.totals) - count :]
            self._write(left, [*others.left_over[:few], *said], bases, transposed=transposed)
            for place in self._matrices:
                wanted.add_to(place, left[place].neg_())
        summed = [*others.totals[:few], *factors.totals[len(factors.totals) - count :]]
        self._write(exchange.total.split(self.sizes), summed, bases, transposed=transposed)

    def _write(
        self, out: Sequence[Tensor], values: Sequence[Tensor], bases: Sequence[Tensor], *, transposed: bool
    ) -> None:
        few = len(self._others)
        for place, other_N in zip(self._others, values[:few], strict=True):
            out[place].copy_(other_N.view(-1))
        for place, factor_XR, basis_XR in zip(self._matrices, values[few:], bases, strict=True):
            left_OR, right_IR = (basis_XR, factor_XR) if transposed else (factor_XR, basis_XR)
            torch.matmul(left_OR, right_IR.T, out=out[place].view(left_OR.shape[0], -1))

    def _first_factor(self, place: int) -> Tensor:
        """Return a random factor for the matrix `place`, the same on all members."""
        generator = torch.Generator().manual_seed(place)
        return torch.randn(self.sizes[place] // self.shapes[place][0], self.averaging.rank, generator=generator)


class Wanted:
    """Values that a member wants to send, by tensor: its own, and those left out in earlier steps. The two are never added up
    whole."""

    def __init__(self, tensors: Sequence[Tensor], residuals: Sequence[Tensor] | None, shapes: Sequence[Size]) -> None:
        self._sources = [tensors] if residuals is None else [tensors, residuals]
        self._shapes = shapes

    def __repr__(self) -> str:
        return f"Wanted({len(self._shapes)} tensors)"

    def vector(self, place: int) -> Tensor:
        """Return a copy of a small tensor, the one at `place`, with the carried-over values of earlier steps added."""
        return sum((source[place] for source in self._sources[1:]), self._sources[0][place].clone())

    def times(self, place: int, factor_XR: Tensor, *, transposed: bool = False) -> Tensor:
        """Return the product of a matrix, or of the transposed one, and a factor."""
        matrices = [source[place].view(self._shapes[place][0], -1) for source in self._sources]
        products = [(matrix_OI.T if transposed else matrix_OI) @ factor_XR for matrix_OI in matrices]
        return sum(products[1:], products[0])

    def add_to(self, place: int, out_N: Tensor) -> None:
        """Add the tensor at `place`, with its values carried over from earlier steps, to `out_N`."""
        for source in self._sources:
            out_N.add_(source[place])


class SmallRound:
    """Round of tensors that are small enough to be kept three times: as wanted, as summed (`totals`), and their unsent values."""

    def __init__(self, tensors: Sequence[Tensor], weight: float, codec: Codec) -> None:
        self._tensors = [tensor.contiguous() for tensor in tensors]
        self.totals = [torch.zeros_like(tensor) for tensor in self._tensors]
        self.left_over = [torch.zeros_like(tensor) for tensor in self._tensors]
        self.round = Round(
            FlatVector(self._tensors), FlatVector(self.totals), weight, codec, left_over=FlatVector(self.left_over)
        )

    def __repr__(self) -> str:
        return f"SmallRound({self.round!r})"

    def transmitted(self) -> list[Tensor]:
        """Return the values that this member sent: its tensors without the values left over for later steps."""
        return [tensor - left for tensor, left in zip(self._tensors, self.left_over, strict=True)]


class PowerSgdCompressor(LowRankCompressor):
    """PowerSGD (Vogels et al., arXiv 1905.13727, algorithms 1 and 2): matrices as products of two factors of rank R.

    Round 1 sums P_OR = M_OI Q_IR, and the tensors that factors do not make smaller; round 2 sums Q_IR = M^T P with P made
    orthonormal. The result is P P^T sum(M). The next step begins with this Q, one power iteration further. A member with another Q
    (one that just joined) does no harm: both factors of the result are agreed on, so that `warm_start` is not used. Sums of factors
    are never clipped: no run may ask for that.
    """

    def run(self, exchange: Exchange) -> Rounds:
        self._begin(exchange)
        wanted = self._wanted(exchange)
        before = {place: self._first_factor(place) for place in self._matrices} | dict(self.carried.factors)
        products = [wanted.times(place, before[place].to(exchange.local.device)) for place in self._matrices]
        first = self._small_round(exchange, wanted, products)
        yield first.round
        bases = [basis_of(product_OR) for product_OR in first.totals[len(self._others) :]]
        pairs = zip(self._matrices, bases, strict=True)
        factors = [wanted.times(place, basis_OR, transposed=True) for place, basis_OR in pairs]
        second = SmallRound(factors, exchange.weight, self.codec)
        if factors:
            yield second.round
        self._end(exchange, wanted, first, second, bases)
        for place, factor_IR in zip(self._matrices, second.totals, strict=True):
            norms_R = factor_IR.norm(dim=0)
            if bool((norms_R > SMALLEST_NORM).all()):  # one without a direction (no gradient at all) is not adopted
                before[place] = factor_IR / norms_R
        self._next = self._next._replace(factors=before)


class AcpSgdCompressor(LowRankCompressor):
    """ACP-SGD (Zhang et al., arXiv 2306.08881, section IV): half of PowerSGD's bytes, in one round.

    With Q_IR made orthonormal, P_OR = M_OI Q_IR is summed, with the tensors that factors do not make smaller, and the result is
    P Q^T. In the next step P, made orthonormal, takes Q's place, and M^T P is summed: a power iteration over two steps.

    The older factor has to be the same on all members. With `warm_start` it is the sum of the last run. Otherwise members begin
    with first factors, which are the same everywhere, and error feedback makes up for their misses.
    """

    def run(self, exchange: Exchange) -> Rounds:
        """Run one round, see `GradientCompressor`. Raises ProtocolError if a warm start has no factors here."""
        self._begin(exchange)
        warm_start, device = exchange.warm_start, exchange.local.device
        carried = self.carried
        if warm_start and not carried.factors and self._matrices:
            raise ProtocolError("a REDUCE continues from factors that this peer does not have")
        transposed = warm_start and carried.transposed
        older = (carried.factors[place] if warm_start else self._first_factor(place) for place in self._matrices)
        bases = [basis_of(factor_XR.to(device)) for factor_XR in older]
        wanted = self._wanted(exchange)
        pairs = zip(self._matrices, bases, strict=True)
        products = [wanted.times(place, basis_XR, transposed=transposed) for place, basis_XR in pairs]
        sent = self._small_round(exchange, wanted, products)
        yield sent.round
        self._end(exchange, wanted, sent, sent, bases, transposed=transposed)
        summed = sent.totals[len(self._others) :]
        self._next = self._next._replace(
            factors=dict(zip(self._matrices, summed, strict=True)), transposed=not transposed
        )


def make_gradient_compressor(averaging: Averaging, shapes: Sequence[Size]) -> GradientCompressor:
    """Make the compressor that `averaging` asks for. `shapes` are those of the tensors, see `Learner.shapes`."""
    if not averaging.rank:
        return PlainGradientCompressor(averaging, shapes)
    return (AcpSgdCompressor if averaging.alternating else PowerSgdCompressor)(averaging, shapes)
