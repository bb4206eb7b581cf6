"""Resettling: a move of all training peers to another layout of stages without losing trained state.

When many peers have left, or links have changed, a step may be much shorter with other stages that no single move reaches.
Then each peer goes to its place in the layout that all compute alike (`layout.py`), as soon as nothing is lost by that:
standby peers at once, the holders of a layer one after another, while another holder has its trained state. If a stage has to
be fetched over slow links, one peer fetches it, and the others fetch from that peer. The peer with the longest fetch goes
first, because steps take longest while some have arrived and others have not. A peer without a stage in the new layout keeps
working until all others have arrived. A peer that cannot go yet goes when others have arrived.

Placement for training: the layers that a peer should hold so that a step becomes shortest, or none.

First every layer needs a holder. Then the step's forecast counts (`step_forecast.py`), raised for layers with just one holder,
because a training state is lost with its last holder. Each peer takes the span with the lowest cost, given the spans of the
others (best response). Peers that do so one by one can end in an arrangement that no single move improves; so before the
first step all peers compute the same layout (`layout.py`), and each goes to its place there.

Once something is trained, layers with just one holder come next after layers with none, before any step's time: a joining or
standby node is worth most as insurance against losses. A peer that holds layers may leave those with two other holders; while
some layers have no holder at all, it may leave those with one other holder.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from swarmnode.plan.cost import HOLDERS, fragility
from swarmnode.plan.spans.flow import Floats
from swarmnode.plan.training.layout import STANDING_BY, StageLayout, windows_between
from swarmnode.plan.training.step_forecast import StepForecast, held_units
from swarmnode.plan.view import Span

HYSTERESIS = 0.002  # relative: the least gain for a move
LEAVES = 1.5  # times as long a step must take with a peer that holds units, before the peer stands by
POSSIBLE = 1.0  # relative: the most gain of a move to a place whose units all have holders


@dataclass(frozen=True)
class TrainingPeers:
    """N peers: the span that each holds now (empty if none), the number of layers that fit into its memory, and the numbers
    of the peers with the trained state of their layers (`learnt`)."""

    spans: Sequence[Span]
    capacity_units: Sequence[int]
    learnt: Collection[int] = ()

    def has_learnt(self, peer: int) -> bool:
        """Return whether `peer` holds layers with their trained state."""
        return peer in self.learnt and self.spans[peer].units > 0

    def cover(self, units: int) -> bool:
        """Return whether every one of the model's `units` has a holder."""
        return bool(held_units(self.spans, units).any(axis=0).all())

    def go_on(self, units: int) -> bool:
        """Return whether every layer has a holder with its trained state, so that steps can be done."""
        learnt = [STANDING_BY, *(self.spans[peer] for peer in self.learnt)]
        return bool(held_units(learnt, units).any(axis=0).all())

    def lack(self, place: Span, units: int) -> bool:
        """Return whether some layer of `place` has no holder. `units` is the number of layers of the model."""
        held_NU = held_units(self.spans, units)
        return not held_NU[:, place.start : place.end].any(axis=0).all()

    def kept_units(self, peer: int, units: int) -> set[int]:
        """Return the layers that `peer` must not leave: those with fewer than two other holders of the trained state, or,
        while some layer has no holder at all, those with no other."""
        others = [self.spans[other] for other in self.learnt if other != peer]
        holders_U = held_units(others, units).sum(axis=0)
        wanted = HOLDERS if self.cover(units) else 1
        return {unit for unit in range(*self.spans[peer]) if holders_U[unit] < wanted}


@dataclass(frozen=True)
class TrainingPlace:
    """The place where a peer should be. `gain`: how much faster steps become, relative to its present place; 0 if it stays,
    infinite if layers would have no holder without the move. `missed`: the share of the swarm's speed that is lost while the
    peer moves; `fetching_s`: the seconds to fetch the trained state."""

    span: Span
    gain: float = 0.0
    missed: float = 0.0
    fetching_s: float = 0.0

    def pays(self, move_s: float, stay_s: float) -> bool:
        """Return whether the gain until `stay_s` from now exceeds the loss while moving, for at least `move_s`. Always true
        for an infinite gain."""
        away_s = max(move_s, self.fetching_s)
        return self.gain == math.inf or self.gain * (stay_s - away_s) > self.missed * away_s


@dataclass(frozen=True, order=True)
class _Worth:
    """Worth of an arrangement, the least first: layers without a holder; then layers with too few, if counted by themselves;
    then the seconds of a step, raised for layers with too few holders."""

    missing: int
    fragile: int
    step_s: float

    @classmethod
    def of(cls, forecast: StepForecast, spans: Sequence[Span]) -> _Worth:
        """Return the worth with all peers on `spans`, by a simulated step."""
        holders_U = held_units(spans, forecast.load.units).sum(axis=0)
        fragile = fragility(float((holders_U < HOLDERS).mean()))
        return cls(int((holders_U == 0).sum()), 0, fragile * forecast.step_s(spans))

    def secures(self, now: _Worth) -> bool:
        """Return whether fewer layers lack a holder than in `now`, or as many and fewer lack a second one."""
        return (self.missing, self.fragile) < (now.missing, now.fragile)

    def holds_up(self, spare: _Worth) -> bool:
        """Return whether the step takes longer than in `spare`, the arrangement without the peer, and as many layers lack a
        holder."""
        return self.missing == spare.missing and self.step_s > spare.step_s

    def gain(self, now: _Worth) -> float:
        """Return how much longer the step of `now` is, relative to this one; infinite if `now` lacks holders of more layers,
        negative infinite if of fewer."""
        if now.missing != self.missing:
            return math.inf if now.missing > self.missing else -math.inf
        return now.step_s / self.step_s - 1


def choose_training_place(
    forecast: StepForecast,
    layout: StageLayout | None,
    peers: TrainingPeers,
    peer: int,
    *,
    hysteresis: float = HYSTERESIS,
) -> TrainingPlace | None:
    """Return the place where `peer` should be; None if a layout is given, but neither all peers on its places nor the best
    span of `peer` leave every layer with a holder. Without a layout something is trained already: the other peers stay on
    their spans, and each additional layer with a holder counts."""
    now = peers.spans[peer]
    windows = _windows(forecast, layout, peers, peer)
    spans = peers.spans if layout is None else _settled(layout, peers)
    considered = [*windows, now, STANDING_BY]
    comes = layout is None and not peers.has_learnt(peer)
    worths = _worth(forecast, spans, peer, considered, secure=comes)
    worth_of = dict(zip(considered, worths, strict=True))
    spare = worth_of[STANDING_BY]
    if comes:
        windows = [one for one in windows if not worth_of[one].holds_up(spare)]
    else:
        worth_of[STANDING_BY] = replace(spare, step_s=LEAVES * spare.step_s)
    best, stays = min(windows, key=lambda window: worth_of[window]), worth_of[now]
    if layout is not None:
        place = layout.places[peer]
        together = _worth(forecast, layout.places, peer, [place])[0]
        if not together.missing:
            gain = 0.0 if place == now else gain_of_all(forecast, layout.places, peers.spans)
            return TrainingPlace(place, gain if peers.lack(place, forecast.load.units) else min(gain, POSSIBLE))
    if worth_of[best].missing and layout is not None:
        return None
    moved, away = (_with(spans, peer, place) for place in (best, STANDING_BY))
    gain, may_stay = worth_of[best].gain(stays), now in windows
    if gain < math.inf and best != now and gain_of_all(forecast, moved, spans) < 0:
        gain = 0.0  # sketches also find a move if one move is not enough; no step may become longer by it
    if gain <= hysteresis and not worth_of[best].secures(stays) and may_stay:
        return TrainingPlace(now)
    missed = 1 - forecast.step_s(_with(spans, peer, now)) / forecast.step_s(away)
    return TrainingPlace(best, max(0.0, gain), max(0.0, missed), forecast.fetching_s(peers.spans, peer, best))


def _with(spans: Sequence[Span], peer: int, place: Span) -> list[Span]:
    return [place if number == peer else span for number, span in enumerate(spans)]


def gain_of_all(forecast: StepForecast, then: Sequence[Span], now: Sequence[Span]) -> float:
    """Return by how much steps become shorter, relative, if all peers go from the spans `now` to the spans `then`; infinite
    if more layers have a holder then, negative infinite if fewer do."""
    return _Worth.of(forecast, then).gain(_Worth.of(forecast, now))


def _windows(forecast: StepForecast, layout: StageLayout | None, peers: TrainingPeers, peer: int) -> list[Span]:
    """Return the spans that `peer` may take. A peer with trained state may leave it only if enough others have it, and may
    always stay."""
    units, capacity = forecast.load.units, peers.capacity_units[peer]
    if layout is not None:
        return list(dict.fromkeys([*layout.windows(capacity), STANDING_BY]))
    windows = [*windows_between(peers.spans, units, capacity), STANDING_BY]
    if peers.has_learnt(peer):
        kept = peers.kept_units(peer, units)
        if peers.cover(units):
            windows = [*(one for one in peers.spans if one.units <= capacity), STANDING_BY]
        windows = [peers.spans[peer], *(one for one in windows if kept.issubset(range(*one)))]
    return list(dict.fromkeys(windows))


def _settled(layout: StageLayout, peers: TrainingPeers) -> list[Span]:
    """Return the spans of the peers; a peer on a span outside the layout is about to leave and counts as standing by."""
    return [
        span if span in layout.windows(capacity) else STANDING_BY
        for span, capacity in zip(peers.spans, peers.capacity_units, strict=True)
    ]


def _worth(
    forecast: StepForecast, spans: Sequence[Span], peer: int, windows: Sequence[Span], *, secure: bool = False
) -> list[_Worth]:
    """Return the worth of each window, with `peer` on it and all others on their spans, by sketched steps. `secure`: layers
    with too few holders count by themselves."""
    held_WNU = np.repeat(held_units(spans, forecast.load.units)[None], len(windows), axis=0)
    held_WNU[:, peer] = held_units(windows, forecast.load.units)
    holders_WU: Floats = held_WNU.sum(axis=1)
    missing_W, fragile_W = (holders_WU == 0).sum(axis=1), (holders_WU < HOLDERS).sum(axis=1)
    step_W = forecast.sketch_s(held_WNU) * fragility(fragile_W / forecast.load.units)
    counted_W = fragile_W if secure else np.zeros_like(fragile_W)
    return [_Worth(*of) for of in zip(missing_W.tolist(), counted_W.tolist(), step_W.tolist(), strict=True)]


WORTH_IT = 0.1  # relative, of a step: the errors of two layouts' forecasts differ by half of that
AS_LONG = 1.05  # times a step may take so that fewer have to move
MUCH_SOONER = 0.5  # of the time: a peer waits for a nearer source that is at least this much faster
LONG_S = 30.0  # others wait for a longer fetch of trained state


class Resettling:
    """Move of all `peers` from the layers that they hold to those that `layout` gives them."""

    def __init__(self, forecast: StepForecast, layout: StageLayout, peers: TrainingPeers) -> None:
        self.layout = layout
        self._forecast, self._places, self._peers = forecast, _with_fewest_moves(forecast, layout, peers), peers
        everybody = range(len(peers.spans))
        self._learnt = [peers.spans[one] if peers.has_learnt(one) else STANDING_BY for one in everybody]
        self._coming = [one for one in everybody if self._places[one] not in (STANDING_BY, self._learnt[one])]
        others = [STANDING_BY if self._is_on_its_way(one) else span for one, span in enumerate(peers.spans)]
        self._gain = gain_of_all(forecast, self._places, others)  # the same when some are on their way

    def pays(self, move_s: float, stay_s: float) -> bool:
        """Return whether steps gain more until `stay_s` from now than is lost while trained state is fetched (at least
        `move_s`), and some peer can go or is on its way. False if the gain is at most `WORTH_IT`, or infinite: layers without
        a holder are filled first."""
        if not WORTH_IT < self._gain < math.inf:
            return False
        together = TrainingPlace(STANDING_BY, self._gain, self._missed(), self.fetching_s())
        return together.pays(move_s, stay_s) and any(
            self._is_on_its_way(one) or self._may_go(one) for one in range(len(self._places))
        )

    def place(self, peer: int) -> TrainingPlace:
        """Return the place where `peer` should be now: its new one if it may go, else its present one."""
        if self._may_go(peer):
            return TrainingPlace(self._places[peer], self._gain)
        return TrainingPlace(self._peers.spans[peer])

    def spare_s(self, peer: int) -> float:
        """Return the seconds that `peer` may spend on fetching the state of another place that helps meanwhile. A peer with
        trained state gets 0. A peer that can be a second holder of layers outside its own place gets the longest fetch of
        all, at least `LONG_S`. A peer that waits for long fetches gets `MUCH_SOONER` of the longest one, any other peer 0."""
        if self._peers.has_learnt(peer):
            return 0.0
        if self._secures_others(peer):
            return max(LONG_S, self._longest_s)
        return MUCH_SOONER * self._longest_s if self._longest_s > LONG_S and not self._may_go(peer) else 0.0

    def _secures_others(self, peer: int) -> bool:
        """Return whether some layers of the model have fewer than `HOLDERS` holders besides this peer, and none of the layers of
        its present place do."""
        others = [span for one, span in enumerate(self._peers.spans) if one != peer]
        lacking_U = held_units(others, self._forecast.load.units).sum(axis=0) < HOLDERS
        return bool(lacking_U.any() and not lacking_U[slice(*self._places[peer])].any())

    def _may_go(self, peer: int) -> bool:
        place = self._places[peer]
        if place == self._peers.spans[peer]:
            return False
        if place == STANDING_BY:
            return not self._coming and self._leaves_nothing_alone(peer)
        return self._leaves_nothing_alone(peer) and not self._waits(peer)

    def _is_on_its_way(self, peer: int) -> bool:
        return peer in self._coming and self._places[peer] == self._peers.spans[peer]

    def _leaves_nothing_alone(self, peer: int) -> bool:
        """Return whether each layer that the peer has learnt has another holder that stays or leaves later."""
        later = [span for one, span in enumerate(self._learnt) if self._turn(one) > self._turn(peer)]
        holders_U = held_units([STANDING_BY, *later], self._forecast.load.units).sum(axis=0)
        return bool(holders_U[slice(*self._learnt[peer])].all())

    def _turn(self, peer: int) -> tuple[bool, bool, int]:
        """Return the sort key of the peer's turn to leave: peers that stay come last, before them peers that will stand by."""
        place = self._places[peer]
        return place == self._peers.spans[peer], place == STANDING_BY, peer

    def _waits(self, peer: int) -> bool:
        """Return whether a nearer source will soon have the state that the peer needs, or others have to fetch much longer
        and go first."""
        first = self._first_to(self._places[peer])
        if first not in (None, peer) and self._from_first_s(peer, first) < MUCH_SOONER * self._alone_s[peer]:
            return True
        return self._longest_s > LONG_S and self._alone_s[peer] < MUCH_SOONER * self._longest_s

    def _first_to(self, place: Span) -> int | None:
        """Return the peer that should fetch the state of `place` first, so that others can fetch it from there: one that is on
        its way, or the fastest of those that could go. None if there is none."""
        able = (one for one in self._able if self._places[one] == place)
        return min(able, key=lambda one: (not self._is_on_its_way(one), self._alone_s[one], one), default=None)

    @cached_property
    def _able(self) -> list[int]:
        """Peers still to arrive that are on their way, or leave no layer without a holder."""
        return [one for one in self._coming if self._is_on_its_way(one) or self._leaves_nothing_alone(one)]

    @cached_property
    def _alone_s(self) -> dict[int, float]:
        """Seconds that each peer still to arrive needs to fetch its state from the present holders."""
        return {one: self._forecast.fetching_s(self._learnt, one, self._places[one]) for one in self._coming}

    @cached_property
    def _longest_s(self) -> float:
        """Longest time to fetch of the peers that are able to go; 0 if there are none."""
        return max((self._alone_s[one] for one in self._able), default=0.0)

    def _from_first_s(self, peer: int, first: int | None) -> float:
        """Return the seconds that `peer` needs to fetch its state once `first` has arrived."""
        then = [self._places[one] if one == first else span for one, span in enumerate(self._learnt)]
        return self._forecast.fetching_s(then, peer, self._places[peer])

    def _missed(self) -> float:
        """Return the share of speed that the swarm loses while peers are on their way: that of the layer with the largest loss."""
        held_NU = held_units(self._learnt, self._forecast.load.units) * self._forecast.network.work_per_s_N[:, None]
        stays_N1 = np.array([[one not in self._coming] for one in range(len(self._learnt))])
        return float(1 - ((held_NU * stays_N1).sum(axis=0) / np.maximum(held_NU.sum(axis=0), 1e-12)).min())

    def fetching_s(self) -> float:
        """Return the seconds until all peers have arrived: in each stage one peer fetches first, then the others, one after
        another. Stages are fetched side by side. 0 if no peer has to move."""
        return max((self._stage_fetching_s(place) for place in {*self._places} - {STANDING_BY}), default=0.0)

    def _stage_fetching_s(self, place: Span) -> float:
        first, coming = self._first_to(place), (one for one in self._coming if self._places[one] == place)
        return sum(self._alone_s[one] if first in (None, one) else self._from_first_s(one, first) for one in coming)


def _with_fewest_moves(forecast: StepForecast, layout: StageLayout, peers: TrainingPeers) -> Sequence[Span]:
    """Return the layout's places, permuted so that peers on one of its stages stay there if enough places are left. Layouts
    that differ only by a permutation are about equally good, and any link measurement may change which one is found. The
    layout's own places are returned if the permuted ones do not fit into memory or make the step more than `AS_LONG` times
    as long."""
    places, left = dict[int, Span](), Counter(layout.places)
    for here in (peers.spans, layout.places):
        for one, place in enumerate(here):
            if one not in places and left[place] and (place.units or here is layout.places):
                places[one] = place
                left[place] -= 1
    others = [one for one in range(len(peers.spans)) if one not in places]
    places.update(zip(others, left.elements(), strict=True))
    staying = [places[one] for one in range(len(peers.spans))]
    fits = all(place.units <= room for place, room in zip(staying, peers.capacity_units, strict=True))
    as_long_s = AS_LONG * forecast.step_s(layout.places)
    return staying if fits and forecast.step_s(staying) <= as_long_s else layout.places
