"""What a rule of placement comes to: peers join one after another, then decide in turn until nobody wants to move.

The rule sees what a peer sees in the directory and nothing else. For tests, benchmarks and studies.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from swarmnode.net.interfaces import PeerId
from swarmnode.plan.spans.flow import bound, supply_of, throughput
from swarmnode.plan.spans.placement import Joiner, choose_span, reconsider
from swarmnode.plan.view import PeerView, Span, View


@dataclass(frozen=True)
class Rule:
    """How a peer chooses when it joins, and where it moves when it looks again (None: it stays)."""

    name: str
    join: Callable[[View, Joiner], Span]
    again: Callable[[View, Joiner], Span | None]


def _again(view: View, joiner: Joiner) -> Span | None:
    move = reconsider(view, joiner)
    return move.span if move is not None else None


BEST_RESPONSE = Rule("best response", choose_span, _again)


@dataclass
class Settling:
    """A swarm whose peers decide by one rule. `moves` of each round so far."""

    units: int
    rule: Rule
    peers: dict[PeerId, tuple[Joiner, PeerView]] = field(default_factory=dict)
    moves: list[int] = field(default_factory=list)

    def __repr__(self) -> str:
        return f"<Settling {len(self.peers)} peers by {self.rule.name}, moves {self.moves}>"

    def view(self) -> View:
        """What all see."""
        return View(self.units, tuple(view for _, view in self.peers.values()))

    def join(self, joiners: Iterable[Joiner]) -> None:
        """One after another, in this order."""
        for joiner in joiners:
            span = self.rule.join(self.view(), joiner)
            self.peers[joiner.peer] = joiner, PeerView(joiner.peer, span, decode_units_per_s=joiner.decode_units_per_s)

    def vanish(self, peers: Sequence[PeerId]) -> None:
        """Without a goodbye."""
        for peer in peers:
            del self.peers[peer]

    def settle(self, rounds: int, chance: random.Random) -> bool:
        """At most so many decisions of every peer, each round in a new order; whether at the end nobody moved."""
        for _ in range(rounds):
            order = sorted(self.peers)
            chance.shuffle(order)
            self.moves.append(sum(self._decide(peer) for peer in order))
            if not self.moves[-1]:
                return True
        return False

    def _decide(self, peer: PeerId) -> bool:
        joiner, view = self.peers[peer]
        span = self.rule.again(self.view(), joiner)
        if span is None or span == view.span:
            return False
        self.peers[peer] = joiner, replace(view, span=span)
        return True

    def quality(self) -> float:
        """Throughput relative to the max-flow upper bound of any placement; 0 where a unit has no holder."""
        spans = [(*view.span, joiner.decode_units_per_s) for joiner, view in self.peers.values()]
        most = bound(
            self.units, ((joiner.capacity_units, joiner.decode_units_per_s) for joiner, _ in self.peers.values())
        )
        return throughput(supply_of(self.units, spans)) / most if most else 0.0
