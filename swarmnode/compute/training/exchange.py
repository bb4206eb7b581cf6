"""Exchanges: in which rounds the replicas of some blocks come to one sum, and what they keep for the next time.

An exchange only does arithmetic: `run` is a generator of rounds, and whoever drives it (`together.py` in one process,
`roles/training` over links) answers each with the sum. What is kept changes only by `accept`, when the step is committed, so
that a failed attempt leaves no trace.

Shape letters: N elements of all tensors together; O rows and I columns of a matrix, R rank.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Iterable, Mapping, Sequence

import torch
from torch import Size, Tensor

from swarmnode.codec.tensors import Codec
from swarmnode.compute.training.round import Round
from swarmnode.errors import CheckpointError
from swarmnode.swarm.run import Averaging

COARSE = frozenset({Codec.INT8, Codec.INT4, Codec.TOPK})  # codecs for matrices only
ACCOUNTED = frozenset({Codec.INT4, Codec.TOPK})  # codecs that lose too much without error feedback
SMALLEST_NORM = 1e-30

Rounds = Generator[Round, Tensor, Tensor]


class Exchange(ABC):
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
    def run(self, local_N: Tensor, weight: float) -> Rounds:
        """Rounds, each to be answered by its sum; returns the agreed sum of all members' vectors.

        `weight` is this member's share of the step's samples, and local_N scaled by it. A listener has weight 0:
        its values do not matter.
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

    def _wanted(self, local_N: Tensor, weight: float) -> Tensor:
        """What this member has to say: its vector and what it could not say before."""
        if len(local_N) != sum(self.sizes):
            raise ValueError(f"a vector of {len(local_N)} elements for tensors of {sum(self.sizes)}")
        self._kept = {}
        return local_N + self.residual_N if weight and self.residual_N is not None else local_N


class PlainExchange(Exchange):
    """Every element in the codec of the run; where that is a coarse one, vectors travel before, as they are.

    Vectors (biases, norms, running statistics) are few, and a group of 64 in which a gradient meets a counter has
    nothing left of the gradient.
    """

    def run(self, local_N: Tensor, weight: float) -> Rounds:
        if self.codec not in COARSE:
            return (yield Round(self._wanted(local_N, weight), weight, self.codec))
        vectors, matrices = self._places()
        tensors = torch.split(self._wanted(local_N, weight), self.sizes)
        total_N = torch.empty_like(local_N)
        totals = torch.split(total_N, self.sizes)
        if vectors:
            agreed_N = yield Round(_join(tensors, vectors), weight, Codec.NONE)
            _part(agreed_N, totals, vectors)
        if matrices:
            accounted = self.codec in ACCOUNTED
            wanted_N = _join(tensors, matrices)
            round_ = Round(wanted_N, weight, self.codec, keep=self.averaging.keep, accounted=accounted)
            agreed_N = yield round_
            _part(agreed_N, totals, matrices)
            if accounted and weight:
                residual_N = torch.zeros_like(local_N)
                _part(wanted_N - round_.said(), torch.split(residual_N, self.sizes), matrices)
                self._kept = {"residual": residual_N}
        return total_N

    def _places(self) -> tuple[list[int], list[int]]:
        """Of the vectors and of the matrices among the tensors."""
        places = range(len(self.shapes))
        return (
            [place for place in places if len(self.shapes[place]) < 2],
            [place for place in places if len(self.shapes[place]) >= 2],
        )


class PowerSgdExchange(Exchange):
    """PowerSGD (Vogels et al., arXiv 1905.13727, algorithms 1 and 2): matrices as products of two factors of rank R.

    Round 1 sums P_OR = M_OI Q_IR, and all that is too small to gain by factors as it is; round 2 sums Q_IR = M^T P with P made
    orthonormal. The result is P P^T sum(M). Q is where the next step begins, one power iteration further. Members
    whose Q differs (one that just came) do not disturb: both factors of the result are agreed on.
    """

    def __init__(self, averaging: Averaging, shapes: Sequence[Size]) -> None:
        super().__init__(averaging, shapes)
        places = range(len(shapes))
        self._matrices = [place for place in places if _is_worth(shapes[place], averaging.rank)]
        self._others = [place for place in places if place not in set(self._matrices)]
        self._factors = {place: _first_factor(shapes[place], averaging.rank, place) for place in self._matrices}

    def run(self, local_N: Tensor, weight: float) -> Rounds:
        wanted_N = self._wanted(local_N, weight)
        tensors = torch.split(wanted_N, self.sizes)
        matrices = {place: tensors[place].view(self.shapes[place][0], -1) for place in self._matrices}
        products = [matrix_OI @ self._factors[place].to(local_N.device) for place, matrix_OI in matrices.items()]
        first = self._round([tensors[place] for place in self._others] + products, weight)
        first_N = yield first
        bases = {
            place: torch.linalg.qr(product_OR).Q
            for place, product_OR in zip(matrices, _unflatten(first_N, products), strict=True)
        }
        factors = [matrix_OI.T @ bases[place] for place, matrix_OI in matrices.items()]
        second = self._round(factors, weight) if factors else first
        second_N = (yield second) if factors else first_N[:0]
        agreed = self._rebuild(bases, first_N, _unflatten(second_N, factors))
        for place, factor_IR in zip(matrices, _unflatten(second_N, factors), strict=True):
            self._keep_factor(place, factor_IR)
        if weight:
            said_N = second.said() if factors else second_N
            self._kept["residual"] = wanted_N - self._rebuild(bases, first.said(), _unflatten(said_N, factors))
        return agreed

    def _round(self, tensors: Sequence[Tensor], weight: float) -> Round:
        flat_N = torch.cat([tensor.reshape(-1) for tensor in tensors])
        return Round(flat_N, weight, self.codec, accounted=True)

    def _rebuild(self, bases: Mapping[int, Tensor], others_N: Tensor, factors: Sequence[Tensor]) -> Tensor:
        """A flat vector out of the small tensors, which come first in others_N, and of the products of the factors."""
        flat_N = others_N.new_empty(sum(self.sizes))
        pieces = torch.split(flat_N, self.sizes)
        _part(others_N[: sum(self.sizes[place] for place in self._others)], pieces, self._others)
        for (place, basis_OR), factor_IR in zip(bases.items(), factors, strict=True):
            torch.matmul(basis_OR, factor_IR.T, out=pieces[place].view(basis_OR.shape[0], -1))
        return flat_N

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


def make_exchange(averaging: Averaging, shapes: Sequence[Size]) -> Exchange:
    """The exchange that a run asks for. `shapes`: see `Learner.shapes`."""
    return (PowerSgdExchange if averaging.rank else PlainExchange)(averaging, shapes)


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


def _join(tensors: Sequence[Tensor], places: Iterable[int]) -> Tensor:
    return torch.cat([tensors[place] for place in places])


def _part(flat_N: Tensor, tensors: Sequence[Tensor], places: Sequence[int]) -> None:
    """Write a flat vector into the flat tensors at these places."""
    if places:
        for place, piece_N in zip(places, torch.split(flat_N, [len(tensors[place]) for place in places]), strict=True):
            tensors[place].copy_(piece_N)


def _unflatten(flat_N: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """The last elements of a flat vector as tensors of these shapes."""
    sizes = [tensor.numel() for tensor in like]
    pieces = torch.split(flat_N[len(flat_N) - sum(sizes) :], sizes) if sizes else ()
    return [piece.view(tensor.shape) for piece, tensor in zip(pieces, like, strict=True)]
