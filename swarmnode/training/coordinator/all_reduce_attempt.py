"""All-reduce: one attempt of the replicas to agree, as the coordinator follows it."""

from __future__ import annotations

import logging
import math
import statistics
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import KW_ONLY, dataclass

from swarmnode.codec.averaging_messages import Group, How, Reduce, Reduced
from swarmnode.net.interfaces import PeerId

log = logging.getLogger(__name__)

LARGEST_SQUARE = 1e90  # no vector of float32 numbers has a larger one
OTHERS_S = 5.0  # after one failed to reduce: who else does is to be heard, so that it is known whose fault it was
LARGEST_RATIO = 1e4  # of what one peer alone tells to what all others tell: a hundred times their norm


@dataclass(eq=False)
class AllReduceAttempt:
    """Attempt at an all-reduce. `peers` are asked, each for the groups that it is in; the attempt is over when all have answered.
    `run` is the run's id, `within_s` the seconds that they have for it, and `clock` in seconds, too."""

    step: int
    attempt: int
    groups: Sequence[Group]
    peers: Collection[PeerId]
    _: KW_ONLY
    run: bytes = b""
    within_s: float = 0.0
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self.began_s = self.clock()
        self.failures: dict[PeerId, PeerId] = {}  # who failed -> whom it accused; itself, where it named nobody
        self.late: set[PeerId] = set()  # were not done in time, and accuse nobody
        self._failed_at_s: float | None = None  # when the first one failed
        self._waiting = set(self.peers)
        self._squares: dict[int, dict[PeerId, float]] = {}  # by group and who tells it
        self._suspects: dict[PeerId, PeerId] = {}  # who suspects whom

    def __repr__(self) -> str:
        return f"<AllReduce {self.attempt} of step {self.step}, waiting for {len(self._waiting)}>"

    @property
    def over(self) -> bool:
        """Whether everybody has answered."""
        return not self._waiting

    @property
    def failed(self) -> bool:
        """Whether somebody could not."""
        return bool(self.failures or self.late)

    def is_decided(self) -> bool:
        """Return whether nothing more is waited for: all have answered, or one failed and the others had time to say so."""
        waited_s = 0.0 if self._failed_at_s is None else self.clock() - self._failed_at_s
        return self.over or (bool(self.failures) and waited_s >= OTHERS_S)

    def request(self, peer: PeerId) -> Reduce:
        """What one of them is asked."""
        return Reduce(self.step, self.attempt, tuple(self._groups_of(peer)), self.run, self.within_s)

    def _groups_of(self, peer: PeerId) -> list[Group]:
        return [group for group in self.groups if any(member.peer == peer for member in group.members)]

    def hear(self, peer: PeerId, body: Reduced) -> bool:
        """An answer; whether it counts. One to an earlier attempt, or a second one, does nothing; squares that are none are its own
        failure."""
        if body.attempt != self.attempt or body.step != self.step or peer not in self._waiting:
            return False
        groups = self._groups_of(peer)
        if len(body.squares) != len(groups) or not all(0 <= square <= LARGEST_SQUARE for square in body.squares):
            self.fail(peer, None)
            return False
        for group, square in zip(groups, body.squares, strict=True):
            self._squares.setdefault(group.number, {})[peer] = square
        self._suspects[peer] = body.suspect
        self._waiting.discard(peer)
        return True

    def fail(self, peer: PeerId, accused: PeerId | None) -> None:
        """Note that one of them could not, because of `accused` as it says."""
        if self._ends(peer):
            self.failures[peer] = accused or peer

    def expire(self, peer: PeerId) -> None:
        """Note that one of them was not done in time."""
        if self._ends(peer):
            self.late.add(peer)

    def lose(self, peer: PeerId) -> None:
        """Note that one of them is gone: its own fault, so that nobody else need be heard."""
        if peer in self._waiting:
            self.fail(peer, None)
            self._failed_at_s = -math.inf

    def _ends(self, peer: PeerId) -> bool:
        """Whether this is the first word of one of them; it is a failure."""
        if peer not in self._waiting:
            return False
        self._waiting.discard(peer)
        self._failed_at_s = self.clock() if self._failed_at_s is None else self._failed_at_s
        return True

    @property
    def contributors(self) -> set[PeerId]:
        """All those whose gradients are summed."""
        return {member.peer for group in self.groups for member in group.members if member.count}

    @property
    def convicted(self) -> PeerId | None:
        """Of whom more than half of the others that contribute to a group with it say that what it contributes is not its
        gradient; at least two of them, for one member's word decides nothing about another."""
        for group in self.groups:
            contributors = {member.peer for member in group.members if member.count}
            voices = Counter(self._suspects.get(peer) for peer in contributors if self._suspects.get(peer) != peer)
            for peer in sorted(contributors):
                if voices[peer] > max(1, (len(contributors) - 1) / 2):
                    return peer
        return None

    @property
    def culprit(self) -> PeerId | None:
        """Whom to do without in the next attempt: who is accused and does not answer, or is accused by several; else who fails
        alone, for one member's word decides nothing about another. None where all were only late."""
        accused = Counter(name for peer, name in self.failures.items() if name != peer)
        for name, count in sorted(accused.items(), key=lambda item: (-item[1], item[0])):
            if name in self._waiting or count > 1:
                return name
        return min(self.failures, default=None)

    def norm(self) -> float:
        """Of the gradient over the whole model. What one peer alone tells counts for so much beside the others' word at most: by a
        norm out of all reason it would take all units' updates away."""
        squares = {group.number: self._square(group) for group in self.groups}
        alone = {number: next(iter(told)) for number, told in self._squares.items() if len(told) == 1}
        for peer in set(alone.values()):
            own = [number for number in squares if alone.get(number) == peer]
            others = math.fsum(square for number, square in squares.items() if number not in own)
            total = math.fsum(squares[number] for number in own)
            if others > 0 and total > LARGEST_RATIO * others:
                log.warning("stage %s alone tells %.1e times the square of all others", peer, total / others)
                squares |= {number: squares[number] / total * LARGEST_RATIO * others for number in own}
        return math.sqrt(math.fsum(squares.values()))

    def _square(self, group: Group) -> float:
        """Replicas that have the same sum tell the same square: the median of what they say, so that one liar moves nothing. Those
        that update apart have different ones: their mean."""
        told = [*self._squares.get(group.number, {}).values()] or [0.0]
        return statistics.median_low(told) if group.how == How.SUM else math.fsum(told) / len(told)
