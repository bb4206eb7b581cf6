"""Placement for training: which units a peer should hold so that a step becomes shortest, how many, and whether any.

What counts first is that every unit has a holder, then the step's forecast (`step_forecast.py`), the worse, the more units
have just one: what the last one has learnt goes with it. Each peer goes where that becomes least, given where the others
stand (best response). Peers that do so one by one can come to an order that no single move betters; so before anything is
trained all come to the same layout (`layout.py`), and each goes to its place in it.

Once something is trained, units with just one holder come next after those with none, before any step's time: what a newcomer or a
node that stands by is worth most for is that nothing is lost. Who holds units already may leave those that two others hold, too;
while units have nobody at all, those that one other holds.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np

from swarmnode.plan.cost import HOLDERS, fragility
from swarmnode.plan.spans.flow import Floats
from swarmnode.plan.training.layout import STANDING_BY, StageLayout, windows_between
from swarmnode.plan.training.step_forecast import StepForecast, held_units
from swarmnode.plan.view import Span

HYSTERESIS = 0.002  # relative: a step must become so much shorter
LEAVES = 1.5  # times as long a step must take with a peer that holds units, before it stands by of its own
POSSIBLE = 1.0  # likewise, at most: where units have nobody, but those of a peer's own place have


@dataclass(frozen=True)
class TrainingPeers:
    """N peers: what they hold now (nothing, where the span is empty), how many units fit into the memory of each, and who has what
    is learnt of its units."""

    spans: Sequence[Span]
    capacity_units: Sequence[int]
    learnt: Collection[int] = ()

    def has_learnt(self, peer: int) -> bool:
        """Whether something would be lost with this one, if it were the last."""
        return peer in self.learnt and self.spans[peer].units > 0

    def cover(self, units: int) -> bool:
        """Whether every unit has a holder."""
        return bool(held_units(self.spans, units).any(axis=0).all())

    def go_on(self, units: int) -> bool:
        """Whether every unit has a holder that has what is learnt of it: steps can be done."""
        learnt = [STANDING_BY, *(self.spans[peer] for peer in self.learnt)]
        return bool(held_units(learnt, units).any(axis=0).all())

    def lack(self, place: Span, units: int) -> bool:
        """Whether some unit of a place has no holder."""
        held_NU = held_units(self.spans, units)
        return not held_NU[:, place.start : place.end].any(axis=0).all()

    def kept_units(self, peer: int, units: int) -> set[int]:
        """What this one must not leave: units that fewer than two others have learnt; while units have no holder at all, those that
        no other one has."""
        others = [self.spans[other] for other in self.learnt if other != peer]
        holders_U = held_units(others, units).sum(axis=0)
        wanted = HOLDERS if self.cover(units) else 1
        return {unit for unit in range(*self.spans[peer]) if holders_U[unit] < wanted}


@dataclass(frozen=True)
class TrainingPlace:
    """Where a peer should be, and by how much faster steps are by that, relative to where it is: 0 where it stays, infinite
    where units would have nobody without it. `missed`: the share of the swarm's speed that is lost while it is in neither
    place; `fetching_s`: how long what was learnt there takes to come."""

    span: Span
    gain: float = 0.0
    missed: float = 0.0
    fetching_s: float = 0.0

    def pays(self, move_s: float, stay_s: float) -> bool:
        """Whether more is gained by standing there, until `stay_s` from now, than is lost on the way, which takes `move_s` at
        least. Units that nobody holds are worth any way."""
        away_s = max(move_s, self.fetching_s)
        return self.gain == math.inf or self.gain * (stay_s - away_s) > self.missed * away_s


@dataclass(frozen=True, order=True)
class _Worth:
    """What an arrangement is worth, the least first: units without a holder, then those with one, where these count by themselves,
    then seconds of a step, more where units have one."""

    missing: int
    fragile: int
    step_s: float

    @classmethod
    def of(cls, forecast: StepForecast, spans: Sequence[Span]) -> _Worth:
        """With all on these, whose microbatches are played through."""
        holders_U = held_units(spans, forecast.load.units).sum(axis=0)
        fragile = fragility(float((holders_U < HOLDERS).mean()))
        return cls(int((holders_U == 0).sum()), 0, fragile * forecast.step_s(spans))

    def secures(self, now: _Worth) -> bool:
        """Whether more units have a holder or a second one."""
        return (self.missing, self.fragile) < (now.missing, now.fragile)

    def holds_up(self, spare: _Worth) -> bool:
        """Whether a step, more of it where units have one holder, takes longer than without the peer."""
        return self.missing == spare.missing and self.step_s > spare.step_s

    def gain(self, now: _Worth) -> float:
        """Against how it is now: of the step, relative; infinite where more units have a holder, negative where fewer have."""
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
    """Where this one should stand; None where units have nobody whatever it takes, and in the layout neither. Without a layout
    something is trained already: the others stay where they are, and each unit less that has nobody counts."""
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
        gain = 0.0  # sketches find a move, also where one is not enough; no step may become longer by it
    if gain <= hysteresis and not worth_of[best].secures(stays) and may_stay:
        return TrainingPlace(now)
    missed = 1 - forecast.step_s(_with(spans, peer, now)) / forecast.step_s(away)
    return TrainingPlace(best, max(0.0, gain), max(0.0, missed), forecast.fetching_s(peers.spans, peer, best))


def _with(spans: Sequence[Span], peer: int, place: Span) -> list[Span]:
    return [place if number == peer else span for number, span in enumerate(spans)]


def gain_of_all(forecast: StepForecast, then: Sequence[Span], now: Sequence[Span]) -> float:
    """By how much steps become shorter, relative, when all go from these spans to those; infinite where more units have holders."""
    return _Worth.of(forecast, then).gain(_Worth.of(forecast, now))


def _windows(forecast: StepForecast, layout: StageLayout | None, peers: TrainingPeers, peer: int) -> list[Span]:
    """Where this one may stand. What it has learnt it may leave as far as that is not lost, and it may always stay."""
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
    """Who holds something else than one of the stages is about to leave it, and counts as not there yet."""
    return [
        span if span in layout.windows(capacity) else STANDING_BY
        for span, capacity in zip(peers.spans, peers.capacity_units, strict=True)
    ]


def _worth(
    forecast: StepForecast, spans: Sequence[Span], peer: int, windows: Sequence[Span], *, secure: bool = False
) -> list[_Worth]:
    """Of all on their spans, but this one on each of the windows. `secure`: units with one holder count by themselves."""
    held_WNU = np.repeat(held_units(spans, forecast.load.units)[None], len(windows), axis=0)
    held_WNU[:, peer] = held_units(windows, forecast.load.units)
    holders_WU: Floats = held_WNU.sum(axis=1)
    missing_W, fragile_W = (holders_WU == 0).sum(axis=1), (holders_WU < HOLDERS).sum(axis=1)
    step_W = forecast.sketch_s(held_WNU) * fragility(fragile_W / forecast.load.units)
    counted_W = fragile_W if secure else np.zeros_like(fragile_W)
    return [_Worth(*of) for of in zip(missing_W.tolist(), counted_W.tolist(), step_W.tolist(), strict=True)]
