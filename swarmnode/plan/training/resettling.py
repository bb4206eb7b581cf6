"""How all who train come to another layout of stages without losing what they have learnt.

When many have gone, or links have changed, a step may be much shorter with other stages, to which no move of one peer leads. Then
each goes to its place in the layout that all come to alike (`layout.py`), as soon as nothing is lost by that: who stands by at
once, the holders of a unit one after another, while another one that has learnt it is there. Of a stage that has to come over
slow links one peer fetches it, and the others from that one. Whoever fetches longest goes first: as long as some have arrived and
others not, steps take longer than before or after. Who is in no stage any more goes on where it is until all others have arrived.
Whoever cannot go yet does when others have come.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from functools import cached_property

import numpy as np

from swarmnode.plan.cost import HOLDERS
from swarmnode.plan.training.layout import STANDING_BY, StageLayout
from swarmnode.plan.training.placement import TrainingPeers, TrainingPlace, gain_of_all
from swarmnode.plan.training.step_forecast import StepForecast, held_units
from swarmnode.plan.view import Span

WORTH_IT = 0.1  # relative, of a step: forecasts of two layouts are off by half of that against each other
AS_LONG = 1.05  # times a step may take so that fewer have to move
MUCH_SOONER = 0.5  # of the time: when somebody nearer will have what is learnt, it is waited for
LONG_S = 30.0  # to fetch what is learnt: others wait for that


class Resettling:
    """Of these peers into this layout."""

    def __init__(self, forecast: StepForecast, layout: StageLayout, peers: TrainingPeers) -> None:
        self.layout = layout
        self._forecast, self._places, self._peers = forecast, _with_fewest_moves(forecast, layout, peers), peers
        everybody = range(len(peers.spans))
        self._learnt = [peers.spans[one] if peers.has_learnt(one) else STANDING_BY for one in everybody]
        self._coming = [one for one in everybody if self._places[one] not in (STANDING_BY, self._learnt[one])]
        others = [STANDING_BY if self._is_on_its_way(one) else span for one, span in enumerate(peers.spans)]
        self._gain = gain_of_all(forecast, self._places, others)  # the same when some are on their way

    def __repr__(self) -> str:
        return f"<Resettling for {self._gain:.0%} of a step, {len(self._coming)} peers have not arrived>"

    def pays(self, move_s: float, stay_s: float) -> bool:
        """Whether steps gain more, until `stay_s` from now, than is lost while what is learnt is fetched; and there are some who
        can go, or are on their way. Units without a holder are filled first."""
        if not WORTH_IT < self._gain < math.inf:
            return False
        together = TrainingPlace(STANDING_BY, self._gain, self._missed(), self.fetching_s())
        return together.pays(move_s, stay_s) and any(
            self._is_on_its_way(one) or self._may_go(one) for one in range(len(self._places))
        )

    def place(self, peer: int) -> TrainingPlace:
        """Where this one should be by now."""
        if self._may_go(peer):
            return TrainingPlace(self._places[peer], self._gain)
        return TrainingPlace(self._peers.spans[peer])

    def spare_s(self, peer: int) -> float:
        """How long another place, where it helps meanwhile, may take it to learn: as long as it all takes, for a second holder that
        units lack, none of which are in its own place; half as long, for who waits; no time, for who has learnt something."""
        if self._peers.has_learnt(peer):
            return 0.0
        if self._secures_others(peer):
            return max(LONG_S, self._longest_s)
        return MUCH_SOONER * self._longest_s if self._longest_s > LONG_S and not self._may_go(peer) else 0.0

    def _secures_others(self, peer: int) -> bool:
        """Whether units have fewer than two holders without this one, none of which are in its place."""
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
        """Whether each unit that it has learnt has another holder that stays, or whose turn to leave comes later."""
        later = [span for one, span in enumerate(self._learnt) if self._turn(one) > self._turn(peer)]
        holders_U = held_units([STANDING_BY, *later], self._forecast.load.units).sum(axis=0)
        return bool(holders_U[slice(*self._learnt[peer])].all())

    def _turn(self, peer: int) -> tuple[bool, bool, int]:
        """When it leaves: who stays does not, and who has nowhere to go is the last."""
        place = self._places[peer]
        return place == self._peers.spans[peer], place == STANDING_BY, peer

    def _waits(self, peer: int) -> bool:
        """Whether what it needs will soon be nearer; or others have to go long before it."""
        first = self._first_to(self._places[peer])
        if first not in (None, peer) and self._from_first_s(peer, first) < MUCH_SOONER * self._alone_s[peer]:
            return True
        return self._longest_s > LONG_S and self._alone_s[peer] < MUCH_SOONER * self._longest_s

    def _first_to(self, place: Span) -> int | None:
        """Who fetches what is learnt there for the others, too: whoever is on its way, or could go and have it soonest."""
        able = (one for one in self._able if self._places[one] == place)
        return min(able, key=lambda one: (not self._is_on_its_way(one), self._alone_s[one], one), default=None)

    @cached_property
    def _able(self) -> list[int]:
        """Who of those that come is on its way, or leaves nothing alone."""
        return [one for one in self._coming if self._is_on_its_way(one) or self._leaves_nothing_alone(one)]

    @cached_property
    def _alone_s(self) -> dict[int, float]:
        """Of each that comes: to fetch what is learnt there from who has it now."""
        return {one: self._forecast.fetching_s(self._learnt, one, self._places[one]) for one in self._coming}

    @cached_property
    def _longest_s(self) -> float:
        """The most of that, of those who are able to come."""
        return max((self._alone_s[one] for one in self._able), default=0.0)

    def _from_first_s(self, peer: int, first: int | None) -> float:
        """The same, once that one has it."""
        then = [self._places[one] if one == first else span for one, span in enumerate(self._learnt)]
        return self._forecast.fetching_s(then, peer, self._places[peer])

    def _missed(self) -> float:
        """The share of its speed that the swarm lacks meanwhile: where most is lost by those that go."""
        held_NU = held_units(self._learnt, self._forecast.load.units) * self._forecast.network.work_per_s_N[:, None]
        stays_N1 = np.array([[one not in self._coming] for one in range(len(self._learnt))])
        return float(1 - ((held_NU * stays_N1).sum(axis=0) / np.maximum(held_NU.sum(axis=0), 1e-12)).min())

    def fetching_s(self) -> float:
        """Until all have arrived: one in each stage, then the others, one after another."""
        return max((self._stage_fetching_s(place) for place in {*self._places} - {STANDING_BY}), default=0.0)

    def _stage_fetching_s(self, place: Span) -> float:
        first, coming = self._first_to(place), (one for one in self._coming if self._places[one] == place)
        return sum(self._alone_s[one] if first in (None, one) else self._from_first_s(one, first) for one in coming)


def _with_fewest_moves(forecast: StepForecast, layout: StageLayout, peers: TrainingPeers) -> Sequence[Span]:
    """The layout's places, but who holds one of its stages stays there, as far as others do not. Layouts that differ only in who
    does what are as good, and which of them is found may change whenever a link is measured."""
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
