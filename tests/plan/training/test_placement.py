"""Placement for training: spans that meet, pipelines inside clusters, no more held than pays."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from swarmnode.plan.training.layout import CLEARLY, STANDING_BY, cut, likely_layouts
from swarmnode.plan.training.step_forecast import Clusters, StepForecast, TrainingLoad, TrainingNetwork, held_units
from swarmnode.plan.training.training_placement import TrainingPeers, TrainingPlace, choose_training_place
from swarmnode.plan.view import Span

UNITS, NEAR_BPS, FAR_BPS = 8, 1e9, 1e8


def load(gradient_bytes: float = 1e6, activation_bytes: float = 1e6) -> TrainingLoad:
    return TrainingLoad(32, activation_bytes, np.full(UNITS, gradient_bytes), np.ones(UNITS), np.full(UNITS, 3e6))


def islands(sizes: list[int], work_per_s: float = 100.0) -> TrainingNetwork:
    """Peers by turns on one island or another: fast inside, slow between."""
    places = np.array([island for turn in range(max(sizes)) for island, size in enumerate(sizes) if turn < size])
    near = places[:, None] == places[None, :]
    return TrainingNetwork(
        np.full(len(places), work_per_s), np.where(near, 0.001, 0.05), np.where(near, NEAR_BPS, FAR_BPS)
    )


def settled(load: TrainingLoad, network: TrainingNetwork, capacities: list[int]) -> list[Span]:
    """All hold all that fits, side by side, then find their places."""
    starts = [sum(capacities[:peer]) % (UNITS - capacity + 1) for peer, capacity in enumerate(capacities)]
    spans = [Span(start, start + capacity) for start, capacity in zip(starts, capacities, strict=True)]
    return settled_from(spans, StepForecast(load, network), capacities)


def settled_from(spans: list[Span], forecast: StepForecast, capacities: list[int], rounds: int = 9) -> list[Span]:
    """They choose in turn until nobody moves."""
    layout = likely_layouts(forecast, capacities)[0].layout
    for _ in range(rounds):
        before = list(spans)
        for peer in range(len(spans)):
            place = choose_training_place(forecast, layout, TrainingPeers(spans, capacities), peer)
            spans[peer] = spans[peer] if place is None else place.span
        if spans == before:
            return spans
    raise AssertionError("they never come to rest")


def sketch_s(forecast: StepForecast, spans: list[Span]) -> float:
    return float(forecast.sketch_s(held_units(spans, UNITS)[None])[0])


def test_clusters_of_two_islands() -> None:
    network = islands([3, 3])
    clusters = Clusters(StepForecast(load(), network).load.activation_bytes * network.seconds_per_byte_NN)
    assert [len(set(labels.tolist())) for labels in clusters.label_LN] == [6, 2]
    members_KN, rise_K = clusters.members()
    assert members_KN.shape == (8, 6) and members_KN.sum() == 12
    assert rise_K[0] == pytest.approx(0.008) and rise_K[-1] == pytest.approx(0.08 - 0.008)


def test_a_link_that_nobody_knows_is_the_usual_one() -> None:
    network = islands([2, 2])
    network.bandwidth_NN[0, 1], network.bandwidth_NN[1, 0] = 0.0, np.inf
    assert network.seconds_per_byte_NN[0, 1] == 8 / FAR_BPS
    unknown = replace(network, bandwidth_NN=np.zeros((4, 4)))
    assert not unknown.seconds_per_byte_NN.any()


def test_pipelines_stay_on_their_islands() -> None:
    """Memory for two of eight units: each island gets whole pipelines, as many of each stage as of the others."""
    spans = settled(load(), islands([8, 8], work_per_s=20.0), [2] * 16)
    for island in range(2):
        assert Counter(spans[island::2]) == {Span(start, start + 2): 2 for start in range(0, UNITS, 2)}


def test_no_more_is_held_than_pays() -> None:
    """Where averaging costs nothing all hold everything, where it costs much each holds little."""
    network = islands([8])
    light, heavy = (settled(load(size), network, [UNITS] * 8) for size in (0.0, 1e9))
    assert set(light) == {Span(0, UNITS)}
    assert max(span.units for span in heavy) <= 2


def test_stages_of_unequal_cards_are_about_as_fast() -> None:
    """Not every second card holds the same, whatever its speed; and a step takes no longer than where a fast card and two slow ones
    hold a half each."""
    network = replace(islands([6]), work_per_s_N=np.array([10.0, 5.0, 10.0, 5.0, 5.0, 5.0]))
    forecast = StepForecast(load(0.0, 0.0), network)
    layout = likely_layouts(forecast, [UNITS // 2] * 6)[0].layout
    for stage in layout.stages:
        holders = np.array([place == stage for place in layout.places])
        assert network.work_per_s_N[holders].sum() / stage.units == 40.0 / UNITS
    front, back = Span(0, UNITS // 2), Span(UNITS // 2, UNITS)
    assert forecast.step_s(layout.places) <= forecast.step_s([front, front, back, front, back, back])


def test_more_is_held_where_halves_are_not_as_fast() -> None:
    """Of four cards each is twice as fast as the next, so that the slower half would be waited for. With gradients that weigh more
    that is shorter nevertheless."""
    network = replace(islands([4]), work_per_s_N=np.array([40.0, 20.0, 10.0, 5.0]))
    light, heavy = (
        likely_layouts(StepForecast(load(size, 1e5), network), [UNITS] * 4)[0].layout for size in (1e5, 1e7)
    )
    assert set(light.places) == {Span(0, 8)}
    assert set(heavy.places) == {Span(0, 5), Span(5, 8)}


def test_teams_of_a_fast_and_a_slow_card_have_stages_as_long() -> None:
    """Two cards, each four times as fast as each of the two others: one of both on each half, which averages less than a stage of
    the fast ones would."""
    network = replace(islands([4]), work_per_s_N=np.array([40.0, 10.0, 40.0, 10.0]))
    layout = likely_layouts(StepForecast(load(1e7, 1e5), network), [UNITS] * 4)[0].layout
    teams = [{peer for peer, place in enumerate(layout.places) if place == stage} for stage in layout.stages]
    assert list(layout.stages) == [Span(0, 4), Span(4, 8)]
    assert all(sum(network.work_per_s_N[list(team)]) == 50.0 for team in teams)


def test_stages_are_as_long_as_their_holders_are_fast() -> None:
    """Two islands, one with cards three times as fast: these hold three quarters of the model."""
    network = replace(islands([2, 2]), work_per_s_N=np.array([30.0, 10.0, 30.0, 10.0]))
    layout = likely_layouts(StepForecast(load(2e6, 1e5), network), [UNITS] * 4)[0].layout
    assert list(layout.places) == [Span(0, 6), Span(6, 8)] * 2


@pytest.mark.parametrize(("peers", "spare"), [(6, 0), (30, 5)])
def test_many_peers_spare_sooner_than_few(peers: int, spare: int) -> None:
    """One card in six is far from all, so that averaging with it takes a little longer than it computes. Of six it is kept, since
    it may be needed; of thirty those stand by."""
    is_far_N = np.arange(peers) % 6 == 5
    apart_NN = is_far_N[:, None] | is_far_N
    network = TrainingNetwork(
        np.full(peers, 20.0), np.where(apart_NN, 0.05, 0.001), np.where(apart_NN, FAR_BPS, NEAR_BPS)
    )
    layout = likely_layouts(StepForecast(load(5e5, 1e4), network), [UNITS] * peers)[0].layout
    spares = [peer for peer, place in enumerate(layout.places) if place == STANDING_BY]
    assert spares == np.flatnonzero(is_far_N)[:spare].tolist()


def test_cards_are_not_dealt_out_in_parts() -> None:
    """Of eight equal cards three stages of four units would get three, three and two, and all would wait for the two: each pair
    takes three units instead."""
    units = 12
    twelve = TrainingLoad(32, 1e5, np.full(units, 1e6), np.ones(units), np.full(units, 3e6))
    layout = likely_layouts(StepForecast(twelve, islands([8], work_per_s=5.0)), [4] * 8)[0].layout
    assert Counter(layout.places) == {Span(start, start + 3): 2 for start in range(0, units, 3)}


def test_where_gradients_weigh_more_whole_stages_stay_on_their_islands() -> None:
    """Replicas average across the slow link unless all of a stage stand on one side; who does so alone leaves others behind."""
    network, capacities = islands([4, 4], work_per_s=20.0), [UNITS // 2] * 8
    stages = settled(load(1e8, 1e4), network, capacities)
    assert not set(stages[0::2]) & set(stages[1::2]) and min(Counter(stages).values()) == 2
    pipelines = settled(load(1e4, 1e6), network, capacities)
    assert set(pipelines[0::2]) == set(pipelines[1::2]) == {Span(0, 4), Span(4, 8)}


@pytest.mark.parametrize("gradient_bytes", [5e7, 1e8])
def test_no_island_is_left_out_because_replicas_could_stand_on_both(gradient_bytes: float) -> None:
    """Averaging across the slow link would take long. Each island has whole stages of its own instead."""
    forecast = StepForecast(load(gradient_bytes), islands([4, 4], work_per_s=20.0))
    layout = likely_layouts(forecast, [UNITS] * 8)[0].layout
    assert Counter(layout.places[0::2]) == {Span(0, 2): 2, Span(2, 4): 2}
    assert Counter(layout.places[1::2]) == {Span(4, 6): 2, Span(6, 8): 2}


def test_who_is_far_from_two_islands_is_left_out_of_both() -> None:
    """A ninth peer with stages of its own would make all averaging, or all pipelines, cross the slow link."""
    network = islands([4, 4, 1], work_per_s=20.0)
    layout = likely_layouts(StepForecast(load(5e7), network), [UNITS] * 9)[0].layout
    assert [peer for peer, place in enumerate(layout.places) if place == STANDING_BY] == [2]


def test_no_layout_is_forecast_to_be_clearly_faster() -> None:
    """Of a fast island and a slow one: nobody finds a grid of the fast cards alone, or of all, that takes less."""
    network = replace(islands([4, 4]), work_per_s_N=np.array([40.0, 5.0] * 4))
    forecast = StepForecast(load(1e8), network)
    layout = likely_layouts(forecast, [UNITS] * 8)[0].layout

    for count in (1, 2):  # each unit has two holders
        stages = [Span(start, start + UNITS // count) for start in range(0, UNITS, UNITS // count)]
        fast = [STANDING_BY if peer % 2 else stages[peer // 2 % count] for peer in range(8)]
        everybody = [stages[peer // 2 % count] for peer in range(8)]
        assert forecast.step_s(layout.places) <= min(1.5 * forecast.step_s(fast), forecast.step_s(everybody)) * CLEARLY


def test_small_memories_take_parts_and_all_is_held() -> None:
    spans = settled(load(1e7), islands([5, 5]), [2, 1] * 5)
    assert {unit for span in spans for unit in range(*span)} == set(range(UNITS))
    assert all(span.units <= capacity for span, capacity in zip(spans, [2, 1] * 5, strict=True))


def test_an_order_that_no_single_move_betters_is_left() -> None:
    """Every island holds one half of the model: whoever of them moved alone would leave too few behind."""
    capacities = [UNITS // 2] * 4
    forecast = StepForecast(load(activation_bytes=5e6), islands([2, 2], work_per_s=20.0))
    halves = [Span(0, 4), Span(4, 8), Span(0, 4), Span(4, 8)]  # peers stand on the islands by turns
    spans = settled_from(halves, forecast, capacities)
    assert set(spans[0::2]) == set(spans[1::2]) == {Span(0, 4), Span(4, 8)}


def test_no_move_is_made_that_gains_only_in_a_sketch() -> None:
    """Each island holds one half. With everything in one peer fewer microbatches would cross the line, which is sketched to be a
    fifth shorter; but what crosses it is carried beside computing, of which the slow card would do more."""
    spans = [Span(4, 8), Span(0, 4), Span(4, 8), Span(0, 4)]
    moved = [*spans[:2], Span(0, UNITS), spans[3]]
    network = replace(islands([2, 2]), work_per_s_N=np.array([10.0, 40.0, 20.0, 5.0]))
    forecast = StepForecast(load(1e5, 3e6), network)
    assert sketch_s(forecast, moved) < 0.9 * sketch_s(forecast, spans)
    assert forecast.step_s(spans) < 0.9 * forecast.step_s(moved)
    assert choose_training_place(forecast, None, TrainingPeers(spans, [UNITS] * 4), 2) == TrainingPlace(spans[2])


def test_who_would_only_hold_others_up_stands_by() -> None:
    """Two islands behind a line of 0.1 Mbit/s: training stays on the faster one, and the other is spare."""
    network = islands([4, 4])
    slow = TrainingNetwork(
        np.where(np.arange(8) % 2, 50.0, 100.0),
        network.delay_NN,
        np.where(network.bandwidth_NN == FAR_BPS, 1e5, NEAR_BPS),
    )
    spans = settled(load(), slow, [UNITS] * 8)
    assert spans[1::2] == [STANDING_BY] * 4
    assert {unit for span in spans for unit in range(*span)} == set(range(UNITS))


def test_every_unit_has_two_holders_first() -> None:
    """Averaging costs much, so that each would best hold a quarter; but then each unit would hang on one of the four peers."""
    spans = settled(load(1e7), islands([4]), [UNITS] * 4)
    assert Counter(unit for span in spans for unit in range(*span)) == dict.fromkeys(range(UNITS), 2)


def test_who_is_spare_takes_the_place_of_those_that_are_lost() -> None:
    capacities = [UNITS // 2] * 3
    forecast = StepForecast(load(), islands([3]))
    layout = likely_layouts(forecast, capacities)[0].layout
    peers = TrainingPeers([Span(0, 4), STANDING_BY, STANDING_BY], capacities)
    assert choose_training_place(forecast, layout, peers, 1) == TrainingPlace(Span(4, 8), math.inf)


def test_who_would_leave_units_alone_says_so() -> None:
    forecast = StepForecast(load(), islands([1, 1]))
    peers = TrainingPeers([Span(0, 2), STANDING_BY], [2, 2])
    assert choose_training_place(forecast, likely_layouts(forecast, [2, 2])[0].layout, peers, 1) is None


def test_what_hangs_on_one_peer_attracts_a_newcomer_before_anything_else() -> None:
    """Something is trained already: no layout. Seven units have two holders, the last one has one; a step would become shorter
    elsewhere, and not by much anywhere."""
    forecast = StepForecast(load(1e7), islands([4]))
    peers = TrainingPeers([Span(0, 8), Span(0, 4), Span(4, 7), STANDING_BY], [8, 4, 3, 4])
    place = choose_training_place(forecast, None, peers, 3, hysteresis=0.2)
    assert place is not None and place.span.start <= 7 < place.span.end


FRONT, BACK = Span(0, 4), Span(4, 8)


def losing(spans: list[Span], learnt: range | None = None) -> TrainingPlace | None:
    """Where the first of these peers should be, once something is trained."""
    forecast, capacities = StepForecast(load(), islands([len(spans)], work_per_s=20.0)), [UNITS // 2] * len(spans)
    peers = TrainingPeers(spans, capacities, range(len(spans)) if learnt is None else learnt)
    return choose_training_place(forecast, None, peers, 0, hysteresis=0.02)


def test_who_trains_goes_where_more_were_lost_if_the_rest_of_the_run_pays_for_it() -> None:
    place = losing([FRONT] * 5 + [BACK] * 2)
    assert place is not None and place.span == BACK and 0.1 < place.gain < 1
    assert place.missed == 0.0, "where it is now there are enough"
    assert place.pays(move_s=30.0, stay_s=1800.0) and not place.pays(move_s=30.0, stay_s=29.0)
    missed = replace(place, gain=0.1, missed=0.2)
    assert missed.pays(move_s=30.0, stay_s=91.0) and not missed.pays(move_s=30.0, stay_s=89.0)
    assert not replace(missed, fetching_s=31.0).pays(move_s=30.0, stay_s=91.0)


def test_nobody_leaves_what_fewer_than_two_others_have_learnt() -> None:
    assert losing([FRONT] * 2 + [BACK]) == TrainingPlace(FRONT)
    assert losing([FRONT] * 5 + [BACK], learnt=range(2)) == TrainingPlace(FRONT), "the others only load"


def test_who_leaves_one_other_holder_behind_may_take_what_nobody_has() -> None:
    place = losing([FRONT] * 2)
    assert place is not None and place.span == BACK and place.gain == math.inf and place.pays(30.0, 0.0)
    assert losing([FRONT, Span(1, 4)]) == TrainingPlace(FRONT), "nobody else has learnt the first unit"


def test_what_is_learnt_comes_from_the_fastest_holder() -> None:
    forecast = StepForecast(load(), islands([2, 2]))
    spans = [STANDING_BY, FRONT, Span(0, 2), STANDING_BY]  # peers stand on the islands by turns
    near_s, far_s = 2 * 3e6 * 8 / NEAR_BPS, 2 * 3e6 * 8 / FAR_BPS
    assert forecast.fetching_s(spans, 0, FRONT) == pytest.approx(near_s + far_s)
    assert forecast.fetching_s(spans, 2, FRONT) == pytest.approx(far_s), "two units are its own already"


def test_who_would_hold_all_others_up_is_no_second_holder() -> None:
    bandwidth_NN = np.full((3, 3), NEAR_BPS)
    bandwidth_NN[2, :] = bandwidth_NN[:, 2] = 1e3
    network = TrainingNetwork(np.full(3, 100.0), np.full((3, 3), 0.001), bandwidth_NN)
    peers = TrainingPeers([Span(0, 8), Span(0, 4), STANDING_BY], [8, 4, 8])
    assert choose_training_place(StepForecast(load(), network), None, peers, 2) == TrainingPlace(STANDING_BY)


@pytest.mark.parametrize(("holders", "comes"), [(1, True), (2, False)])
def test_who_makes_steps_longer_comes_only_for_a_second_holder_that_is_worth_it(holders: int, comes: bool) -> None:
    """Something is trained already, on one island. One of the other would have all wait for its gradients: some 1.3 times as long,
    which one half's second holder is worth, and nothing else."""
    forecast = StepForecast(load(gradient_bytes=4e6), islands([4, 4], work_per_s=20.0))
    spans = [
        FRONT,
        STANDING_BY,
        BACK,
        STANDING_BY,
        BACK,
        STANDING_BY,
        FRONT if holders == 2 else STANDING_BY,
        STANDING_BY,
    ]
    peers = TrainingPeers(spans, [UNITS // 2] * 8, range(0, 8, 2))
    with_it = [FRONT if peer == 1 else span for peer, span in enumerate(spans)]
    longer = forecast.step_s(with_it) / forecast.step_s(spans)
    assert comes or 1.0 < longer < 1.5
    place = choose_training_place(forecast, None, peers, 1)
    assert place is not None and (place.span == FRONT if comes else place == TrainingPlace(STANDING_BY))


def test_who_would_make_steps_more_than_as_many_times_longer_as_second_holders_are_worth_stands_by() -> None:
    """Half of the units have one holder, so that a step counts two and a half times; one from afar would make it longer still."""
    forecast = StepForecast(load(gradient_bytes=3e7), islands([3, 1], work_per_s=20.0))
    peers = TrainingPeers([FRONT, STANDING_BY, BACK, BACK], [UNITS // 2] * 4, [0, 2, 3])
    assert choose_training_place(forecast, None, peers, 1) == TrainingPlace(STANDING_BY)


def test_units_without_anybody_are_taken_as_far_as_memory_goes() -> None:
    """Two came for two units and have room for one each: the second one finds what the first one left."""
    forecast = StepForecast(load(), islands([3]))
    spans, capacities = [Span(0, 6), STANDING_BY, STANDING_BY], [6, 1, 1]
    for peer in (1, 2):
        place = choose_training_place(forecast, None, TrainingPeers(spans, capacities), peer, hysteresis=0.2)
        assert place is not None and place.gain == math.inf
        spans[peer] = place.span
    assert set(spans[1:]) == {Span(6, 7), Span(7, 8)}


def test_one_that_is_content_stays() -> None:
    network = islands([2, 2])
    peers = TrainingPeers(settled(load(1e8), network, [UNITS] * 4), [UNITS] * 4)
    forecast = StepForecast(load(1e8), network)
    layout = likely_layouts(forecast, peers.capacity_units)[0].layout
    places = [choose_training_place(forecast, layout, peers, peer) for peer in range(4)]
    assert places == [TrainingPlace(span) for span in peers.spans]


def test_a_forecast_of_one_stage_is_what_can_be_worked_out_by_hand() -> None:
    """Two whole replicas at 100 units/s: 32 microbatches of 8 units on both, the first one's 0.08 s, 4 MB there and back."""
    network = islands([2])
    spans = [Span(0, UNITS)] * 2
    forecast = StepForecast(load(), network)
    averaging_s = 2 * (8e6 / 2) * 8 / NEAR_BPS  # through the line, and then once more along the path
    assert sketch_s(forecast, spans) == pytest.approx(1.28 + 0.08 + 2 * averaging_s + 0.002)


@pytest.mark.parametrize(("replicas", "microbatches"), [(2, 4), (4, 4), (2, 32)])
def test_replicas_compute_their_first_microbatches_side_by_side(replicas: int, microbatches: int) -> None:
    """Whole ones, which nothing is handed on between: 0.4 s for each microbatch."""
    forecast = StepForecast(replace(load(0.0), microbatches=microbatches), islands([replicas], work_per_s=20.0))
    step_s = forecast.step_s([Span(0, UNITS)] * replicas)
    assert step_s == pytest.approx(0.4 * microbatches / replicas, abs=0.01)


def test_lines_carry_beside_computing_where_all_places_are_compared() -> None:
    """Two halves, each 6.4 s of computing, the second of which begins and ends with the first microbatch's 0.2 s in the other; of
    3.2 s of activations between them little more than the first one is waited for."""
    spans, network = [Span(0, 4), Span(4, 8)], islands([2], work_per_s=20.0)
    idle_s, busy_s = (StepForecast(load(0.0, size), network).step_s(spans) for size in (0.0, 0.05 * NEAR_BPS / 8))
    assert idle_s == pytest.approx(6.4 + 0.2, rel=0.01)
    assert busy_s - idle_s == pytest.approx(0.1, rel=0.01)


def test_replicas_that_may_average_over_clusters_are_forecast_so() -> None:
    """Four on each of two islands: each part crosses once for an island, not once for each that holds it."""
    spans, network = [Span(0, UNITS)] * 8, islands([4, 4])
    over_clusters_s, flat_s = (
        StepForecast(replace(load(1e7), over_clusters=may), network).step_s(spans) for may in (True, False)
    )
    passing_s = StepForecast(load(0.0), network).step_s(spans)
    assert flat_s - passing_s == pytest.approx(2 * (8e7 / 8) * 8 / FAR_BPS + 0.1, rel=0.1)
    assert over_clusters_s - passing_s < 0.75 * (flat_s - passing_s)


def test_what_leaves_a_home_goes_one_after_another_whoever_sends_it() -> None:
    """Two at each of two homes. Halves of which each home has one: all activations cross the one line. Pipelines in both homes:
    the gradients of both halves do."""
    apart = islands([2, 2], work_per_s=100.0)
    at_home = replace(apart, homes=(0, 1, 0, 1))
    first, second = Span(0, 4), Span(4, 8)
    stages, pipelines = [first, second, first, second], [first, first, second, second]
    activations, gradients = load(0.0, 5e6), load(5e6, 0.0)
    crossing_s = 32 * 5e6 * 8 / FAR_BPS
    assert StepForecast(activations, apart).step_s(stages) < 0.8 * crossing_s
    assert StepForecast(activations, at_home).step_s(stages) == pytest.approx(crossing_s, rel=0.15)
    assert StepForecast(activations, at_home).step_s(pipelines) == pytest.approx(
        StepForecast(activations, apart).step_s(pipelines)
    )
    by_path_s, by_line_s = (StepForecast(gradients, one).step_s(pipelines) for one in (apart, at_home))
    passing_s = StepForecast(load(0.0, 0.0), apart).step_s(pipelines)
    assert by_line_s - passing_s == pytest.approx(2 * 4 * 5e6 * 8 / FAR_BPS, rel=0.2)
    assert by_path_s < by_line_s


def test_all_wait_for_commands_from_the_farthest_of_those_who_hold_something() -> None:
    apart = islands([2, 2])
    silent, spoken = (StepForecast(replace(load(), commands=commands), apart) for commands in (0, 5))
    whole = Span(0, UNITS)
    for spans, delay_s in (([whole, STANDING_BY, whole, STANDING_BY], 0.001), ([whole] * 4, 0.05)):
        assert spoken.step_s(spans) - silent.step_s(spans) == pytest.approx(5 * 2 * delay_s)


def test_stages_share_the_work() -> None:
    assert cut(np.ones(UNITS), 4) == [Span(0, 2), Span(2, 4), Span(4, 6), Span(6, 8)]
    heavy_end = np.array([1.0] * 7 + [5.0])
    assert cut(heavy_end, 2) == [Span(0, 6), Span(6, 8)]
    assert cut(heavy_end, UNITS) == [Span(unit, unit + 1) for unit in range(UNITS)]
