"""ACP-SGD: the sum of matrices by two factors of a low rank, of which one is sent in a step and the other one in the next.

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
from swarmnode.errors import ProtocolError
from swarmnode.swarm.records.run import Averaging

TRANSPOSED = "transposed"


class AcpSgdCompressor(LowRankCompressor):
    """ACP-SGD (Zhang et al., arXiv 2306.08881, section IV): half of PowerSGD's bytes, in one round.

    With Q_IR made orthonormal P_OR = M_OI Q_IR is summed, beside all that is too small to gain by factors, and the result is P Q^T.
    In the next step P, made orthonormal, takes Q's place, and what is summed is M^T P: a power iteration over two steps.

    The older factor has to be the same at all members. With `warm_start` it is the sum of the last run; else they begin with
    first factors, which are the same everywhere, and error feedback makes up for what these miss.
    """

    def __init__(self, averaging: Averaging, shapes: Sequence[Size]) -> None:
        super().__init__(averaging, shapes)
        self._older: dict[int, Tensor] = {}  # by matrix, what was summed last
        self._transposed = False  # whether that was a P_OR

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
        """See `GradientCompressor`. Raises ProtocolError where a warm start has nothing here to begin with."""
        self._begin(local, total)
        if warm_start and not self._older and self._matrices:
            raise ProtocolError("a REDUCE goes on from factors that are not here")
        transposed = warm_start and self._transposed
        wanted = Wanted(local.split(self.sizes), self._residuals(weight), self.shapes)
        bases = [basis_of(self._factor(place, warm_start=warm_start).to(local.device)) for place in self._matrices]
        times = wanted.transposed_times if transposed else wanted.matrix_times
        products = [times(place, basis_XR) for place, basis_XR in zip(self._matrices, bases, strict=True)]
        sent = SmallRound([*(wanted.vector(place) for place in self._others), *products], weight, self.codec)
        yield sent.round
        self._write(total.split(self.sizes), sent.totals(), bases, transposed=transposed)
        if weight:
            self._kept["residual"] = left_N = torch.empty(len(total), device=total.device)
            left = torch.split(left_N, self.sizes)
            self._write(left, sent.transmitted(), bases, transposed=transposed)
            left_N.neg_()
            for place, out_N in enumerate(left):
                wanted.add_to(place, out_N)
        summed = sent.totals()[len(self._others) :]
        self._kept |= {factor_name(place): factor_XR for place, factor_XR in zip(self._matrices, summed, strict=True)}
        self._kept[TRANSPOSED] = torch.tensor(not transposed)

    def _factor(self, place: int, *, warm_start: bool) -> Tensor:
        """The older one, or where all begin: of the columns."""
        return self._older[place] if warm_start else self._first_factor(place)

    def _write(
        self, out: Sequence[Tensor], values: Sequence[Tensor], bases: Sequence[Tensor], *, transposed: bool
    ) -> None:
        """Small tensors, and products of bases and factors, where they belong in the vector."""
        few = len(self._others)
        for place, other_N in zip(self._others, values[:few], strict=True):
            out[place].copy_(other_N.view(-1))
        for place, factor_XR, basis_XR in zip(self._matrices, values[few:], bases, strict=True):
            left_OR, right_IR = (basis_XR, factor_XR) if transposed else (factor_XR, basis_XR)
            torch.matmul(left_OR, right_IR.T, out=out[place].view(left_OR.shape[0], -1))

    def state(self) -> dict[str, Tensor]:
        older = {factor_name(place): factor for place, factor in self._older.items()}
        return {**super().state(), **older, TRANSPOSED: torch.tensor(self._transposed)}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        transposed = bool(tensors.get(TRANSPOSED, False))
        older = {place: tensors[name] for place in self._matrices if (name := factor_name(place)) in tensors}
        for place, factor in older.items():
            rows = self.shapes[place][0]
            self._check_factor(place, factor, rows if transposed else self.sizes[place] // rows)
        super().load(tensors)
        self._older, self._transposed = older, transposed
