"""ACP-SGD: the sum of matrices by two factors of a low rank, of which one is sent in a step and the other one in the next.

Shape letters: N elements of all tensors together; O rows and I columns of a matrix, R rank.
"""

from __future__ import annotations

from swarmnode.compute.training.averaging.factors import LowRankCompressor, basis_of
from swarmnode.compute.training.averaging.gradient_compressor import Exchange, Rounds
from swarmnode.errors import ProtocolError


class AcpSgdCompressor(LowRankCompressor):
    """ACP-SGD (Zhang et al., arXiv 2306.08881, section IV): half of PowerSGD's bytes, in one round.

    With Q_IR made orthonormal P_OR = M_OI Q_IR is summed, beside all that is too small to gain by factors, and the result is P Q^T.
    In the next step P, made orthonormal, takes Q's place, and what is summed is M^T P: a power iteration over two steps.

    The older factor has to be the same at all members. With `warm_start` it is the sum of the last run; else they begin with
    first factors, which are the same everywhere, and error feedback makes up for what these miss.
    """

    def run(self, exchange: Exchange) -> Rounds:
        """See `GradientCompressor`. Raises ProtocolError where a warm start has nothing here to begin with."""
        self._begin(exchange)
        warm_start, device = exchange.warm_start, exchange.local.device
        carried = self.carried
        if warm_start and not carried.factors and self._matrices:
            raise ProtocolError("a REDUCE goes on from factors that are not here")
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
