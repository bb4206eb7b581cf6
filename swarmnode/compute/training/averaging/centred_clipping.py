"""Centred clipping: a sum of gradients that no single member can drag far away (Karimireddy et al., arXiv 2012.10333).

What a member offers stands, divided by its weight, for the mean gradient of the whole batch. Where all are honest these shares
lie round a centre, each about as far away as its samples are few. The owner of a part takes the median of each coordinate for
the centre, and the median of the distances for how far honest members lie; who lies `RADIUS` times as far is drawn back to
there. Nobody is, as a rule, and then the sum is what it would have been without, bit for bit. Who lies within the radius may
still mislead a little, step for step: for that the members are compared (`gradient_comparison.py`), and who does so for long is
seen (`outlier_detector.py`).

The radius is of one part at a time, so that nothing waits for a vector to be seen whole. A part in which most members have nothing
(rows of tokens that are rare) has no radius of its own: the usual one of this owner's parts is the least.

Shape letters: M elements of a part.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

import torch
from torch import Tensor

from swarmnode.compute.training.averaging.gradient_comparison import GradientComparison
from swarmnode.compute.training.averaging.parts import Contribution
from swarmnode.compute.training.averaging.projection import Projection

RADIUS = 3.0  # times the distance at which honest members lie
LEAST_MEMBERS = 3  # of two that differ nobody can tell which one is wrong
USUAL_GAIN = 0.1
SLICE = 1 << 15  # elements of which the median is found at once: what sorting takes stays small


class CentredClipping:
    """Of one group of blocks. `projection` is for what is told of the members."""

    def __init__(self, projection: Projection) -> None:
        self.comparison = GradientComparison(projection)
        self._usual_square = 0.0  # of the distance at which honest members lie, by element

    def __repr__(self) -> str:
        return f"<CentredClipping, usual distance {math.sqrt(self._usual_square):.3g}, {self.comparison!r}>"

    def reduce(self, part: slice, received: Sequence[Contribution]) -> Tensor:
        """The sum_M of at least `LEAST_MEMBERS` contributions, in their order; see `parts.reduce_part`. Owners may come to
        different radii: each part is settled by one alone."""
        weights = [member.weight for member in received]
        ways = [member.values_N / member.weight for member in received]
        centre_M = median(ways)
        for way_M in ways:
            way_M -= centre_M
        lengths = [float(way_M.norm()) for way_M in ways]
        honest = self._honest_distance(weights, lengths, len(centre_M))
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

    def _honest_distance(self, weights: Sequence[float], lengths: Sequence[float], elements: int) -> float:
        """From the centre, of one whose weight is 1: the more samples, the nearer."""
        found = statistics.median(length * math.sqrt(weight) for weight, length in zip(weights, lengths, strict=True))
        gain = USUAL_GAIN if self._usual_square else 1.0
        self._usual_square += gain * (found * found / elements - self._usual_square)
        return max(found, math.sqrt(self._usual_square * elements))


def median(shares: Sequence[Tensor]) -> Tensor:
    """Of each coordinate; of an even number the mean of the two in the middle, since one of them alone leans to a side."""
    middle = slice((len(shares) - 1) // 2, len(shares) // 2 + 1)
    found = [
        torch.stack(slices).sort(dim=0).values[middle].mean(dim=0)
        for slices in zip(*(share_M.split(SLICE) for share_M in shares), strict=True)
    ]
    return torch.cat(found)
