"""Another layout of stages, once something is trained: all come to it, nothing is lost on the way, and only where that pays."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from swarmnode.plan.training.layout import STANDING_BY, StageLayout, likely_layouts
from swarmnode.plan.training.step_forecast import StepForecast, TrainingLoad, TrainingNetwork, held_units
from swarmnode.plan.training.training_placement import Resettling, TrainingPeers
from swarmnode.plan.view import Span

UNITS = 8
WHOLE, FIRST, LAST = Span(0, 8), Span(0, 4), Span(4, 8)
FRONT, BACK = Span(0, 5), Span(5, 8)
LONG_S, MOVE_S = 1e6, 1.0


def places(*sizes: int, near_bps: float = 1e9, far_bps: float = 1e8) -> TrainingNetwork:
    """Peers in places: fast inside, slow between."""
    place_N = np.repeat(np.arange(len(sizes)), sizes)
    near_NN = place_N[:, None] == place_N
    return TrainingNetwork(
        np.full(len(place_N), 100.0), np.where(near_NN, 0.001, 0.05), np.where(near_NN, near_bps, far_bps)
    )


def forecast_on(network: TrainingNetwork) -> StepForecast:
    load = TrainingLoad(32, 1e6, np.full(UNITS, 1e6), np.ones(UNITS), np.full(UNITS, 3e6))
    return StepForecast(load, network)


def resettling(
    places: list[Span], spans: list[Span], *, learnt: set[int] | None = None, network: TrainingNetwork | None = None
) -> Resettling:
    """Into these places, of peers that have learnt what they hold unless others are named."""
    holders = {one for one, span in enumerate(spans) if span.units}
    peers = TrainingPeers(spans, [UNITS] * len(spans), holders if learnt is None else learnt)
    network = network or TrainingNetwork(
        np.full(len(spans), 100.0), np.zeros((len(spans),) * 2), np.full((len(spans),) * 2, 1e9)
    )
    stages = sorted({place for place in places if place.units})
    return Resettling(forecast_on(network), StageLayout(stages, places), peers)


def placed(seen: Resettling) -> list[Span]:
    """Where each should be by now."""
    return [seen.place(one).span for one in range(len(seen._places))]


@pytest.mark.parametrize("seed", range(60))
def test_all_come_to_their_places_and_each_unit_has_a_holder_all_the_time(seed: int) -> None:
    """Whoever leaves is away for a while; who looks, sees what was so a moment ago."""
    chance = random.Random(seed)
    sizes = [chance.randint(1, 6) for _ in range(chance.randint(1, 3))]
    network = places(*sizes, far_bps=10 ** chance.uniform(7, 9))
    network = replace(network, work_per_s_N=np.array([chance.choice([50.0, 100.0, 200.0]) for _ in range(sum(sizes))]))
    forecast, peers = forecast_on(network), range(sum(sizes))
    layout = likely_layouts(forecast, [UNITS] * len(peers))[0].layout
    spans = [chance.choice([STANDING_BY, WHOLE, FIRST, LAST, Span(2, 6), Span(0, 3), Span(3, 8)]) for _ in peers]
    spans[chance.choice(peers)] = WHOLE
    learnt, arrives = {one for one, span in enumerate(spans) if span.units}, dict[int, int]()
    for turn in range(400):
        learnt |= {one for one, when in arrives.items() if when == turn}
        seen = Resettling(forecast, layout, TrainingPeers(list(spans), [UNITS] * len(peers), set(learnt)))
        if not seen.pays(MOVE_S, LONG_S):
            break
        for one in chance.sample(peers, chance.randint(1, len(peers))):
            place = WHOLE if seen.spare_s(one) else seen.place(one).span  # it secures what one peer alone holds
            if place != spans[one] and arrives.get(one, 0) <= turn:
                spans[one] = place
                learnt.discard(one)
                arrives[one] = turn + chance.randint(1, 9)
        held_U = held_units([spans[one] for one in learnt], UNITS).sum(axis=0)
        assert held_U.all(), f"nobody has {np.flatnonzero(held_U == 0)} any more"
    else:
        raise AssertionError("they never come to rest")
    now = Resettling(forecast, layout, TrainingPeers(spans, [UNITS] * len(peers), learnt))
    assert not now.pays(MOVE_S, LONG_S)


def test_holders_of_a_unit_leave_one_after_another() -> None:
    seen = resettling([BACK, FRONT, FRONT, BACK], [FIRST, FIRST, LAST, LAST])
    assert placed(seen) == [BACK, FIRST, FRONT, LAST]


def test_the_last_holder_stays_until_another_one_has_learnt() -> None:
    places = [BACK, FRONT, FRONT, BACK]
    assert placed(resettling(places, [FIRST, LAST, STANDING_BY, LAST])) == [FIRST, FRONT, FRONT, LAST]
    coming = [FIRST, LAST, FRONT, LAST]
    assert placed(resettling(places, coming, learnt={0, 1, 3}))[0] == FIRST
    assert placed(resettling(places, coming))[0] == BACK


def test_who_is_in_no_stage_any_more_goes_on_until_the_others_have_arrived() -> None:
    places = [FIRST, LAST, STANDING_BY]
    assert placed(resettling(places, [FIRST, STANDING_BY, WHOLE]))[2] == WHOLE
    assert placed(resettling(places, [FIRST, LAST, WHOLE], learnt={0, 2}))[2] == WHOLE
    assert placed(resettling(places, [FIRST, LAST, WHOLE]))[2] == STANDING_BY


def test_what_crosses_a_slow_link_crosses_it_once() -> None:
    """The second waits until the first has it, which is near; where it is near already both go."""
    spans, new, apart = [WHOLE, STANDING_BY, STANDING_BY], [WHOLE, WHOLE, WHOLE], places(1, 2, far_bps=1e6)
    assert placed(resettling(new, spans, network=apart)) == [WHOLE, WHOLE, STANDING_BY]
    coming = resettling(new, [WHOLE, WHOLE, STANDING_BY], learnt={0}, network=apart)
    assert placed(coming) == [WHOLE, WHOLE, STANDING_BY]
    assert placed(resettling(new, spans, network=places(3))) == [WHOLE, WHOLE, WHOLE]


def test_whoever_fetches_longest_goes_first_and_others_may_help_elsewhere_meanwhile() -> None:
    """15 MB over 1 Mbit/s to one, 9 MB over 1 Gbit/s to the other, who with those that stay would be faster than with neither."""
    network = places(3)
    network.bandwidth_NN[0, 1] = network.bandwidth_NN[1, 0] = 1e6
    spans, new = [WHOLE, STANDING_BY, STANDING_BY], [WHOLE, FRONT, BACK]
    seen = resettling(new, spans, network=network)
    assert placed(seen) == [WHOLE, FRONT, STANDING_BY]
    assert [seen.spare_s(one) for one in range(3)] == pytest.approx([0.0, 0.0, 60.0])
    assert placed(resettling(new, [WHOLE, FRONT, STANDING_BY], learnt={0}, network=network))[2] == STANDING_BY
    assert placed(resettling(new, [WHOLE, FRONT, STANDING_BY], network=network)) == new


def test_layouts_that_differ_in_who_does_what_alone_are_the_same() -> None:
    """Else whatever is measured anew could make two near peers change places."""
    swapped = resettling([LAST, FIRST, STANDING_BY], [FIRST, LAST, STANDING_BY])
    assert placed(swapped) == [FIRST, LAST, STANDING_BY] and not swapped.pays(MOVE_S, LONG_S)
    across = resettling([FIRST, LAST] * 2, [FIRST] * 2 + [LAST] * 2, network=places(2, 2, far_bps=1e6))
    assert placed(across) != [FIRST] * 2 + [LAST] * 2


def test_it_must_pay_within_the_rest_of_the_run() -> None:
    """Two near peers with the whole model each take half as long as one, which sends it over 8 Mbit/s: 24 MB, once."""
    spans, new, apart = [WHOLE, STANDING_BY, STANDING_BY], [STANDING_BY, WHOLE, WHOLE], places(1, 2, far_bps=8e6)
    seen = resettling(new, spans, network=apart)
    assert seen.pays(MOVE_S, LONG_S) and seen.pays(MOVE_S, 26.0)
    assert not seen.pays(MOVE_S, 20.0)
    assert not seen.pays(LONG_S, 1800.0)
    assert not resettling(new, new, network=apart).pays(MOVE_S, LONG_S)


def test_what_is_lacking_while_holders_are_away_counts() -> None:
    """Two stages of two holders each instead of one peer with the whole model and three that stand by: it is one of the four."""
    spans, new = [WHOLE, WHOLE, STANDING_BY, STANDING_BY], [FIRST, FIRST, LAST, LAST]
    seen = resettling(new, spans, network=replace(places(4), work_per_s_N=np.array([100.0, 100.0, 300.0, 300.0])))
    assert seen.pays(1.0, 10.0)
    assert not seen.pays(9.0, 10.0)


def test_units_without_a_holder_come_first() -> None:
    seen = resettling([FIRST, LAST, LAST], [FIRST, STANDING_BY, STANDING_BY])
    assert not seen.pays(MOVE_S, LONG_S)


def test_where_nobody_can_go_it_does_not_begin() -> None:
    """Two halves with one holder each, which would have to change places."""
    seen = resettling([Span(3, 8), Span(0, 3)], [Span(0, 6), Span(6, 8)])
    assert not seen.pays(MOVE_S, LONG_S)
