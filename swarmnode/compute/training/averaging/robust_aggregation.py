"""Robust aggregation: sums of gradients that no single member can drag far away, and detection of a member that tries.

*Centred clipping* (Karimireddy et al., arXiv 2012.10333). A member's contribution, divided by its weight, is an estimate of the
mean gradient of the whole batch. Those of honest members lie around a centre, the further away the fewer samples they have. The
owner of a part takes the median of each coordinate for the centre, and the median of the distances for those of honest members.
A contribution beyond `RADIUS` times this distance is drawn back to that bound. Usually there is none, and then the sum is the
same as without clipping, bit for bit. The radius is that of one part at a time, so that no part waits for the whole vector. It is
at least the usual radius of this owner's parts: a part may have none of its own, if most members have nothing in it (rows of rare
tokens).

*Outlier detection.* A contribution within the radius may still mislead a little, step for step. So each owner compares the members
in the parts that it settles, by three measures. *Distance*: relative to the others, on average over the last steps; a gradient a
hundred times too long shows at once. *Constancy* of the direction from the centre: honest members are off by the noise of their
samples, which differs each step. The squared length of a sum of these ways is then about the sum of their squares; for a member
that pulls into one direction it grows towards that times the number of steps. *Agreement*: honest gradients have some direction in
common; a reversed gradient, a zero one or noise has none. The suspicion of one member is a vote and no verdict: the coordinator
follows the majority (`coordinator/averaging_groups.py`). `plan/findings.py` decides which member stands out.

Shape letters: P members, Q the centre and the members, M elements of a part, K of a sketch.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from swarmnode import tolerances
from swarmnode.compute.training.averaging.parts import Contribution
from swarmnode.compute.training.recomputation import SKETCHED, count_sketch

RADIUS = 3.0  # times the distance of honest members
LEAST_MEMBERS = 3  # with two that differ it is unknown which one is wrong
USUAL_GAIN = 0.1
SLICE = 1 << 15  # elements whose median is found at once, so that sorting takes little memory
LITTLE = 0.25  # of the others' agreement: an honest member's is less than theirs by its fewer samples at most
DISTANCE_GAIN = 0.2
MEMORY = 0.95  # of ways and spreads, a step
LEAST_SPREAD = 0.02


class CentredClipping:
    """Robust sums of the contributions of `members` to one group of blocks. `seed` is this owner's secret."""

    def __init__(self, seed: bytes, members: Sequence[str] = ()) -> None:
        self.members = members
        self.comparison = GradientComparison(seed)
        self._usual_square = 0.0  # square of the distance of honest members, per element

    def reduce(self, part: slice, received: Sequence[Contribution]) -> Tensor:
        """Return the sum_M of at least `LEAST_MEMBERS` contributions, in their order; see `parts.reduce_part`.

        Owners may come to different radii, since only one of them settles each part.
        """
        weights = [member.weight for member in received]
        ways = [member.values_N / member.weight for member in received]
        centre_M = median(ways)
        for way_M in ways:
            way_M -= centre_M
        lengths = [float(way_M.norm()) for way_M in ways]
        # The distance from the centre of an honest member of weight 1. With more samples it is smaller.
        elements = len(centre_M)
        found = statistics.median(length * math.sqrt(weight) for weight, length in zip(weights, lengths, strict=True))
        gain = USUAL_GAIN if self._usual_square else 1.0
        self._usual_square += gain * (found * found / elements - self._usual_square)
        honest = max(found, math.sqrt(self._usual_square * elements))
        if honest:
            self.comparison.add(part.start, centre_M, ways, weights, honest)
        total_M = torch.zeros_like(centre_M)
        for member, length in zip(received, lengths, strict=True):
            radius = RADIUS * honest / math.sqrt(member.weight)
            if length <= radius:
                total_M += member.values_N
            else:
                total_M += torch.lerp(member.weight * centre_M, member.values_N, radius / length)
        return total_M


def median(shares: Sequence[Tensor]) -> Tensor:
    """Return the median of each coordinate; for an even number the mean of the two middle values, as one alone leans to a side."""
    middle = slice((len(shares) - 1) // 2, len(shares) // 2 + 1)
    found = [
        torch.stack(slices).sort(dim=0).values[middle].mean(dim=0)
        for slices in zip(*(share_M.split(SLICE) for share_M in shares), strict=True)
    ]
    return torch.cat(found)


@dataclass
class Deviation:
    """Relation of one member's gradient to the others' in one step.

    `way_K` is the sketch of the way from the centre to its contribution, in distances of honest members, with about the same
    length. `distance` is that length: about 1 for an honest member. `agreement` is the mean cosine between its gradient and the
    others', less `LITTLE` times theirs: above 0 for an honest member, unless nothing is left to learn.
    """

    way_K: Tensor
    distance: float
    agreement: float


class GradientComparison:
    """Comparison of the members' gradients of one group of blocks, over the parts of one attempt that were settled here."""

    def __init__(self, seed: bytes) -> None:
        self._seed = seed
        self.clear()

    def clear(self) -> None:
        """Forget all values, before another attempt at the same all-reduce."""
        self.elements = 0
        self._weights: Sequence[float] = ()
        self._ways_PK = torch.zeros(())
        self._products_QQ = torch.zeros((), dtype=torch.float64)

    def add(
        self, start: int, centre_M: Tensor, ways: Sequence[Tensor], weights: Sequence[float], honest: float
    ) -> None:
        """Add the part that begins at element `start`: its centre, the members' ways from there, and their weights.

        `honest` is the distance of an honest member of weight 1. Parts count by their length, not by the size of their gradients.
        """
        length = len(centre_M)
        self.elements += length
        self._weights = weights
        sketched_PK = torch.stack([count_sketch(start, way_M, self._seed) for way_M in ways])
        self._ways_PK = self._ways_PK + sketched_PK * (math.sqrt(length) / honest)
        self._products_QQ = self._products_QQ + products([centre_M, *ways]) * (length / honest**2)

    def deviations(self) -> list[Deviation]:
        """Return the deviation of each member, in their order; empty if no part was settled here."""
        if not self.elements:
            return []
        squares_P, to_centre_P = self._products_QQ.diagonal()[1:], self._products_QQ[0, 1:]
        shares_PP = self._products_QQ[1:, 1:] + to_centre_P[:, None] + to_centre_P + self._products_QQ[0, 0]
        lengths_P = shares_PP.diagonal().sqrt().clamp_min(1e-300)
        cosines_PP = shares_PP / lengths_P.outer(lengths_P)
        agreement = ((cosines_PP.sum(dim=1) - cosines_PP.diagonal()) / (len(self._weights) - 1)).tolist()
        return [
            Deviation(
                way_K * math.sqrt(weight / self.elements),
                math.sqrt(float(square) * weight / self.elements),
                agreement[member] - LITTLE * self._usual(member, agreement),
            )
            for member, (way_K, square, weight) in enumerate(zip(self._ways_PK, squares_P, self._weights, strict=True))
        ]

    def _usual(self, member: int, agreement: Sequence[float]) -> float:
        """Return the usual agreement of the other members, lowered for a member with fewer samples."""
        others = [place for place in range(len(agreement)) if place != member]
        weight = statistics.median(self._weights[place] for place in others)
        fewer = min(1.0, math.sqrt(self._weights[member] / weight))
        return fewer * statistics.median(agreement[place] for place in others)


def products(vectors: Sequence[Tensor]) -> Tensor:
    """Return the inner products_QQ (float64) of all pairs of vectors_M."""
    return torch.tensor([[float(one_M @ other_M) for other_M in vectors] for one_M in vectors], dtype=torch.float64)


@dataclass(frozen=True)
class History:
    """Deviations of one member over the steps.

    `ways_K`, `squares` and `changes` are sums that fade by `MEMORY`, `distance` is a mean.
    """

    ways_K: Tensor = field(default_factory=lambda: torch.zeros(SKETCHED))
    squares: float = 0.0  # of ways
    distance: float = 1.0
    agreement: float | None = None  # in the last step
    changes: float = 0.0  # of it from one step to the next, squared
    against: float = 0.0
    steps: int = 0

    def __repr__(self) -> str:
        found = f"distance {self.distance:.2f}, constancy {self.constancy:.2f}, against {self.against:.1f}"
        return f"History({self.steps} steps, {found})"

    def followed_by(self, deviation: Deviation) -> History:
        """Return the history of a member after one more step, whose contribution had this `deviation`."""
        change = 0.0 if self.agreement is None else deviation.agreement - self.agreement
        below = min(tolerances.LARGEST_STEP, -deviation.agreement / self._spread)
        return History(
            MEMORY * self.ways_K + deviation.way_K,
            MEMORY**2 * self.squares + float(deviation.way_K.square().sum()),
            self.distance + DISTANCE_GAIN * (deviation.distance - self.distance),
            deviation.agreement,
            MEMORY * self.changes + change**2,
            max(0.0, self.against + below - tolerances.ALLOWANCE),
            self.steps + 1,
        )

    @property
    def constancy(self) -> float:
        """Measure of how little a member's deviation changes its direction: about 1 if each step's direction is independent of
        the earlier ones."""
        return float(self.ways_K.square().sum()) / self.squares if self.squares else 1.0

    @property
    def _spread(self) -> float:
        """Spread of the agreement. Its change from step to step has twice the variance."""
        weight = (1 - MEMORY**self.steps) / (1 - MEMORY)
        return max(LEAST_SPREAD, math.sqrt(self.changes / max(1.0, weight) / 2))


class OutlierDetector:
    """Detector, at one member of an all-reduce, of members whose contributions stand out. `seed` is a secret number of this
    member."""

    def __init__(self, seed: bytes) -> None:
        self._seed = seed
        self._clippings: dict[Hashable, CentredClipping] = {}  # by group
        self._attempt: list[CentredClipping] = []  # used in this attempt
        self._members: set[str] = set()  # members of the attempt's groups, contributors or not
        self._histories: dict[str, History] = {}

    def begin(self) -> None:
        """Forget the values of the attempt before, as the all-reduce is tried again."""
        self._attempt, self._members = [], set()

    def clipping(self, group: Hashable, contributors: Sequence[str], members: Iterable[str]) -> CentredClipping:
        """Return the clipping that sums the contributions of `contributors` to a group's mean in this attempt."""
        clipping = self._clippings.get(group)
        if clipping is None or clipping.members != contributors:
            clipping = self._clippings[group] = CentredClipping(self._seed, contributors)
        clipping.comparison.clear()
        self._attempt.append(clipping)
        self._members.update(members)
        return clipping

    def histories(self) -> dict[str, History]:
        """Return the histories of all peers as if this attempt's step were committed.

        If a member is gone, all histories begin anew: it may have made the others look wrong.
        """
        before = {} if self._histories.keys() - self._members else self._histories
        now = {peer: before.get(peer, History()).followed_by(found) for peer, found in self._deviations().items()}
        return before | now

    def _deviations(self) -> dict[str, Deviation]:
        """Return the deviation of each peer, by the group with most elements settled here."""
        found: dict[str, Deviation] = {}
        for clipping in sorted(self._attempt, key=lambda clipping: clipping.comparison.elements):
            found.update(zip(clipping.members, clipping.comparison.deviations(), strict=False))
        return found

    def accept(self, histories: dict[str, History]) -> None:
        """Replace the histories of all members by those of a committed step."""
        self._histories = histories
