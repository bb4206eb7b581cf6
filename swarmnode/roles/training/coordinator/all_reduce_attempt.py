"""All-reduce: one attempt of the replicas to agree, as the coordinator follows it."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

from swarmnode.codec.training_messages import Group, How, Reduce, Reduced
from swarmnode.net.interfaces import PeerId


class AllReduceAttempt:
    """`peers` are asked, each for the groups that it is in; it is over when all have answered."""

    def __init__(self, step: int, attempt: int, groups: Sequence[Group], peers: Collection[PeerId]) -> None:
        self.step = step
        self.attempt = attempt
        self._groups = groups
        self._waiting = set(peers)
        self._squares: dict[int, list[float]] = {}

    def __repr__(self) -> str:
        return f"<AllReduce {self.attempt} of step {self.step}, waiting for {len(self._waiting)}>"

    @property
    def over(self) -> bool:
        """Whether everybody has answered."""
        return not self._waiting

    def needs(self, peer: PeerId) -> bool:
        """Whether it cannot be without this one."""
        return peer in self._waiting

    def request(self, peer: PeerId) -> Reduce:
        """What one of them is asked."""
        return Reduce(self.step, self.attempt, tuple(self._groups_of(peer)))

    def _groups_of(self, peer: PeerId) -> list[Group]:
        return [group for group in self._groups if any(member.peer == peer for member in group.members)]

    def hear(self, peer: PeerId, body: Reduced) -> None:
        """An answer. One to an earlier attempt, or a second one, does nothing."""
        if body.attempt == self.attempt and body.step == self.step and peer in self._waiting:
            for group, square in zip(self._groups_of(peer), body.squares, strict=False):
                self._squares.setdefault(group.number, []).append(square)
            self._waiting.discard(peer)

    def norm(self) -> float:
        """Of the gradient over the whole model. Replicas that update apart have different ones: their mean square counts."""
        return math.sqrt(sum(self._square(group) for group in self._groups))

    def _square(self, group: Group) -> float:
        squares = self._squares.get(group.number, [0.0])
        return squares[0] if group.how == How.SUM else math.fsum(squares) / len(squares)
