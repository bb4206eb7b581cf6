"""Resettling: a move of all training peers to another layout of stages without losing trained state.

When many peers have left, or links have changed, a step may be much shorter with other stages that no single move reaches.
Then each peer goes to its place in the layout that all compute alike (`layout.py`), as soon as nothing is lost by that:
standby peers at once, the holders of a layer one after another, while another holder has its trained state. If a stage has to
be fetched over slow links, one peer fetches it, and the others fetch from that peer. The peer with the longest fetch goes
first, because steps take longest while some have arrived and others have not. A peer without a stage in the new layout keeps
working until all others have arrived. A peer that cannot go yet goes when others have arrived.
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
