"""Placement: the layers that a peer should hold, so that the swarm's throughput gains most.

Every peer decides for itself from the same view, one peer at a time (best response). The rule, in order: leave the fewest
layers without a holder; leave gaps that the fewest further peers can fill; the same for layers with a single holder; then
the throughput of the whole swarm as a maximum flow (`flow`), layers that hang on one peer counting less; then short
routes and aligned spans, so that replicas can stand in for one another; then a draw by peer id, so that peers that decide
together differ.

Peers that join at the same time see one another's claims late. A claim of an earlier joiner stands; where one was made
before its maker knew better, we work out what it will choose, since all peers follow the same rule. So all agree
once every peer has seen the others.

Who serves already moves only if that fills a gap or pays: more throughput, beyond a hysteresis, for as long as a place is
worth something, against the throughput lost while it drains, downloads and warms up. Moves take turns: the wish must
outlast a delay that differs from peer to peer.

Capacity index: holders and speeds summed by span, so that a swarm of thousands is no larger than its distinct spans.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt

from swarmnode.counting import counted, layers
from swarmnode.net.interfaces import PeerId
from swarmnode.plan.cost import sustained_units_per_s
from swarmnode.plan.spans.flow import Floats, Indexes, fair_levels, supply_of, worth
from swarmnode.plan.view import PeerView, Span, View, draw
from swarmnode.swarm.records.announcement import State


class CapacityIndex:
    """Peers counted by span. `holders_U`: how many hold each layer; `supply_SE`: layers/s by (start, end) of the span.

    A peer's speed is what its line sustains where a position weighs `position_bytes` between stages.
    """

    def __init__(self, units: int, peers: Iterable[PeerView] = (), position_bytes: int = 0) -> None:
        self.units = units
        self.position_bytes = position_bytes
        self.spans: Counter[Span] = Counter()
        self.holders_U: npt.NDArray[np.intp] = np.zeros(units, np.intp)
        holding = [(span, peer) for peer in peers if (span := self._clip(peer.span)).units > 0]
        self.supply_SE: Floats = supply_of(
            units, ((*span, self.units_per_s(peer, span.units)) for span, peer in holding)
        )
        self.spans.update(span for span, _ in holding)
        for span, count in self.spans.items():
            self.holders_U[span.start : span.end] += count

    def units_per_s(self, peer: PeerView, span_units: int) -> float:
        """Return the layers/s that `peer` sustains on a span of `span_units` layers."""
        return sustained_units_per_s(
            peer.assumed_units_per_s, span_units, self.position_bytes, peer.up_bps, peer.down_bps
        )

    def change(self, peer: PeerView, by: int) -> None:
        """Count a peer as a holder of its layers and add its speed to its span's, or take both off if `by` is -1."""
        span = self._clip(peer.span)
        if span.units <= 0:
            return
        self.supply_SE[span.start, span.end] += by * self.units_per_s(peer, span.units)
        self.holders_U[span.start : span.end] += by
        self.spans[span] += by
        if not self.spans[span]:
            del self.spans[span]
            self.supply_SE[span.start, span.end] = 0.0  # not what rounding has left

    def reach(self) -> list[int]:
        """Return for each layer the furthest end of the spans that begin at or before it."""
        ends = [0] * self.units
        for start, end in self.spans:
            ends[start] = max(ends[start], end)
        return list(accumulate(ends, max))

    def edges(self) -> frozenset[int]:
        """Return the layers at which spans begin or end. The fewer, the more often one peer can stand in for another."""
        return frozenset(unit for span in self.spans for unit in span)

    def missing(self) -> list[int]:
        """Return the numbers of the layers without a holder."""
        return [int(unit) for unit in np.flatnonzero(self.holders_U == 0)]

    def _clip(self, span: Span) -> Span:
        if span.end <= self.units:
            return span
        return Span(min(span.start, self.units), min(span.end, self.units))


ROUNDS = 2  # distinct levels of the flow: the bottleneck and the next one
FRAGILE = 0.1  # of the throughput, where every unit hangs on one peer
ALIKE = 0.003  # relative: placements closer than this are equal, and habit or the draw decides
MAX_CLAIMS = 16  # of earlier joiners that are worked out; further ones stand as they are
HOLDING = (State.JOINING, State.LOADING, State.READY)
REAL_CHANGE = 1.25  # a speed that differs by less than this factor from the held one is the same speed


class Hysteresis:
    """Speeds of all peers in layers/s, as one observer holds them: they follow only real changes of the measured speeds. An
    unmeasured peer has no held speed."""

    def __init__(self) -> None:
        self._held: dict[PeerId, float] = {}

    def view(self, view: View) -> View:
        """Return the view with each peer's held speed, which changes only if the measured one differs by a factor of REAL_CHANGE.
        Peers that are gone are forgotten."""
        self._held = {peer.peer: self._hold(peer.peer, peer.decode_units_per_s) for peer in view.peers}
        peers = tuple(replace(peer, decode_units_per_s=self._held[peer.peer]) for peer in view.peers)
        return replace(view, peers=peers)

    def _hold(self, peer: PeerId, units_per_s: float) -> float:
        held = self._held.get(peer, 0.0)
        same = held > 0 and held / REAL_CHANGE < units_per_s < held * REAL_CHANGE
        return held if same else units_per_s


@dataclass(frozen=True, slots=True)
class Joiner:
    """Peer that chooses its layers: the number of layers that fit into its memory, and its speed."""

    peer: PeerId
    capacity_units: int
    decode_units_per_s: float
    started_at: float

    def seen_in(self, view: View) -> PeerView:
        """Return this peer's entry in `view`; without an entry, a joining peer without layers at its own measured speed."""
        known = next((peer for peer in view.peers if peer.peer == self.peer), None)
        return known or PeerView(
            self.peer, Span(0, 0), State.JOINING, self.decode_units_per_s, started_at=self.started_at
        )


@dataclass(frozen=True)
class MovePolicy:
    """Conditions for a move. `move_s` is the time for draining, downloading and warming up."""

    move_s: float = 30.0
    stay_s: float = 1800.0  # how long a place is worth something before the swarm has changed again
    hysteresis: float = 0.01  # relative gain below which no peer moves
    turn_s: float = 3.0  # how long a peer needs to make itself seen on the move, so that the next one knows
    for_gain: bool = True  # if False, peers move only to fill gaps


@dataclass(frozen=True)
class Move:
    """Wish of a peer to move to the layers `span`. The wish must last for `delay_s` seconds first, as another peer's move may
    make it needless."""

    span: Span
    gain: float  # relative throughput; infinite where a gap is filled
    delay_s: float
    disturbs: bool = False  # what the others are at

    @property
    def fills(self) -> bool:
        """Whether the move gives a holder to layers without any."""
        return self.gain == float("inf")

    def is_same_wish(self, other: Move) -> bool:
        """Return whether this wish to move and `other` are the same: both go to the same layers, or both fill gaps."""
        return self.span == other.span or (self.fills and other.fills)


def choose_span(view: View, joiner: Joiner) -> Span:
    """Return the layers that `joiner` should take: as many as fit into its memory, at most the whole model.

    Draining peers do not count, as they are leaving. Of the joining peers, those that joined before `joiner` count, each with the
    layers that this rule gives it.
    """
    others = [peer for peer in view.peers if peer.peer != joiner.peer]
    settled = (peer for peer in others if peer.state in (State.LOADING, State.READY))
    capacity_index = CapacityIndex(view.units, settled, view.position_bytes)
    claims = sorted((peer for peer in others if peer.state is State.JOINING and peer.span.units), key=_priority)
    earlier = [claim for claim in claims if _priority(claim) < (joiner.started_at, joiner.peer)]
    for claim in earlier[:-MAX_CLAIMS]:
        capacity_index.change(claim, 1)
    for claim in earlier[-MAX_CLAIMS:]:
        capacity_index.change(replace(claim, span=_best_span(capacity_index, claim, claim.span.units)), 1)
    return _best_span(capacity_index, joiner.seen_in(view), joiner.capacity_units)


def reconsider(view: View, joiner: Joiner, move_policy: MovePolicy = MovePolicy()) -> Move | None:
    """Return a better place for a peer that holds a span; None if it should stay, holds no layers or is leaving."""
    own = joiner.seen_in(view)
    if own.state not in HOLDING or own.span.units <= 0:
        return None
    living = [peer for peer in view.peers if peer.state in HOLDING]
    capacity_index = CapacityIndex(view.units, living, view.position_bytes)
    if capacity_index.missing():
        windows, filled = _filling(capacity_index, own.span, _size(capacity_index.units, joiner.capacity_units))
        if not windows:
            return None
        fills: dict[Span, int] = {}  # replicas would fill the same
        ahead = 0
        for peer in living:
            if peer.peer != own.peer and peer.state is State.READY:
                if peer.span not in fills:
                    fills[peer.span] = _filling(capacity_index, peer.span, peer.span.units)[1]
                ahead += fills[peer.span] > 0 and _turn(peer, fills[peer.span]) < _turn(own, filled)
        capacity_index.change(own, -1)
        return Move(_best_window(capacity_index, windows, own), float("inf"), ahead * move_policy.turn_s)
    if not move_policy.for_gain:
        return None
    return _gain(capacity_index, len(living), own, joiner.capacity_units, move_policy)


@dataclass(frozen=True)
class PlacementRule:
    """Rule for a peer's choice of its layers when it joins (`choose`) and later (`reconsider`).

    `awaits_others()` returns whether new work should wait until all peers hold the layers that they are meant to hold.
    """

    choose: Callable[[View, Joiner], Span]
    reconsider: Callable[[View, Joiner, MovePolicy], Move | None]
    awaits_others: Callable[[], bool] = lambda: False


BY_THROUGHPUT = PlacementRule(choose_span, reconsider)


def gaps(units: int, peers: Iterable[PeerView]) -> list[int]:
    """Return the numbers of the layers that none of `peers` holds."""
    return CapacityIndex(units, peers).missing()


# -- moves


def _filling(capacity_index: CapacityIndex, span: Span, size: int) -> tuple[list[Span], int]:
    """Return the windows that leave the fewest gaps if a peer leaves `span` for them, and the number of gaps filled; ([], 0) if
    no window fills any.

    While a layer is missing no client is served, so the peer may leave a smaller gap behind for another peer to fill.
    """
    starts = np.arange(capacity_index.units - size + 1)
    alone_U = capacity_index.holders_U == 1
    alone_U[: span.start] = alone_U[span.end :] = False
    needed = np.concatenate([[0], np.cumsum((capacity_index.holders_U == 0) | alone_U)])
    filled = needed[starts + size] - needed[starts] - int(alone_U.sum())
    most = int(filled.max())
    return ([Span(int(start), int(start) + size) for start in starts[filled == most]] if most > 0 else []), max(0, most)


def _turn(peer: PeerView, filled: int) -> tuple[int, int, int]:
    """Return a sort key for peers that could fill a gap of layers; the peer with the least key goes first."""
    return -filled, peer.sessions, draw(peer.peer)


def _gain(
    capacity_index: CapacityIndex, peers: int, own: PeerView, capacity: int, move_policy: MovePolicy
) -> Move | None:
    """Return a move that pays for itself; None if none does or if leaving opens a gap.

    The delay is drawn over a time that is enough for about a third of all peers to take turns."""
    capacity_index.change(own, -1)
    if capacity_index.missing():
        return None  # no peer would hold them during the move
    windows = _windows(capacity_index.units, _size(capacity_index.units, capacity))
    values = _values(capacity_index, windows, capacity_index.units_per_s(own, windows[0].units))
    stays = float(_values(capacity_index, [own.span], capacity_index.units_per_s(own, own.span.units))[0])
    gone = float(_values(capacity_index, [own.span], 0.0)[0])
    best = float(values.max())
    pays = (best - stays) * move_policy.stay_s > (stays - gone) * move_policy.move_s
    if best <= stays * (1 + move_policy.hysteresis) or not pays:
        return None
    span = _aligned(
        capacity_index, [window for window, value in zip(windows, values, strict=True) if value >= best], own.peer
    )
    share = draw(own.peer, *span, peers) / 2**64
    return Move(span, best / stays - 1, share * move_policy.turn_s * (1 + peers / 3))


# -- the rule


def _priority(peer: PeerView) -> tuple[float, PeerId]:
    return peer.started_at, peer.peer


def _size(units: int, capacity: int) -> int:
    return max(1, min(capacity, units))


def _windows(units: int, size: int) -> list[Span]:
    return [Span(start, start + size) for start in range(units - size + 1)]


def _best_span(capacity_index: CapacityIndex, peer: PeerView, capacity: int) -> Span:
    """Return the best range of min(`capacity`, all) layers for `peer`, by the rule of this module."""
    return _best_window(capacity_index, _windows(capacity_index.units, _size(capacity_index.units, capacity)), peer)


def _best_window(capacity_index: CapacityIndex, windows: Sequence[Span], peer: PeerView) -> Span:
    for holders in (1, 2):
        held = [bool(count >= holders) for count in capacity_index.holders_U]
        if not all(held):
            windows = _least(windows, partial(_gap_cost, held))
    values = _values(capacity_index, windows, capacity_index.units_per_s(peer, windows[0].units))
    good = [window for window, value in zip(windows, values, strict=True) if value >= values.max() * (1 - ALIKE)]
    return _aligned(capacity_index, good, peer.peer)


def _aligned(capacity_index: CapacityIndex, windows: Sequence[Span], peer: PeerId) -> Span:
    """Return the window with the shortest routes, then the fewest boundaries, then by lot."""
    reach, edges = capacity_index.reach(), capacity_index.edges()
    windows = _least(windows, lambda window: (_hops(reach, window), len(edges.union(window))))
    return min(windows, key=lambda window: draw(peer, window.start))


def _least(windows: Sequence[Span], cost: Callable[[Span], Any]) -> list[Span]:
    """Return the windows with the least `cost`."""
    costs = [cost(window) for window in windows]
    least = min(costs)
    return [window for window, value in zip(windows, costs, strict=True) if value == least]


def _gap_cost(held: Sequence[bool], window: Span) -> tuple[int, int]:
    """Return the number of layers without a holder once `window` is taken, and how many more peers of its size they need."""
    missing = peers = run = 0
    for unit, is_held in enumerate([*held, True]):
        if is_held or window.start <= unit < window.end:
            peers += -(-run // window.units)
            run = 0
        else:
            missing += 1
            run += 1
    return missing, peers


def _values(capacity_index: CapacityIndex, windows: Sequence[Span], units_per_s: float) -> Floats:
    """Return `value_W`: the swarm's worth in tokens/s with one more peer of `units_per_s` on each of the windows.

    Layers without a holder are left aside: the rule counts them before.
    """
    starts, ends = np.array(windows).T
    rows = np.arange(len(windows))
    supply_WSE = np.repeat(capacity_index.supply_SE[None], len(windows), axis=0)
    supply_WSE[rows, starts, ends] += units_per_s
    units_U = np.arange(capacity_index.units)
    inside_WU = (starts[:, None] <= units_U) & (units_U < ends[:, None])
    holders_WU = capacity_index.holders_U + inside_WU
    level_WU = np.where(holders_WU > 0, fair_levels(supply_WSE, ROUNDS), np.inf)
    value_W: Floats = worth(level_WU) * (1 - FRAGILE * (holders_WU == 1).mean(axis=1))
    return value_W


def _hops(reach: Sequence[int], window: Span) -> int:
    """Return the number of hops of the shortest route, with one more peer on `window`; more than there are layers if some layer
    has no holder."""
    units = len(reach)
    reached = hops = 0
    while reached < units:
        furthest = max(reach[reached], window.end if window.start <= reached else 0)
        if furthest <= reached:
            return units + 1
        reached, hops = furthest, hops + 1
    return hops


def _held_by_others(span: Span, held_U: Indexes) -> str:
    """Return a sentence on the numbers of other holders of the layers of `span`, which `held_U` has for each layer."""
    kinds = (
        (int((held_U == 0).sum()), "on no other machine"),
        (int((held_U == 1).sum()), "also on one other machine"),
        (int((held_U > 1).sum()), "also on several other machines"),
    )
    told = [(count, where) for count, where in kinds if count]
    if len(told) == 1:
        [(count, where)] = told
        return f"{layers(*span)} is {where}" if count == 1 else f"all {count} layers are {where}"
    return f"of {layers(*span)}, " + ", ".join(f"{count} are {where}" for count, where in told)


def grounds(view: View, joiner: Joiner, span: Span) -> tuple[str, ...]:
    """Return the reasons for `span` as sentences: the other holders, the gaps in it, the joiner's memory and speed."""
    others = [peer for peer in view.peers if peer.peer != joiner.peer and peer.state in HOLDING and peer.span.units]
    holders_U = CapacityIndex(view.units, others).holders_U
    held = holders_U[span.start : span.end]
    alone = int((holders_U == 0).sum())
    return (
        f"{counted(len(others), 'other machine') if others else 'no other machine'} of the swarm "
        f"{'hold' if len(others) > 1 else 'holds'} layers"
        + (f"; no one holds {alone} of the {view.units} layers" if others and alone else ""),
        _held_by_others(span, held),
        f"the memory that you lend has room for {counted(min(joiner.capacity_units, view.units), 'layer')} (--memory)",
        f"this machine computes {joiner.decode_units_per_s:,.4g} layers/s"
        if joiner.decode_units_per_s
        else "this machine's speed is not measured yet",
    )
