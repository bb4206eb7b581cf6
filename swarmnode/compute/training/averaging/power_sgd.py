"""PowerSGD: the sum of matrices by two factors of a low rank, both of which are agreed on in each step.

Shape letters: N elements of all tensors together; O rows and I columns of a matrix, R rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Size, Tensor

from swarmnode.compute.training.averaging.factors import LowRankCompressor, SmallRound, Wanted, basis_of, factor_name
from swarmnode.compute.training.averaging.flat import FlatVector
from swarmnode.compute.training.averaging.gradient_compressor import Rounds
from swarmnode.compute.training.averaging.parts import Forms
from swarmnode.compute.training.averaging.robust_aggregation import CentredClipping
from swarmnode.swarm.records.run import Averaging

SMALLEST_NORM = 1e-30


class PowerSgdCompressor(LowRankCompressor):
    """PowerSGD (Vogels et al., arXiv 1905.13727, algorithms 1 and 2): matrices as products of two factors of rank R.

    Round 1 sums P_OR = M_OI Q_IR, and all that is too small to gain by factors as it is; round 2 sums Q_IR = M^T P with P made
    orthonormal. The result is P P^T sum(M). Q is where the next step begins, one power iteration further. Members whose Q
    differs (one that just came) do not disturb: both factors of the result are agreed on, so that `warm_start` is not asked for.
    Sums of factors are never clipped: no run may ask for that.
    """

    def __init__(self, averaging: Averaging, shapes: Sequence[Size]) -> None:
        super().__init__(averaging, shapes)
        self._factors = {place: self._first_factor(place) for place in self._matrices}

    def run(
        self,
        local: FlatVector,
        total: FlatVector,
        weight: float,
        clipping: CentredClipping | None = None,
        forms: Forms | None = None,
        *,
        warm_start: bool = False,
    ) -> Rounds:
        self._begin(local, total)
        tensors, totals, residuals = local.split(self.sizes), total.split(self.sizes), self._residuals(weight)
        wanted = Wanted(tensors, residuals, self.shapes)
        products = [wanted.matrix_times(place, self._factor(place, local.device)) for place in self._matrices]
        first = SmallRound([*(wanted.vector(place) for place in self._others), *products], weight, self.codec)
        yield first.round
        summed = first.totals()
        bases = [basis_of(product_OR) for product_OR in summed[len(self._others) :]]
        factors = [
            wanted.transposed_times(place, basis_OR) for place, basis_OR in zip(self._matrices, bases, strict=True)
        ]
        second = SmallRound(factors, weight, self.codec)
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
        self, left: Sequence[Tensor], wanted: Wanted, bases: Sequence[Tensor], first: SmallRound, second: SmallRound
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
            self._kept[factor_name(place)] = factor_IR / norms_R

    def state(self) -> dict[str, Tensor]:
        return {**super().state(), **{factor_name(place): factor for place, factor in self._factors.items()}}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        factors = {place: tensors.get(factor_name(place), factor) for place, factor in self._factors.items()}
        for place, factor in factors.items():
            self._check_factor(place, factor, len(self._factors[place]))
        super().load(tensors)
        self._factors = factors
