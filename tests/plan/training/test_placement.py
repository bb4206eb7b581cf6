"""Placement for training: spans that meet, pipelines inside clusters, no more held than pays."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from swarmnode.plan.training.clusters import Clusters
from swarmnode.plan.training.placement import TrainingPeers, choose_training_span, common_stages, cut
from swarmnode.plan.training.step_forecast import StepForecast, TrainingLoad, TrainingNetwork
from swarmnode.plan.view import Span

NOTHING = Span(0, 0)
UNITS, NEAR_BPS, FAR_BPS = 8, 1e9, 1e8


def load(gradient_bytes: float = 1e6, activation_bytes: float = 1e6) -> TrainingLoad:
    return TrainingLoad(32, activation_bytes, np.full(UNITS, gradient_bytes), np.ones(UNITS))


def islands(sizes: list[int], work_per_s: float = 100.0) -> TrainingNetwork:
    """Peers by turns on one island or another: fast inside, slow between."""
    places = np.array([island for turn in range(max(sizes)) for island, size in enumerate(sizes) if turn < size])
    near = places[:, None] == places[None, :]
    return TrainingNetwork(
        np.full(len(places), work_per_s), np.where(near, 0.001, 0.05), np.where(near, NEAR_BPS, FAR_BPS)
    )


def settled(load: TrainingLoad, network: TrainingNetwork, capacities: list[int], rounds: int = 9) -> list[Span]:
    """All hold all that fits, side by side, then choose in turn until nobody moves."""
    starts = [sum(capacities[:peer]) % (UNITS - capacity + 1) for peer, capacity in enumerate(capacities)]
    spans = [Span(start, start + capacity) for start, capacity in zip(starts, capacities, strict=True)]
    forecast = StepForecast(load, network)
    stages = common_stages(forecast, capacities)
    for _ in range(rounds):
        before = list(spans)
        for peer in range(network.peers):
            peers = TrainingPeers(spans, capacities)
            spans[peer] = choose_training_span(forecast, stages, peers, peer) or spans[peer]
        if spans == before:
            return spans
    raise AssertionError("they never come to rest")


def test_clusters_of_two_islands() -> None:
    network = islands([3, 3])
    clusters = Clusters(StepForecast(load(), network).load.activation_bytes * network.seconds_per_byte_NN)
    assert [len(set(labels.tolist())) for labels in clusters.label_LN] == [6, 2]
    members_KN, rise_K = clusters.members()
    assert members_KN.shape == (8, 6) and members_KN.sum() == 12
    assert rise_K[0] == pytest.approx(0.008) and rise_K[-1] == pytest.approx(0.08 - 0.008)


def test_pipelines_stay_on_their_islands() -> None:
    """Memory for two of eight units: each island gets whole pipelines, as many of each stage as of the others."""
    spans = settled(load(), islands([8, 8], work_per_s=20.0), [2] * 16)
    for island in range(2):
        assert Counter(spans[island::2]) == {Span(start, start + 2): 2 for start in range(0, UNITS, 2)}


def test_no_more_is_held_than_pays() -> None:
    """Where averaging costs nothing all hold everything, where it costs much each holds little."""
    network = islands([4, 4])
    light, heavy = (settled(load(size), network, [UNITS] * 8) for size in (0.0, 1e9))
    assert set(light) == {Span(0, UNITS)}
    assert max(span.units for span in heavy) <= 2


def test_small_memories_take_parts_and_all_is_held() -> None:
    spans = settled(load(1e7), islands([5, 5]), [2, 1] * 5)
    assert {unit for span in spans for unit in range(*span)} == set(range(UNITS))
    assert all(span.units <= capacity for span, capacity in zip(spans, [2, 1] * 5, strict=True))


def test_who_would_leave_units_alone_says_so() -> None:
    forecast = StepForecast(load(), islands([1, 1]))
    peers = TrainingPeers([Span(0, 2), NOTHING], [2, 2])
    assert choose_training_span(forecast, common_stages(forecast, [2, 2]), peers, 1) is None


def test_one_that_is_content_stays() -> None:
    network = islands([2, 2])
    peers = TrainingPeers(settled(load(1e8), network, [UNITS] * 4), [UNITS] * 4)
    forecast = StepForecast(load(1e8), network)
    stages = common_stages(forecast, peers.capacity_units)
    assert [choose_training_span(forecast, stages, peers, peer) for peer in range(4)] == list(peers.spans)


def test_a_forecast_of_one_stage_is_what_can_be_worked_out_by_hand() -> None:
    """Two whole replicas at 100 units/s: 32 microbatches of 8 units on both, the first one's 0.08 s, 4 MB there and back."""
    network = islands([2])
    spans = [Span(0, UNITS)] * 2
    forecast = StepForecast(load(), network)
    averaging_s = 2 * (8e6 / 2) * 8 / NEAR_BPS  # through the line, and then once more along the path
    assert forecast.step_s(spans, 0, spans[:1])[0] == pytest.approx(1.28 + 0.08 + 2 * averaging_s + 0.002)


def test_stages_share_the_work() -> None:
    assert cut(np.ones(UNITS), 4) == [Span(0, 2), Span(2, 4), Span(4, 6), Span(6, 8)]
    heavy_end = np.array([1.0] * 7 + [5.0])
    assert cut(heavy_end, 2) == [Span(0, 6), Span(6, 8)]
    assert cut(heavy_end, UNITS) == [Span(unit, unit + 1) for unit in range(UNITS)]
