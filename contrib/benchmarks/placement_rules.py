"""Rules of placement of other systems, to measure ours against: Petals and SWARM, each as its paper tells.

Petals (arXiv 2209.01188, section 3.2): a server takes the window whose blocks have the least throughput, compared as a
sorted list; later it asks what the swarm would do if it moved, and moves where the present is worth less than 0.75 of that.

SWARM (arXiv 2301.11913, section 3.2): the model is cut into equal stages; a newcomer joins the stage with the least
throughput; again and again a peer of the least loaded stage moves to the most loaded one. Which of its peers: the one
that is used least, that is the slowest.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from swarmnode.net.interfaces import PeerId
from swarmnode.plan.spans.flow import bound, supply_of, throughput
from swarmnode.plan.spans.span_placement import Joiner, choose_span, reconsider
from swarmnode.plan.view import PeerView, Span, View

PETALS_BALANCE = 0.75


@dataclass(frozen=True)
class Rule:
    """A peer's choice when it joins, and its move when it looks again (None: it stays)."""

    name: str
    join: Callable[[View, Joiner], Span]
    again: Callable[[View, Joiner], Span | None]


def _again(view: View, joiner: Joiner) -> Span | None:
    move = reconsider(view, joiner)
    return move.span if move is not None else None


BEST_RESPONSE = Rule("best response", choose_span, _again)


@dataclass
class Settling:
    """A swarm whose peers decide by one rule. `moves` counts the moves of each round."""

    units: int
    rule: Rule
    peers: dict[PeerId, tuple[Joiner, PeerView]] = field(default_factory=dict)
    moves: list[int] = field(default_factory=list)

    def __repr__(self) -> str:
        return f"<Settling {len(self.peers)} peers by {self.rule.name}, moves {self.moves}>"

    def view(self) -> View:
        """Return the view that all peers see."""
        return View(self.units, tuple(view for _, view in self.peers.values()))

    def join(self, joiners: Iterable[Joiner]) -> None:
        """Let the joiners choose one after another, in this order."""
        for joiner in joiners:
            span = self.rule.join(self.view(), joiner)
            self.peers[joiner.peer] = joiner, PeerView(joiner.peer, span, decode_units_per_s=joiner.decode_units_per_s)

    def vanish(self, peers: Sequence[PeerId]) -> None:
        """Remove the peers without notice."""
        for peer in peers:
            del self.peers[peer]

    def settle(self, rounds: int, chance: random.Random) -> bool:
        """Let every peer decide again, up to `rounds` times, each round in a new order. Returns True once a round had no
        moves."""
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
        """Return the throughput relative to the max-flow upper bound of any placement; 0 if a unit has no holder."""
        spans = [(*view.span, joiner.decode_units_per_s) for joiner, view in self.peers.values()]
        most = bound(
            self.units, ((joiner.capacity_units, joiner.decode_units_per_s) for joiner, _ in self.peers.values())
        )
        return throughput(supply_of(self.units, spans)) / most if most else 0.0


def petals() -> Rule:
    """Return the placement rule of Petals."""
    return Rule("Petals", _petals_join, _petals_again)


def _petals_join(view: View, joiner: Joiner) -> Span:
    size = max(1, min(joiner.capacity_units, view.units))
    totals = _throughputs(view.units, [peer for peer in view.peers if peer.peer != joiner.peer])
    start = min(range(view.units - size + 1), key=lambda start: (sorted(totals[start : start + size]), start))
    return Span(start, start + size)


def _petals_again(view: View, joiner: Joiner) -> Span | None:
    others = [peer for peer in view.peers if peer.peer != joiner.peer]
    now = min(_throughputs(view.units, view.peers))
    span = _petals_join(view, joiner)
    moved = PeerView(joiner.peer, span, decode_units_per_s=joiner.decode_units_per_s)
    then = min(_throughputs(view.units, [*others, moved]))
    return span if now < PETALS_BALANCE * then else None


def _throughputs(units: int, peers: Iterable[PeerView]) -> list[float]:
    """Return for each block the sum over its servers of speed / blocks served."""
    totals = [0.0] * units
    for peer in peers:
        for unit in range(*peer.span):
            totals[unit] += peer.decode_units_per_s / peer.span.units
    return totals


@dataclass(frozen=True)
class Stages:
    """A model cut into equal stages of `size` units (the last one may be shorter)."""

    units: int
    size: int

    def spans(self) -> list[Span]:
        """Return the spans of the stages, in order."""
        return [Span(start, min(start + self.size, self.units)) for start in range(0, self.units, self.size)]

    def loads(self, view: View) -> dict[Span, float]:
        """Load of each stage: the share of a token's time that its peers together need."""
        speeds = dict.fromkeys(self.spans(), 0.0)
        for peer in view.peers:
            if peer.span in speeds:
                speeds[peer.span] += peer.decode_units_per_s
        return {span: span.units / speed if speed else float("inf") for span, speed in speeds.items()}


def swarm(units: int, stage_units: int) -> Rule:
    """Return SWARM's rule with stages of `stage_units` units. A peer with memory for fewer units holds nothing."""
    stages = Stages(units, stage_units)

    def join(view: View, joiner: Joiner) -> Span:
        if joiner.capacity_units < stage_units:
            return Span(0, 0)
        loads = stages.loads(View(view.units, tuple(peer for peer in view.peers if peer.peer != joiner.peer)))
        return max(loads, key=lambda span: (loads[span], -span.start))

    def again(view: View, joiner: Joiner) -> Span | None:
        loads = stages.loads(view)
        least, most = min(loads, key=lambda span: loads[span]), max(loads, key=lambda span: loads[span])
        idle = [peer for peer in view.peers if peer.span == least]
        if not idle:
            return None
        slowest = min(idle, key=lambda peer: (peer.decode_units_per_s, peer.peer))
        if slowest.peer != joiner.peer or len(idle) < 2:
            return None  # not its turn, or the stage would be left empty
        speed_left = least.units / loads[least] - slowest.decode_units_per_s
        return most if least.units / speed_left < loads[most] else None

    return Rule("SWARM", join, again)
