"""Gradient comparison: how the members' gradients of one step lie to one another, in the parts that one owner settled.

Shape letters: P members, M elements of a part, K of a sketch.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from swarmnode.compute.training.averaging.projection import SKETCHED, Projection

LITTLE = 0.25  # of the others' agreement: an honest member's is less than theirs by its fewer samples at most


@dataclass
class Deviation:
    """Of one member. `way_K`: the way from the centre to what it offered, in distances of honest members, as a sketch of about
    the same length; `distance`: that length, about 1 where it is honest. `agreement`: the mean cosine between its gradient and
    each other one's, less `LITTLE` of what the others' come to: above 0 where it is honest, or nothing is left to learn."""

    way_K: Tensor = field(default_factory=lambda: torch.zeros(SKETCHED))
    distance: float = 0.0
    agreement: float = 0.0


class GradientComparison:
    """Of one group of blocks in one attempt. `add` takes part after part."""

    def __init__(self, projection: Projection) -> None:
        self._projection = projection
        self.clear()

    def __repr__(self) -> str:
        return f"<GradientComparison over {self.elements} elements>"

    def clear(self) -> None:
        """Another attempt."""
        self.elements = 0
        self._weights: Sequence[float] = ()
        self._ways_PK = torch.zeros(0, SKETCHED)
        self._squares_P = torch.zeros(0)
        self._products_PP = torch.zeros(0, 0, dtype=torch.float64)

    def add(
        self, start: int, centre_M: Tensor, ways: Sequence[Tensor], weights: Sequence[float], honest: float
    ) -> None:
        """One part, which begins at element `start`: its centre, the members' ways from there and their weights; `honest` is
        the distance of an honest member of weight 1. Parts count by their lengths, however large their gradients are."""
        if not self.elements:
            count = len(ways)
            self._weights = weights
            self._ways_PK, self._squares_P = torch.zeros(count, SKETCHED), torch.zeros(count)
            self._products_PP = torch.zeros(count, count, dtype=torch.float64)
        length = len(centre_M)
        for member, (way_M, weight) in enumerate(zip(ways, weights, strict=True)):
            scale = math.sqrt(weight) / honest
            self._ways_PK[member] += self._projection.sketch(start, way_M) * (scale * math.sqrt(length))
            self._squares_P[member] += float(way_M.norm() * scale) ** 2 * length
        self._products_PP += products(centre_M, ways) * (length / honest**2)
        self.elements += length

    def deviations(self) -> list[Deviation]:
        """Of each member, in their order; none where no part was settled here."""
        if not self.elements:
            return []
        lengths_P = self._products_PP.diagonal().sqrt().clamp_min(1e-300)
        cosines_PP = self._products_PP / lengths_P.outer(lengths_P)
        others = len(self._weights) - 1
        agreement = ((cosines_PP.sum(dim=1) - cosines_PP.diagonal()) / others).tolist()
        return [
            Deviation(
                self._ways_PK[member] / math.sqrt(self.elements),
                math.sqrt(float(self._squares_P[member]) / self.elements),
                agreement[member] - LITTLE * self._usual(member, agreement),
            )
            for member in range(len(self._weights))
        ]

    def _usual(self, member: int, agreement: Sequence[float]) -> float:
        """Agreement of the others; less is expected of who has fewer samples."""
        others = [place for place in range(len(agreement)) if place != member]
        weight = statistics.median(self._weights[place] for place in others)
        fewer = min(1.0, math.sqrt(self._weights[member] / weight))
        return fewer * statistics.median(agreement[place] for place in others)


def products(centre_M: Tensor, ways: Sequence[Tensor]) -> Tensor:
    """products_PP, float64: of each two members' shares, which are the centre and the way from there."""
    ways_PM = [centre_M, *ways]
    found = torch.tensor([[float(one_M @ other_M) for other_M in ways_PM] for one_M in ways_PM], dtype=torch.float64)
    to_centre_P = found[0, 1:]
    return found[1:, 1:] + to_centre_P[:, None] + to_centre_P[None, :] + found[0, 0]
