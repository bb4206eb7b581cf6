"""Rule of placement in training, applied to a peer's view of the others: `training_placement.py` and `layout.py` on a view.

Before anything is trained all peers may go anywhere. Afterwards a joining or standby peer goes to the place of most use, on
stages that begin and end at edges of the others' spans. A training peer moves only to spans of other peers, if others have
its trained state and the rest of the run gains more than the move costs. All peers move to another layout, with their
trained state, if that pays (`training_placement.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from functools import partial

from swarmnode.plan.spans.span_placement import HOLDING, Joiner, Move, MovePolicy, choose_span, reconsider
from swarmnode.plan.training.layout import STANDING_BY, LikelyLayout, likely_layouts
from swarmnode.plan.training.step_forecast import StepForecast, TrainingLoad, TrainingNetwork
from swarmnode.plan.training.training_placement import (
    HYSTERESIS,
    Resettling,
    TrainingPeers,
    TrainingPlace,
    choose_training_place,
    gain_of_all,
)
from swarmnode.plan.view import PeerView, Span, View, draw
from swarmnode.swarm.records.announcement import State

SETTLING = 0.2  # relative, of a step: a smaller gain is not worth loading other units, and may be noise
RESETTLING = 0.01  # relative, of a step: the least gain for a single move once something is trained

# Share of the trained state: before the first step a peer loads only parameters, without AdamW's two moments.
LOADED_SHARE = 1 / 3
MUCH = 0.5  # relative, of a step: the least gain for a layout other than the best

RESTS = 20  # times the search for layouts: the pause before the next search if only links have changed
STANDING_BY_TURNS = 5  # turns before standing by, unless a run waits: peers with different measurements would all leave

ON_THE_WAY = frozenset({State.JOINING, State.LOADING, State.DRAINING})
SEEN_S = 5.0  # until a node looks again, and other peers see its move

NetworkOf = Callable[[View, Sequence[PeerView]], TrainingNetwork]
"""Function of a view and some of its peers; returns their known speeds and the links between them."""


@dataclass(eq=False)
class StepOutlook:
    """Forecast of steps, and the layouts by that forecast. `load_of` returns the known load of a step, the same object while
    nothing changes. New layouts are computed at most as often as `clock` (seconds) allows."""

    load_of: Callable[[], TrainingLoad]
    network_of: NetworkOf
    _: KW_ONLY
    clock: Callable[[], float] = lambda: 0.0

    def __post_init__(self) -> None:
        self._rests_until_s = -math.inf
        self._seen: tuple[object, StepForecast] | None = None
        self._layouts: Sequence[LikelyLayout] | None = None  # by that forecast

    def __repr__(self) -> str:
        load = self.load_of()
        return f"<StepOutlook on {load.units} units and {load.microbatches} microbatches>"

    def forecast(self, view: View, seen: Sequence[PeerView], capacities: Sequence[int]) -> StepForecast:
        """Return the forecast for the peers `seen`, the same at all peers that know the same. The last forecast is reused
        while the load, the peers and the capacities are the same and speeds differ little. For a while after new layouts a
        change in links alone is ignored, because every measurement of a link differs."""
        load, network = self.load_of(), self.network_of(view, seen)
        who = load, [peer.peer for peer in seen], capacities
        if self._seen is None or self._seen[0] != who or self._differs(network, self._seen[1].network):
            self._seen, self._layouts = (who, StepForecast(load, network)), None
        return self._seen[1]

    def _differs(self, network: TrainingNetwork, seen: TrainingNetwork) -> bool:
        if not network.is_as_fast(seen):
            return True
        return self.clock() >= self._rests_until_s and not network.is_like(seen)

    def layouts(self, forecast: StepForecast, capacities: Sequence[int]) -> Sequence[LikelyLayout]:
        """Return the likely layouts by the last forecast, computed once for each, as that takes long with many peers."""
        if self._layouts is None:
            began_s = self.clock()
            self._layouts = likely_layouts(forecast, capacities)
            self._rests_until_s = self.clock() + RESTS * (self.clock() - began_s)
        return self._layouts


class FirstPlaces:
    """State of the moves before a run's first step: whether the peers that will train are still on their way to their
    places, noted at each look of a node at its own place. `clock`: seconds.

    While nothing is trained, a node loads files that every volunteer can load. Afterwards each moving peer needs the
    parameters and the optimizer's state from other peers, over lines that may take minutes for it. A first step that ends
    halfway through the moves would fix an arrangement of stages that no peer had chosen. So the coordinator waits for the
    moves first, for a while.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._awaited = False
        self._places: object = None
        self._still_until_s = 0.0

    def record(self, peers: Sequence[PeerView], *, elsewhere: bool, patience_s: float) -> None:
        """Note the present places. `elsewhere`: whether a move of all peers pays. If so the moves are awaited, until no peer is
        on its way, or no peer has changed its place for `patience_s`."""
        on_the_way = any(peer.span.units and peer.state in ON_THE_WAY for peer in peers)
        places = {peer.peer: (peer.span, peer.state in ON_THE_WAY) for peer in peers}
        if places != self._places or (elsewhere and not self._awaited):
            self._places, self._still_until_s = places, self._clock() + patience_s
        self._awaited = elsewhere or (self._awaited and on_the_way)

    @property
    def awaited(self) -> bool:
        """Whether the first step of the training should wait until peers have moved to their layers."""
        return self._awaited and self._clock() < self._still_until_s


@dataclass(eq=False)
class TrainingRule:
    """Rule of placement in one swarm that trains. `outlook`: on steps of the current run. `capacity_of`: the number of layers
    that fit into another peer's memory. `has_begun`: whether something is trained already. `under_way`: whether a run
    exists; before its first step is done, it waits for `first_places` while these are awaited. `clock`: seconds."""

    outlook: StepOutlook
    capacity_of: Callable[[PeerView], int]
    has_begun: Callable[[], bool]
    _: KW_ONLY
    under_way: Callable[[], bool] = lambda: False
    clock: Callable[[], float] = lambda: 0.0

    def __post_init__(self) -> None:
        self.first_places = FirstPlaces(self.clock)

    def __repr__(self) -> str:
        return f"<TrainingRule by {self.outlook!r}>"

    def choose(self, view: View, joiner: Joiner) -> Span:
        """Return the span that `joiner` should take, empty if it should stand by. If no arrangement gives every layer a
        holder, the joiner takes as many layers as fit, in the region with most missing."""
        place = self._place(view, joiner, MovePolicy(hysteresis=HYSTERESIS))
        return choose_span(view, joiner) if place is None else place.span

    def reconsider(self, view: View, joiner: Joiner, move_policy: MovePolicy) -> Move | None:
        """Return the move to a better place, or None if the peer should stay. All peers leave for another layout only if
        that pays: a first step may be under way by then. Delays are drawn at random, so that few peers move at the same
        time. Layers without a holder are first left to peers without trained state."""
        own = joiner.seen_in(view)
        trains = self.has_begun() and own.state is State.READY
        policy = replace(move_policy, hysteresis=RESETTLING) if trains else move_policy
        place = self._place(view, joiner, policy, may_stand=True)
        if place is None:
            return reconsider(view, joiner, move_policy)
        holds = own.state is State.READY and own.span.units > 0
        if place.span == own.span or (holds and not place.pays(move_policy.move_s, move_policy.stay_s)):
            return None
        if holds and not place.span.units and not self.under_way() and not self._knows_its_paths(view, own):
            return None  # a standby peer sends nothing, and would never find out that a path is fast
        turn = draw(own.peer, *place.span, len(view.peers)) / 2**64 + (trains and place.gain == math.inf)
        waits = not place.span.units and not (self.under_way() and place.gain > SETTLING)
        turn *= STANDING_BY_TURNS if waits else 1
        delay_s = turn * _turns_s(move_policy, view)
        disturbs = self.under_way() and not self.first_places.awaited  # else the others wait for it
        return Move(place.span, place.gain, delay_s, disturbs=disturbs)

    def _knows_its_paths(self, view: View, own: PeerView) -> bool:
        """Return whether the paths from a peer to all others that can hold layers have been measured."""
        able = (peer for peer in view.peers if peer.peer != own.peer and self.capacity_of(peer))
        return all((own.peer, peer.peer) in view.path_bps for peer in able)

    def _place(
        self, view: View, joiner: Joiner, move_policy: MovePolicy, *, may_stand: bool = False
    ) -> TrainingPlace | None:
        begun, own = self.has_begun(), joiner.seen_in(view)
        here = (*HOLDING, State.DRAINING)  # a draining peer may be on its way to another place
        others = [peer for peer in view.peers if peer.state in here and peer.peer != joiner.peer]
        able = [peer for peer in others if self.capacity_of(peer)]  # no bootstrap peers
        seen = sorted([*able, own], key=lambda peer: peer.peer)
        capacities = [joiner.capacity_units if peer is own else self.capacity_of(peer) for peer in seen]
        forecast = self.outlook.forecast(view, seen, capacities)
        layouts = self.outlook.layouts(forecast, capacities)
        ready = [number for number, peer in enumerate(seen) if peer.state is State.READY]
        learnt = [number for number in ready if seen[number].has_trained or not begun]
        spans = [STANDING_BY if begun and peer.state is State.DRAINING else peer.span for peer in seen]
        peers, number = TrainingPeers(spans, capacities, learnt), seen.index(own)
        alone = partial(choose_training_place, forecast, None, peers, number, hysteresis=move_policy.hysteresis)
        stay_s, layout = move_policy.stay_s, layouts[0].layout
        if begun:
            goes_on = peers.go_on(forecast.load.units)
            resettling = (
                _in_reach(forecast, layouts, peers, stay_s)
                if goes_on
                else _soonest(forecast, layouts, peers, stay_s, 1.0)
            )
            return _trained_place(resettling, alone, number, move_policy)
        if may_stand or self.under_way():
            resettling = _soonest(forecast, layouts, peers, stay_s, LOADED_SHARE)
            elsewhere = _pays_to_load(forecast, resettling, peers, move_policy)
            patience_s = SEEN_S + _turns_s(move_policy, view)
            self.first_places.record(view.peers, elsewhere=elsewhere and self.under_way(), patience_s=patience_s)
            if not elsewhere:
                return alone()
            layout = resettling.layout
        return choose_training_place(forecast, layout, peers, number, hysteresis=move_policy.hysteresis)


def _turns_s(move_policy: MovePolicy, view: View) -> float:
    """Return the seconds over which the moves of the peers are spread; longer with more peers."""
    return move_policy.turn_s * (1 + len(view.peers) / 3)


def _in_reach(
    forecast: StepForecast, layouts: Sequence[LikelyLayout], peers: TrainingPeers, stay_s: float
) -> Resettling:
    """Return the resettling into the first layout. If its fetches take `stay_s` or longer, return instead the first one that
    can be fetched in time, provided that steps become shorter by more than `MUCH`; smaller gains are left to moves of single
    peers."""
    first = Resettling(forecast, layouts[0].layout, peers)
    if first.fetching_s() < stay_s:
        return first
    others = (Resettling(forecast, one.layout, peers) for one in layouts[1:])
    best = next((one for one in others if one.fetching_s() < stay_s), first)
    return best if gain_of_all(forecast, best.layout.places, peers.spans) > MUCH else first


def _soonest(
    forecast: StepForecast, layouts: Sequence[LikelyLayout], peers: TrainingPeers, stay_s: float, share: float
) -> Resettling:
    """Return the resettling that allows most steps in `stay_s`, if no steps are done while `share` of the trained state is
    fetched. If none can be fetched in time, return the one into the first layout."""
    best, least_s = None, math.inf
    for likely in layouts:
        if likely.step_s >= least_s:
            break
        resettling = Resettling(forecast, likely.layout, peers)
        left_s = stay_s - share * resettling.fetching_s()
        if left_s > 0 and likely.step_s * stay_s / left_s < least_s:
            best, least_s = resettling, likely.step_s * stay_s / left_s
    return best or Resettling(forecast, layouts[0].layout, peers)


def _pays_to_load(
    forecast: StepForecast, resettling: Resettling, peers: TrainingPeers, move_policy: MovePolicy
) -> bool:
    """Return whether, before anything is trained, a layout is worth loading its layers. Nothing is computed while they load."""
    gain = gain_of_all(forecast, resettling.layout.places, peers.spans)
    if gain <= move_policy.hysteresis:
        return False
    loading_s = LOADED_SHARE * resettling.fetching_s()
    return TrainingPlace(STANDING_BY, gain, 1.0, loading_s).pays(0.0, move_policy.stay_s)


def _trained_place(
    resettling: Resettling, alone_of: Callable[[], TrainingPlace | None], peer: int, move_policy: MovePolicy
) -> TrainingPlace | None:
    """Return the place of `peer` once something is trained: in the layout if the resettling pays, unless the peer helps more
    alone, also meanwhile. None if `alone_of` returns None."""
    pays = resettling.pays(move_policy.move_s, move_policy.stay_s)
    spare_s = resettling.spare_s(peer) if pays else math.inf
    alone = alone_of() if spare_s else None
    helps = not pays or (alone is not None and alone.fetching_s <= spare_s)
    return alone if helps else resettling.place(peer)
