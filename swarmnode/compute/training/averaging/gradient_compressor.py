"""Exchanges: in which rounds the replicas of some blocks come to one sum, and what they keep for the next time.

An exchange only does arithmetic: `run` is a generator of rounds, and whoever drives it (`together.py` in one process,
`roles/training` over links) goes on when all parts of a round are taken. What is kept changes only by `accept`, when the step is
committed, so that a failed attempt leaves no trace.

Memory beside the two vectors: none of their size, but with error feedback (int4, top-k, PowerSGD) the residual of the attempt,
which takes the place of the last one when the step is committed.

Shape letters: N elements of all tensors together; O rows and I columns of a matrix, R rank.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Iterable, Mapping, Sequence
from itertools import accumulate

import torch
from torch import Size, Tensor

from swarmnode.codec.tensors import SPARSE_CODECS, Codec
from swarmnode.compute.training.averaging.centred_clipping import CentredClipping
from swarmnode.compute.training.averaging.flat import FlatVector
from swarmnode.compute.training.averaging.parts import Forms
from swarmnode.compute.training.averaging.round import Round
from swarmnode.errors import CheckpointError
from swarmnode.swarm.records.run import Averaging

COARSE = frozenset({Codec.INT8, Codec.INT4, *SPARSE_CODECS})  # codecs for matrices only
ACCOUNTED = frozenset({Codec.INT4, *SPARSE_CODECS})  # codecs that lose too much without error feedback
DECAY = {
    Codec.TOPK2: 0.95
}  # of what is left over, each time: SparseLoCo's, where it takes the place of an outer momentum
SMALLEST_NORM = 1e-30

Rounds = Generator[Round, None, None]


class GradientCompressor(ABC):
    """How the sum of a flat vector is agreed on. `shapes`: of the tensors that it strings together.

    State: `residual_N`, what this member could not say yet (None: nothing), and whatever the subclass remembers. Both are
    for better learning only: a replica that lost them starts without.
    """

    def __init__(self, averaging: Averaging, shapes: Sequence[Size]) -> None:
        self.averaging = averaging
        self.codec = Codec(averaging.codec)
        self.shapes = list(shapes)
        self.sizes = [shape.numel() for shape in shapes]
        self.residual_N: Tensor | None = None
        self._kept: dict[str, Tensor] = {}

    def __repr__(self) -> str:
        residual = "nothing" if self.residual_N is None else f"{float(self.residual_N.norm()):.3g}"
        return f"{type(self).__name__}({self.codec.name}, {sum(self.sizes)} elements, residual {residual})"

    @abstractmethod
    def run(
        self,
        local: FlatVector,
        total: FlatVector,
        weight: float,
        clipping: CentredClipping | None = None,
        forms: Forms | None = None,
    ) -> Rounds:
        """Rounds; when all parts of the last one are taken, `total` is the agreed sum of all members' vectors.

        `weight` is this member's share of the step's samples, and `local` scaled by it. A listener has weight 0: its values do
        not matter. `total` may share its memory with `local`. `clipping`: how owners add up, where sums are to be robust. `forms`:
        what values travel as, where that follows from lines. Raises ValueError where a vector has the wrong length.
        """

    def accept(self) -> None:
        """The sum of the last run was committed: adopt what it left over."""
        if self._kept:
            self.load({**self.state(), **self._kept})
            self._kept = {}

    def state(self) -> dict[str, Tensor]:
        """What is remembered, by name: references."""
        return {} if self.residual_N is None else {"residual": self.residual_N}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Take over a state. Raises CheckpointError, changing nothing, where it does not fit."""
        residual_N = tensors.get("residual")
        if residual_N is not None and residual_N.shape != (sum(self.sizes),):
            raise CheckpointError(f"a residual of shape {tuple(residual_N.shape)} for {sum(self.sizes)} elements")
        self.residual_N = residual_N

    def _begin(self, local: FlatVector, total: FlatVector) -> None:
        """Check the vectors, and forget an attempt that came to nothing."""
        for vector in (local, total):
            if len(vector) != sum(self.sizes):
                raise ValueError(f"a vector of {len(vector)} elements for tensors of {sum(self.sizes)}")
        self._kept = {}

    def _residuals(self, weight: float) -> Sequence[Tensor] | None:
        """What this member could not say before, by tensor; None: nothing, or it says nothing now."""
        return torch.split(self.residual_N, self.sizes) if weight and self.residual_N is not None else None


class PlainGradientCompressor(GradientCompressor):
    """Every element in the codec of the run; where that is a coarse one, vectors travel before, as they are.

    Vectors (biases, norms, running statistics) are few, and a group of 64 in which a gradient meets a counter has
    nothing left of the gradient.
    """

    def run(
        self,
        local: FlatVector,
        total: FlatVector,
        weight: float,
        clipping: CentredClipping | None = None,
        forms: Forms | None = None,
    ) -> Rounds:
        self._begin(local, total)
        codec, keep, codecs = forms or Forms(self.codec, self.averaging.keep, frozenset({self.codec}))
        if COARSE.isdisjoint(codecs):
            yield Round(local, total, weight, codec, codecs=codecs, clipping=clipping)
            return
        vectors, matrices = self._places()
        tensors, totals = local.split(self.sizes), total.split(self.sizes)
        if vectors:
            yield Round(
                _pick(tensors, vectors),
                _pick(totals, vectors),
                weight,
                Codec.NONE,
                clipping=clipping,
                stretches=self._stretches(vectors),
            )
        if matrices:
            residuals = self._residuals(weight)
            accounted = weight > 0 and feeds_back(self.averaging)
            left_N = torch.zeros(len(total), device=total.device) if accounted else None
            yield Round(
                _pick(tensors, matrices),
                _pick(totals, matrices),
                weight,
                codec,
                keep=keep,
                codecs=codecs,
                residual=None if residuals is None else _pick(residuals, matrices),
                left_over=None if left_N is None else _pick(torch.split(left_N, self.sizes), matrices),
                clipping=clipping,
                stretches=self._stretches(matrices),
            )
            if left_N is not None:
                self._kept = {"residual": left_N.mul_(DECAY.get(codec, 1.0))}

    def _places(self) -> tuple[list[int], list[int]]:
        """Of the vectors and of the matrices among the tensors."""
        places = range(len(self.shapes))
        return (
            [place for place in places if len(self.shapes[place]) < 2],
            [place for place in places if len(self.shapes[place]) >= 2],
        )

    def _stretches(self, places: Iterable[int]) -> list[slice]:
        """Where these tensors are in the vector."""
        ends = list(accumulate(self.sizes))
        return [slice(ends[place] - self.sizes[place], ends[place]) for place in places]


class PowerSgdCompressor(GradientCompressor):
    """PowerSGD (Vogels et al., arXiv 1905.13727, algorithms 1 and 2): matrices as products of two factors of rank R.

        Round 1 sums P_OR = M_OI Q_IR, and all that is too small to gain by factors as it is; round 2 sums Q_IR = M^T P with P made
        orthonormal. The result is P P^T sum(M). Q is where the next step begins, one power iteration further. Members
    Q differs (one that just came) do not disturb: both factors of the result are agreed on. Sums of factors are never clipped:
    no run
        may ask for that.
    """

    def __init__(self, averaging: Averaging, shapes: Sequence[Size]) -> None:
        super().__init__(averaging, shapes)
        places = range(len(shapes))
        self._matrices = [place for place in places if _is_worth(shapes[place], averaging.rank)]
        self._others = [place for place in places if place not in set(self._matrices)]
        self._factors = {place: _first_factor(shapes[place], averaging.rank, place) for place in self._matrices}

    def run(
        self,
        local: FlatVector,
        total: FlatVector,
        weight: float,
        clipping: CentredClipping | None = None,
        forms: Forms | None = None,
    ) -> Rounds:
        self._begin(local, total)
        tensors, totals, residuals = local.split(self.sizes), total.split(self.sizes), self._residuals(weight)
        wanted = _Wanted(tensors, residuals, self.shapes)
        products = [wanted.matrix_times(place, self._factor(place, local.device)) for place in self._matrices]
        first = _SmallRound([*(wanted.vector(place) for place in self._others), *products], weight, self.codec)
        yield first.round
        summed = first.totals()
        bases = [_basis(product_OR) for product_OR in summed[len(self._others) :]]
        factors = [
            wanted.transposed_times(place, basis_OR) for place, basis_OR in zip(self._matrices, bases, strict=True)
        ]
        second = _SmallRound(factors, weight, self.codec)
        if factors:
            yield second.round
        left_N = torch.empty(len(total), device=total.device) if weight else None
        if left_N is not None:
            self._note_left_over(torch.split(left_N, self.sizes), wanted, bases, first, second)
            self._kept["residual"] = left_N
        for place, other_N in zip(self._others, summed, strict=False):
            totals[place].copy_(other_N.view(-1))
        for place, basis_OR, factor_IR in zip(self._matrices, bases, second.totals(), strict=True):
            torch.matmul(basis_OR, factor_IR.T, out=totals[place].view(basis_OR.shape[0], -1))
            self._keep_factor(place, factor_IR)

    def _factor(self, place: int, device: torch.device) -> Tensor:
        return self._factors[place].to(device)

    def _note_left_over(
        self, left: Sequence[Tensor], wanted: _Wanted, bases: Sequence[Tensor], first: _SmallRound, second: _SmallRound
    ) -> None:
        """What this member wanted to say less what it said: of the matrices, the product of what it said of the factors."""
        for place, lost_N in zip(self._others, first.left_over(), strict=False):
            left[place].copy_(lost_N.view(-1))
        for place, basis_OR, said_IR in zip(self._matrices, bases, second.transmitted(), strict=True):
            left_OI = left[place].view(basis_OR.shape[0], -1)
            wanted.write(place, left_OI)
            left_OI.addmm_(basis_OR, said_IR.T, alpha=-1)

    def _keep_factor(self, place: int, factor_IR: Tensor) -> None:
        """The next first factor, in unit columns; one without a direction (no gradient at all) is not adopted."""
        norms_R = factor_IR.norm(dim=0)
        if bool((norms_R > SMALLEST_NORM).all()):
            self._kept[f"factor/{place}"] = factor_IR / norms_R

    def state(self) -> dict[str, Tensor]:
        return {**super().state(), **{f"factor/{place}": factor for place, factor in self._factors.items()}}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        factors = {place: tensors.get(f"factor/{place}", factor) for place, factor in self._factors.items()}
        for place, factor in factors.items():
            if factor.shape != self._factors[place].shape:
                raise CheckpointError(f"a factor of shape {tuple(factor.shape)} for tensor {place} of another run")
        super().load(tensors)
        self._factors = factors


def make_gradient_compressor(averaging: Averaging, shapes: Sequence[Size]) -> GradientCompressor:
    """The exchange that a run asks for. `shapes`: see `Learner.shapes`."""
    return (PowerSgdCompressor if averaging.rank else PlainGradientCompressor)(averaging, shapes)


def feeds_back(averaging: Averaging) -> bool:
    """Whether a member remembers what it could not say: a residual as long as the vector."""
    return averaging.codec in ACCOUNTED or averaging.rank > 0 or averaging.by_line


def _basis(product_OR: Tensor) -> Tensor:
    """Orthonormal columns, the same on all members: on the CPU in float64, since devices differ in columns that are nearly zero."""
    basis_OR: Tensor = torch.linalg.qr(product_OR.to("cpu", torch.float64)).Q
    return basis_OR.to(product_OR)


def _is_worth(shape: Size, rank: int) -> bool:
    """Whether factors are smaller than the tensor, taken as a matrix of its first size."""
    if len(shape) < 2 or not shape.numel():
        return False
    rows, columns = shape[0], shape.numel() // shape[0]
    return rank * (rows + columns) < rows * columns


def _first_factor(shape: Size, rank: int, place: int) -> Tensor:
    """Random, but the same on all members."""
    generator = torch.Generator().manual_seed(place)
    return torch.randn(shape.numel() // shape[0], rank, generator=generator)


def _pick(tensors: Sequence[Tensor], places: Iterable[int]) -> FlatVector:
    return FlatVector([tensors[place] for place in places])


class _Wanted:
    """What a member has to say, by tensor: its own values and what it could not say before, which are never added up whole."""

    def __init__(self, tensors: Sequence[Tensor], residuals: Sequence[Tensor] | None, shapes: Sequence[Size]) -> None:
        self._sources = [tensors] if residuals is None else [tensors, residuals]
        self._shapes = shapes

    def __repr__(self) -> str:
        return f"_Wanted({len(self._shapes)} tensors)"

    def vector(self, place: int) -> Tensor:
        """A small tensor, in memory of its own."""
        return sum((source[place] for source in self._sources[1:]), self._sources[0][place].clone())

    def matrix_times(self, place: int, factor_IR: Tensor) -> Tensor:
        """product_OR."""
        products = [matrix_OI @ factor_IR for matrix_OI in self._matrices(place)]
        return sum(products[1:], products[0])

    def transposed_times(self, place: int, basis_OR: Tensor) -> Tensor:
        """product_IR."""
        products = [matrix_OI.T @ basis_OR for matrix_OI in self._matrices(place)]
        return sum(products[1:], products[0])

    def write(self, place: int, out_OI: Tensor) -> None:
        """The matrix itself."""
        own, *more = self._matrices(place)
        out_OI.copy_(own)
        for matrix_OI in more:
            out_OI.add_(matrix_OI)

    def _matrices(self, place: int) -> list[Tensor]:
        return [source[place].view(self._shapes[place][0], -1) for source in self._sources]


class _SmallRound:
    """A round of tensors that are small enough to be kept three times: as wanted, as summed, and what was lost of them."""

    def __init__(self, tensors: Sequence[Tensor], weight: float, codec: Codec) -> None:
        self._tensors = [tensor.contiguous() for tensor in tensors]
        self._totals = [torch.zeros_like(tensor) for tensor in self._tensors]
        self._left = [torch.zeros_like(tensor) for tensor in self._tensors]
        self.round = Round(
            FlatVector(self._tensors), FlatVector(self._totals), weight, codec, left_over=FlatVector(self._left)
        )

    def __repr__(self) -> str:
        return f"_SmallRound({self.round!r})"

    def totals(self) -> list[Tensor]:
        """What all said, in the shapes of the tensors."""
        return self._totals

    def left_over(self) -> list[Tensor]:
        """What this member did not say."""
        return self._left

    def transmitted(self) -> list[Tensor]:
        """What it did say."""
        return [tensor - left for tensor, left in zip(self._tensors, self._left, strict=True)]
