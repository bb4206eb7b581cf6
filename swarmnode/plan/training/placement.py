"""Placement for training: which units a peer should hold so that a step becomes shortest, how many, and whether any.

What counts first is that every unit has a holder, then the step's forecast (`step_forecast.py`), the worse, the more units
have just one: what the last one has learnt goes with it. Each peer goes where that becomes least, given where the others
stand (best response). Peers that do so one by one can come to an order that no single move betters; so before anything is
trained all come to the same layout, too (`layout.py`), and a peer goes to its place in it where no move of its own is as
good.

Once something is trained, units with just one holder come next after those with none, before any step's time: what a newcomer or a
node that stands by is worth most for is that nothing is lost.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from swarmnode.plan.spans.flow import Floats
from swarmnode.plan.training.layout import FRAGILE, HOLDERS, LEFT_OUT, STANDING_BY, StageLayout, windows_between
from swarmnode.plan.training.step_forecast import StepForecast, held_units
from swarmnode.plan.view import Span

HYSTERESIS = 0.002  # relative: a step must become so much shorter


@dataclass(frozen=True)
class TrainingPeers:
    """N peers: what they hold now (nothing, where the span is empty), and how many units fit into the memory of each."""

    spans: Sequence[Span]
    capacity_units: Sequence[int]


@dataclass(frozen=True)
class TrainingPlace:
    """Where a peer should be, and by how much a step becomes shorter by that, relative to where it is: 0 where it stays, infinite
    where units would have nobody without it."""

    span: Span
    gain: float = 0.0


@dataclass(frozen=True, order=True)
class _Worth:
    """What an arrangement is worth, the least first: units without a holder, then those with one, where these count by themselves,
    then seconds of a step, more where units have one."""

    missing: int
    fragile: int
    step_s: float

    def secures(self, now: _Worth) -> bool:
        """Whether more units have a holder or a second one."""
        return (self.missing, self.fragile) < (now.missing, now.fragile)

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
    now, capacity = peers.spans[peer], peers.capacity_units[peer]
    others = [span for other, span in enumerate(peers.spans) if other != peer]
    windows = windows_between(others, forecast.load.units, capacity) if layout is None else layout.windows(capacity)
    windows = list(dict.fromkeys([*windows, STANDING_BY]))
    spans = peers.spans if layout is None else _settled(layout, peers)
    worths = _worth(forecast, spans, peer, [*windows, now], secure=layout is None)
    worth_of = dict(zip([*windows, now], worths, strict=True))
    spare = worth_of[STANDING_BY]
    able = windows if layout is not None else [one for one in windows if not _holds_up(worth_of[one], spare)]
    worth_of[STANDING_BY] = replace(spare, step_s=LEFT_OUT * spare.step_s)
    best, stays = min(able, key=lambda window: worth_of[window]), worth_of[now]
    if layout is not None:
        place = layout.places[peer]
        together = _worth(forecast, layout.places, peer, [place])[0]
        if together.gain(worth_of[best]) > hysteresis and not together.missing:
            return TrainingPlace(place, 0.0 if place == now else together.gain(stays))
    if worth_of[best].missing and layout is not None:
        return None
    gain, may_stay = worth_of[best].gain(stays), now in windows
    moves = gain > hysteresis or worth_of[best].secures(stays) or not may_stay
    return TrainingPlace(best, max(0.0, gain)) if moves else TrainingPlace(now)


def _holds_up(worth: _Worth, spare: _Worth) -> bool:
    """Whether a peer makes a step so much longer than without it that second holders are not worth it."""
    return worth.missing == spare.missing and worth.step_s > (1 + FRAGILE) * spare.step_s


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
    held_NU = held_units(spans, forecast.load.units)
    held_NU[peer] = 0.0
    holders_WU: Floats = held_NU.sum(axis=0) + held_units(windows, forecast.load.units)
    missing_W, fragile_W = (holders_WU == 0).sum(axis=1), (holders_WU < HOLDERS).sum(axis=1)
    step_W = forecast.step_s(spans, peer, windows) * (1 + FRAGILE * fragile_W / forecast.load.units)
    counted_W = fragile_W if secure else np.zeros_like(fragile_W)
    return [_Worth(*of) for of in zip(missing_W.tolist(), counted_W.tolist(), step_W.tolist(), strict=True)]
