"""PowerSGD: the sum of matrices by two factors of a low rank, both of which are agreed on in each step.

Shape letters: N elements of all tensors together; O rows and I columns of a matrix, R rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Size, Tensor

from swarmnode.compute.training.averaging.factors import LowRankCompressor, SmallRound, basis_of, factor_name
from swarmnode.compute.training.averaging.gradient_compressor import Exchange, Rounds
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

    def run(self, exchange: Exchange) -> Rounds:
        self._begin(exchange)
        wanted = self._wanted(exchange)
        device = exchange.local.device
        first = self._small_round(
            exchange, wanted, [wanted.times(place, self._factors[place].to(device)) for place in self._matrices]
        )
        yield first.round
        bases = [basis_of(product_OR) for product_OR in first.totals[len(self._others) :]]
        pairs = zip(self._matrices, bases, strict=True)
        factors = [wanted.times(place, basis_OR, transposed=True) for place, basis_OR in pairs]
        second = SmallRound(factors, exchange.weight, self.codec)
        if factors:
            yield second.round
        self._end(exchange, wanted, first, second, bases)
        for place, factor_IR in zip(self._matrices, second.totals, strict=True):
            self._keep_factor(place, factor_IR)

    def _keep_factor(self, place: int, factor_IR: Tensor) -> None:
        """The next first factor, in unit columns; one without a direction (no gradient at all) is not adopted."""
        norms_R = factor_IR.norm(dim=0)
        if bool((norms_R > SMALLEST_NORM).all()):
            self._kept[factor_name(place)] = factor_IR / norms_R

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        factors = self._factors_in(tensors)
        super().load(tensors)
        self._factors |= factors
