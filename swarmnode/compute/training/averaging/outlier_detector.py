"""Outlier detector: which member of a group has been sending what is not the gradient of its microbatches.

Three things tell. *How far off* it is, against the others, on average over the last steps: a gradient a hundred times too long
shows at once. *How constant* the way there is: honest members are off by the noise of their samples, which is another one each
step, so that the squared length of a sum of ways is about the sum of their squares; whoever pulls into one direction makes it
grow towards that times the number of steps. And *whether it goes along*: honest gradients have a direction in common, however
little; one that is turned round, nothing, or noise has not.

What one member suspects is a voice, and no verdict: the coordinator goes by most of the others
(`coordinator/all_reduce_attempt.py`).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from swarmnode.compute.training.averaging.centred_clipping import CentredClipping
from swarmnode.compute.training.averaging.gradient_comparison import Deviation
from swarmnode.compute.training.averaging.projection import SKETCHED, Projection

FAR = 3.0  # times the distance of honest members, on average
DISTANCE_GAIN = 0.2
MEMORY = 0.95  # of ways and spreads, a step
CONSTANT = 5.0  # times what independent ways come to
OTHERS = 2.0  # times the other members' constancy: where one misleads, the centre moves, and all are off a little
STEPS = 8  # before constancy says anything
AGAINST = 10.0  # a cumulative sum (Page, Biometrika 1954) of how many spreads agreement is below 0, each step ...
ALLOWANCE = 0.5  # ... less this: what is only noise does not add up
LARGEST_STEP = 3.0  # one step alone proves nothing
LEAST_SPREAD = 0.02


@dataclass(frozen=True)
class History:
    """Of one member. `ways_K`, `squares` and `changes` are sums over the steps, all of which fade by `MEMORY`, `distance` is a
    mean."""

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
        """One step further."""
        change = 0.0 if self.agreement is None else deviation.agreement - self.agreement
        below = min(LARGEST_STEP, -deviation.agreement / self._spread)
        return History(
            MEMORY * self.ways_K + deviation.way_K,
            MEMORY**2 * self.squares + float(deviation.way_K.square().sum()),
            self.distance + DISTANCE_GAIN * (deviation.distance - self.distance),
            deviation.agreement,
            MEMORY * self.changes + change**2,
            max(0.0, self.against + below - ALLOWANCE),
            self.steps + 1,
        )

    @property
    def constancy(self) -> float:
        """About 1 where each step's way is independent of those before."""
        return float(self.ways_K.square().sum()) / self.squares if self.squares else 1.0

    @property
    def _spread(self) -> float:
        """Of agreement; a change has twice its variance."""
        weight = (1 - MEMORY**self.steps) / (1 - MEMORY)
        return max(LEAST_SPREAD, math.sqrt(self.changes / max(1.0, weight) / 2))


class OutlierDetector:
    """What one member has seen of the contributors of its groups, itself among them. `seed` is its secret."""

    def __init__(self, seed: int) -> None:
        self._projection = Projection(seed)
        self._clippings: dict[Hashable, CentredClipping] = {}
        self._contributors: dict[Hashable, Sequence[str]] = {}
        self._attempt: set[Hashable] = set()  # groups that are summed in it
        self._members: set[str] = set()  # of these groups, contributors or not
        self._histories: dict[str, History] = {}

    def __repr__(self) -> str:
        return f"<OutlierDetector {self._histories}>"

    def begin(self) -> None:
        """Another attempt to reduce."""
        self._attempt, self._members = set(), set()

    def clipping(self, group: Hashable, contributors: Sequence[str], members: Iterable[str]) -> CentredClipping:
        """With which what these peers contribute to a group is summed in this attempt."""
        if self._contributors.get(group) != contributors:
            self._clippings[group], self._contributors[group] = CentredClipping(self._projection), contributors
        self._attempt.add(group)
        self._members.update(members)
        self._clippings[group].comparison.clear()
        return self._clippings[group]

    def histories(self) -> dict[str, History]:
        """By peer, were this attempt's step committed. Where a member is gone, all begins anew: it may have made the others look
        wrong."""
        before = {} if self._histories.keys() - self._members else self._histories
        now = {peer: before.get(peer, History()).followed_by(found) for peer, found in self._deviations().items()}
        return before | now

    def _deviations(self) -> dict[str, Deviation]:
        """Of each peer, by the group of which most was settled here."""
        found: dict[str, Deviation] = {}
        for group in sorted(self._attempt, key=lambda group: self._clippings[group].comparison.elements):
            deviations = self._clippings[group].comparison.deviations()
            found.update(zip(self._contributors[group], deviations, strict=False))
        return found

    def accept(self, histories: dict[str, History]) -> None:
        """The step was committed."""
        self._histories = histories


def suspect(histories: Mapping[str, History]) -> str | None:
    """The one that stands out the most, if one does."""
    farthest = max(histories, key=lambda peer: histories[peer].distance, default=None)
    if farthest is not None and histories[farthest].distance > FAR:
        return farthest
    against = max(histories, key=lambda peer: histories[peer].against, default=None)
    if against is not None and histories[against].against > AGAINST:
        return against
    known = {peer: history for peer, history in histories.items() if history.steps >= STEPS}
    if len(known) < 2:
        return None
    steadiest = max(known, key=lambda peer: known[peer].constancy)
    others = statistics.median(history.constancy for peer, history in known.items() if peer != steadiest)
    return steadiest if known[steadiest].constancy > max(CONSTANT, OTHERS * others) else None
