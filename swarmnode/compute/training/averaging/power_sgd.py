"""PowerSGD: the sum of matrices by two factors of a low rank, both of which are agreed on in each step.

Shape letters: N elements of all tensors together; O rows and I columns of a matrix, R rank.
"""

from __future__ import annotations

from swarmnode.compute.training.averaging.factors import LowRankCompressor, SmallRound, basis_of
from swarmnode.compute.training.averaging.gradient_compressor import Exchange, Rounds

SMALLEST_NORM = 1e-30


class PowerSgdCompressor(LowRankCompressor):
    """PowerSGD (Vogels et al., arXiv 1905.13727, algorithms 1 and 2): matrices as products of two factors of rank R.

    Round 1 sums P_OR = M_OI Q_IR, and all that is too small to gain by factors as it is; round 2 sums Q_IR = M^T P with P made
    orthonormal. The result is P P^T sum(M). Q is where the next step begins, one power iteration further. Members whose Q
    differs (one that just came) do not disturb: both factors of the result are agreed on, so that `warm_start` is not asked for.
    Sums of factors are never clipped: no run may ask for that.
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
