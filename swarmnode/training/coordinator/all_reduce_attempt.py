"""All-reduce attempt: the coordinator's view of one attempt of the replicas to agree on their gradients."""

from __future__ import annotations

import logging
import math
import statistics
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import KW_ONLY, dataclass

from swarmnode.codec.training_messages import Group, How, Reduce, Reduced
from swarmnode.net.interfaces import PeerId

log = logging.getLogger(__name__)

LARGEST_SQUARE = 1e90  # no vector of float32 numbers has a larger square
OTHERS_S = 5.0  # after a first failure, for the answers of the others, which show whose fault it was
LARGEST_RATIO = 1e4  # of the squares that one peer alone reports to those of all others: a hundred times their norm


@dataclass(eq=False)
class AllReduceAttempt:
    """An attempt at an all-reduce. Each of `peers` is asked to take part in its groups; the attempt is over once all have answered.
    `run` is the run's id, `within_s` the peers' time limit in seconds, and `clock` returns seconds."""

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
        self.failures: dict[PeerId, PeerId] = {}  # failed peer -> the peer that it accuses, or itself
        self.late: set[PeerId] = set()  # not done in time; they accuse no peer
        self._failed_at_s: float | None = None  # time of the first failure
        self._waiting = set(self.peers)
        self._squares: dict[int, dict[PeerId, float]] = {}  # reported squares, by group and reporting peer
        self._suspects: dict[PeerId, PeerId] = {}  # the peer that each peer suspects

    def __repr__(self) -> str:
        return f"<AllReduce {self.attempt} of step {self.step}, waiting for {len(self._waiting)}>"

    @property
    def over(self) -> bool:
        """Whether every peer has answered."""
        return not self._waiting

    @property
    def failed(self) -> bool:
        """Whether a peer failed or was late."""
        return bool(self.failures or self.late)

    def is_decided(self) -> bool:
        """Return whether the attempt needs no more answers: all peers have answered, or OTHERS_S have passed since the
        first failure."""
        waited_s = 0.0 if self._failed_at_s is None else self.clock() - self._failed_at_s
        return self.over or (bool(self.failures) and waited_s >= OTHERS_S)

    def request(self, peer: PeerId) -> Reduce:
        """Return the REDUCE message to `peer`, with the groups of blocks that it averages."""
        return Reduce(self.step, self.attempt, tuple(self._groups_of(peer)), self.run, self.within_s)

    def _groups_of(self, peer: PeerId) -> list[Group]:
        return [group for group in self.groups if any(member.peer == peer for member in group.members)]

    def hear(self, peer: PeerId, body: Reduced) -> bool:
        """Record the answer of `peer`. Returns whether it counts. Ignores an answer to an earlier attempt and a second answer. A
        malformed answer makes the peer fail."""
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
        """Record that `peer` failed and accuses `accused`; None accuses itself. Ignores a peer that has answered."""
        if self._ends(peer):
            self.failures[peer] = accused or peer

    def expire(self, peer: PeerId) -> None:
        """Record that `peer` was not done in time. Ignores a peer that has answered."""
        if self._ends(peer):
            self.late.add(peer)

    def lose(self, peer: PeerId) -> None:
        """Record that `peer` is lost. This is its own failure, so that the attempt is decided at once."""
        if peer in self._waiting:
            self.fail(peer, None)
            self._failed_at_s = -math.inf

    def _ends(self, peer: PeerId) -> bool:
        """Mark `peer` as answered with a failure. Returns False if it has answered before."""
        if peer not in self._waiting:
            return False
        self._waiting.discard(peer)
        self._failed_at_s = self.clock() if self._failed_at_s is None else self._failed_at_s
        return True

    @property
    def contributors(self) -> set[PeerId]:
        """Ids of the peers whose gradients are summed in this attempt."""
        return {member.peer for group in self.groups for member in group.members if member.count}

    @property
    def convicted(self) -> PeerId | None:
        """The contributor whose contribution is not its gradient, in the view of more than half of the group's other contributors;
        None if there is none. At least two must say so, since the word of one member decides nothing about another."""
        for group in self.groups:
            contributors = {member.peer for member in group.members if member.count}
            voices = Counter(self._suspects.get(peer) for peer in contributors if self._suspects.get(peer) != peer)
            for peer in sorted(contributors):
                if voices[peer] > max(1, (len(contributors) - 1) / 2):
                    return peer
        return None

    @property
    def culprit(self) -> PeerId | None:
        """The peer to leave out of the next attempt; None if all failures were only late answers.

        An accused peer comes first if it has not answered or has several accusers. Otherwise it is the first of the peers
        that failed, since the word of one member decides nothing about another.
        """
        accused = Counter(name for peer, name in self.failures.items() if name != peer)
        for name, count in sorted(accused.items(), key=lambda item: (-item[1], item[0])):
            if name in self._waiting or count > 1:
                return name
        return min(self.failures, default=None)

    def norm(self) -> float:
        """Return the norm of the gradient over the whole model. The squares that one peer alone reports are capped at LARGEST_RATIO
        times all others together: an absurd norm would clip the update of every layer to nothing."""
        squares = {group.number: self._square(group) for group in self.groups}
        alone = {number: next(iter(told)) for number, told in self._squares.items() if len(told) == 1}
        for peer in set(alone.values()):
            own = [number for number in squares if alone.get(number) == peer]
            others = math.fsum(square for number, square in squares.items() if number not in own)
            total = math.fsum(squares[number] for number in own)
            if others > 0 and total > LARGEST_RATIO * others:
                log.warning("stage %s alone reports %.1e times the square of all others", peer, total / others)
                squares |= {number: squares[number] / total * LARGEST_RATIO * others for number in own}
        return math.sqrt(math.fsum(squares.values()))

    def _square(self, group: Group) -> float:
        """Return the group's square; 0 if none was reported. Replicas that sum report the same square, so the lower median is
        taken: one liar of two can only lower it, one of three or more cannot move it. Replicas that update apart report
        different squares, so the mean is taken."""
        told = [*self._squares.get(group.number, {}).values()] or [0.0]
        return statistics.median_low(told) if group.how == How.SUM else math.fsum(told) / len(told)
