"""Which units a peer should hold: the span that the swarm lacks most.

Every peer decides for itself from the same view. The rule, in order: leave the fewest units without a holder; leave
gaps that the fewest further peers can fill; then even out the throughput per unit from below (as Petals, 2209.01188
section 3.2, which compares sorted throughputs of the window; here of the whole model after the choice, in steps so that
noise decides nothing); then keep routes short and spans aligned, so that replicas can stand in for one another; then
draw by peer id, so that peers that decide together differ.

Peers that join at the same time see one another's claims late. A claim of an earlier joiner stands; where one was made
before its maker knew better, we work out what it will choose, since the rule is the same for everybody. So all agree
as soon as they have seen one another.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from swarmnode.net.interfaces import PeerId
from swarmnode.plan.view import PeerView, Span, View, draw
from swarmnode.swarm.announcement import State

UNMEASURED_UNITS_PER_S = 100.0
STEPS_PER_DOUBLING = 4  # throughputs that differ by less than a fifth count as equal


@dataclass(frozen=True, slots=True)
class Joiner:
    """The peer that decides: how many units fit into its memory, and how fast it computes them."""

    peer: PeerId
    capacity_units: int
    decode_units_per_s: float
    started_at: float


def choose_span(view: View, joiner: Joiner) -> Span:
    """The span that `joiner` should take. It has as many units as fit, at most the whole model.

    Peers that drain are leaving and do not count; claims (JOINING) count where they were there before ours.
    """
    others = [peer for peer in view.peers if peer.peer != joiner.peer]
    holders = [peer for peer in others if peer.state in (State.LOADING, State.READY)]
    claims = sorted((peer for peer in others if peer.state is State.JOINING), key=_priority)
    for claim in claims:
        if _priority(claim) < (joiner.started_at, joiner.peer):
            span = _best_span(view.units, holders, claim.peer, claim.span.units, claim.decode_units_per_s)
            holders.append(replace(claim, span=span))
    return _best_span(view.units, holders, joiner.peer, joiner.capacity_units, joiner.decode_units_per_s)


def fill_move(view: View, joiner: Joiner, *, waited_s: float, patience_s: float = 3.0) -> Span | None:
    """Where to move so that units without any holder get one, or None where we should stay.

    Only a move that fills gaps and opens none counts. One peer moves first: the one that fills most, then the
    least loaded; the next in line waits `patience_s` longer, in case that one does not. `waited_s` is the gap's age.
    """
    living = [peer for peer in view.peers if peer.state in (State.JOINING, State.LOADING, State.READY)]
    missing = set(gaps(view.units, living))
    if not missing:
        return None
    own = next((peer for peer in living if peer.peer == joiner.peer), None)
    move = None if own is None else _fill(view.units, living, own, joiner.capacity_units, missing)
    if own is None or move is None:
        return None
    moves: dict[Span, _Fill | None] = {}  # replicas would make the same move
    ahead = 0
    for peer in living:
        if peer.state is not State.READY or peer is own:
            continue
        if peer.span not in moves:
            moves[peer.span] = _fill(view.units, living, peer, peer.span.units, missing)
        other = moves[peer.span]
        ahead += other is not None and _turn(peer, other) < _turn(own, move)
    return move.span if waited_s >= ahead * patience_s else None


class _Fill(NamedTuple):
    """A move that fills gaps, and how many units are still without holder after it."""

    span: Span
    left: int


def _fill(units: int, living: Sequence[PeerView], peer: PeerView, capacity: int, missing: set[int]) -> _Fill | None:
    """Where the peer would go to fill gaps without opening another; None where it cannot."""
    others = [other for other in living if other is not peer]
    span = _best_span(units, others, peer.peer, capacity, peer.decode_units_per_s)
    left = set(gaps(units, [*others, replace(peer, span=span)]))
    return _Fill(span, len(left)) if left < missing else None


def _turn(peer: PeerView, move: _Fill) -> tuple[int, int, int]:
    """Whose turn it is to move: the least first."""
    return move.left, peer.sessions, draw(peer.peer)


def gaps(units: int, peers: Iterable[PeerView]) -> list[int]:
    """The units that none of the peers holds."""
    return [unit for unit, count in enumerate(_holders(units, peers)) if count == 0]


def _priority(peer: PeerView) -> tuple[float, PeerId]:
    return peer.started_at, peer.peer


def _holders(units: int, peers: Iterable[PeerView]) -> list[int]:
    counts = [0] * units
    for peer in peers:
        for unit in range(peer.span.start, min(peer.span.end, units)):
            counts[unit] += 1
    return counts


def _throughputs(units: int, peers: Iterable[PeerView]) -> list[float]:
    """Tokens per second that each unit's holders can do together, each spending its time evenly on its units."""
    totals = [0.0] * units
    for peer in peers:
        share = _share(peer.decode_units_per_s, peer.span.units)
        for unit in range(peer.span.start, min(peer.span.end, units)):
            totals[unit] += share
    return totals


def _share(units_per_s: float, units: int) -> float:
    return (units_per_s or UNMEASURED_UNITS_PER_S) / max(1, units)


def _best_span(units: int, holders: Sequence[PeerView], peer: PeerId, capacity: int, units_per_s: float) -> Span:
    """The best window of min(capacity, units) units by the rule above."""
    size = max(1, min(capacity, units))
    windows = [Span(start, start + size) for start in range(units - size + 1)]
    covered = [count > 0 for count in _holders(units, holders)]
    windows = _least(windows, lambda window: _gap_cost(covered, window, size))
    throughputs = _throughputs(units, holders)
    share = _share(units_per_s, size)
    windows = _least(windows, lambda window: [-step for step in _levels(throughputs, window, share)])
    spans = [holder.span for holder in holders]
    windows = _least(windows, lambda window: (_hops(units, [*spans, window]), _boundaries([*spans, window])))
    return min(windows, key=lambda window: draw(peer, window.start))


def _least(windows: Sequence[Span], cost: Callable[[Span], Any]) -> list[Span]:
    """All windows of the least cost."""
    costs = [cost(window) for window in windows]
    least = min(costs)
    return [window for window, value in zip(windows, costs, strict=True) if value == least]


def _gap_cost(covered: Sequence[bool], window: Span, size: int) -> tuple[int, int]:
    """Units still without holder once `window` is taken, and how many more peers of this size they need."""
    missing = peers = run = 0
    for unit, held in enumerate([*covered, True]):
        if held or window.start <= unit < window.end:
            peers += -(-run // size)
            run = 0
        else:
            missing += 1
            run += 1
    return missing, peers


def _levels(throughputs: Sequence[float], window: Span, share: float) -> list[int]:
    """Throughput per unit with `window` taken, in logarithmic steps, from the worst unit upwards."""
    after = (value + share * (window.start <= unit < window.end) for unit, value in enumerate(throughputs))
    return sorted(round(math.log2(value) * STEPS_PER_DOUBLING) if value > 0 else -1_000_000 for value in after)


def _hops(units: int, spans: Sequence[Span]) -> int:
    """Hops of the shortest route over these spans; more than `units` where they leave a gap."""
    reached = hops = 0
    while reached < units:
        furthest = max((span.end for span in spans if span.start <= reached), default=0)
        if furthest <= reached:
            return units + 1
        reached, hops = furthest, hops + 1
    return hops


def _boundaries(spans: Sequence[Span]) -> int:
    """Distinct starts and ends: the fewer, the more often one peer can stand in for another."""
    return len({unit for span in spans for unit in span})
