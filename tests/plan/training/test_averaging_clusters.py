"""All with all, or over clusters: which is faster, and who may say so."""

from __future__ import annotations

import math

import numpy as np
import pytest

from swarmnode.codec.tensors import Codec
from swarmnode.codec.training_messages import Group, How, MemberSpec
from swarmnode.compute.training.averaging.parts import cut
from swarmnode.plan.training.averaging import (
    REST,
    AveragingClusters,
    AveragingNetwork,
    crossing,
    gathering,
    is_bearable,
    may_cluster,
)
from swarmnode.swarm.records.run import Averaging

SIZE_BYTES = 100e6


def network(sides: list[int], *, slow_bps: float = 50e6, delay_s: float = 0.02) -> AveragingNetwork:
    """Clusters in which paths have 1 Gbit/s, and between which they are slow."""
    labels = np.repeat(np.arange(len(sides)), sides)
    near = labels[:, None] == labels[None, :]
    return AveragingNetwork(np.where(near, 1e9, slow_bps), np.full(len(labels), 1e9), np.where(near, 0.0005, delay_s))


def group(count: int, *, listens: tuple[int, ...] = ()) -> Group:
    return Group(0, (0,), tuple(MemberSpec(f"{place}", int(place not in listens)) for place in range(count)))


def clusters(found: Group) -> list[int]:
    return [member.cluster for member in found.members]


def test_two_clusters_that_are_far_apart_are_found() -> None:
    found = AveragingClusters().choose(group(8), network([4, 4]), SIZE_BYTES)
    assert clusters(found.group) == [0, 0, 0, 0, 1, 1, 1, 1]
    assert found.seconds < 0.6 * found.flat_s


@pytest.mark.parametrize("sides", [[8], [1, 1], [1, 1, 1, 1]])
def test_where_there_is_nothing_to_gain_all_send_to_all(sides: list[int]) -> None:
    found = AveragingClusters().choose(group(sum(sides)), network(sides), SIZE_BYTES)
    assert set(clusters(found.group)) == {0} and found.seconds == found.flat_s


def test_little_that_is_to_be_summed_takes_the_way_with_fewest_delays() -> None:
    assert set(clusters(AveragingClusters().choose(group(8), network([4, 4]), 1000).group)) == {0}


def test_what_nobody_measured_changes_nothing() -> None:
    unknown = AveragingNetwork(np.full((6, 6), math.inf), np.full(6, math.inf), np.full((6, 6), 0.03))
    assert set(clusters(AveragingClusters().choose(group(6), unknown, SIZE_BYTES).group)) == {0}


def test_what_was_chosen_stays_while_measurements_waver() -> None:
    averaging_clusters, draws = AveragingClusters(), np.random.default_rng(5)
    found = set()
    for _ in range(50):
        wavering = network([4, 4], slow_bps=50e6)
        noisy = AveragingNetwork(
            wavering.path_bps_NN * draws.uniform(0.7, 1.0, (8, 8)), wavering.line_bps_N, wavering.delay_NN
        )
        found.add(tuple(clusters(averaging_clusters.choose(group(8), noisy, SIZE_BYTES).group)))
    assert found == {(0, 0, 0, 0, 1, 1, 1, 1)}
    others = np.argsort([0, 4, 1, 5, 2, 6, 3, 7])
    swapped = network([4, 4])
    elsewhere = AveragingNetwork(
        swapped.path_bps_NN[np.ix_(others, others)], swapped.line_bps_N, swapped.delay_NN[np.ix_(others, others)]
    )
    found_there = averaging_clusters.choose(group(8), elsewhere, SIZE_BYTES)
    assert found_there.seconds < found_there.flat_s and tuple(clusters(found_there.group)) not in found


def test_after_one_that_came_to_nothing_all_send_to_all_for_a_while() -> None:
    averaging_clusters = AveragingClusters()
    averaging_clusters.choose(group(8), network([4, 4]), SIZE_BYTES)
    averaging_clusters.give_up()
    chosen = []
    for _ in range(REST + 1):
        averaging_clusters.begin()
        chosen.append(set(clusters(averaging_clusters.choose(group(8), network([4, 4]), SIZE_BYTES).group)))
    assert chosen[: REST - 1] == [{0}] * (REST - 1) and chosen[-1] == {0, 1}
    flat = AveragingClusters()
    flat.give_up()
    flat.begin()
    assert len(set(clusters(flat.choose(group(8), network([4, 4]), SIZE_BYTES).group))) == 2, "it was all with all"


def test_listeners_are_where_they_are_near_and_others_update_apart() -> None:
    found = AveragingClusters().choose(group(8, listens=(0, 7)), network([4, 4]), SIZE_BYTES)
    assert clusters(found.group) == [0, 0, 0, 0, 1, 1, 1, 1]
    apart = Group(0, (0,), group(8).members, How.APART)
    assert AveragingClusters().choose(apart, network([4, 4]), SIZE_BYTES).group == apart


def test_one_slow_liar_is_left_to_itself() -> None:
    """By claims of one peer no others are parted, or joined: paths count as the slower of both ends says."""
    honest = network([8])
    paths = honest.path_bps_NN.copy()
    paths[0, :] = paths[:, 0] = 1e3
    found = AveragingClusters().choose(
        group(8), AveragingNetwork(paths, honest.line_bps_N, honest.delay_NN), SIZE_BYTES
    )
    assert len(set(clusters(found.group)[1:])) == 1


@pytest.mark.parametrize("labels", [[0] * 6, [0, 0, 0, 1, 1, 1], [0, 1, 2, 2, 1, 2]])
@pytest.mark.parametrize("shares", [[16] * 6, [1, 2, 4, 8, 16, 31]])
def test_parts_are_dealt_out_as_the_forecast_has_it(labels: list[int], shares: list[int]) -> None:
    length = 1 << 28
    dealt = np.zeros((6, 6))
    for part in cut(length, shares, labels):
        for gatherer in part.gatherers.values():
            dealt[gatherer, part.owner] += part.length / length
    np.testing.assert_allclose(dealt, gathering(shares, labels), atol=0.01)
    assert crossing(shares, labels).sum() == pytest.approx(2 * (dealt.sum() - 1) + 2 * sum_inside(labels), rel=0.02)


def sum_inside(labels: list[int]) -> float:
    """Vectors that contributors send inside their clusters."""
    return sum(labels.count(label) - 1 for label in set(labels))


def test_where_each_contribution_counts_by_itself_there_are_no_clusters() -> None:
    assert may_cluster(Averaging()) and may_cluster(Averaging(codec=Codec.TOPK2)) and may_cluster(Averaging(rank=4))
    assert not may_cluster(Averaging(robust=True)) and not may_cluster(Averaging(codec=Codec.TOPK))


def test_a_member_takes_no_part_in_clusters_that_are_far_slower_as_it_measures_itself() -> None:
    """Its own cluster, as the coordinator has it, lies behind a slow line."""
    spec, flat = Group(0, (0,), tuple(MemberSpec(f"{place}", 1, cluster=place // 4) for place in range(8))), group(8)
    near = {f"{place}": 1e9 if place < 4 else 50e6 for place in range(1, 8)}
    inside_out = {peer: 50e6 if bps == 1e9 else 1e9 for peer, bps in near.items()}
    assert is_bearable(spec, "0", near) and is_bearable(spec, "0", {}) and is_bearable(flat, "0", inside_out)
    assert is_bearable(spec, "stranger", inside_out), "it is in no group"
    assert is_bearable(spec, "0", inside_out), "twice as long is no reason"
    alone = Group(0, (0,), tuple(MemberSpec(f"{place}", 1, cluster=int(place > 1)) for place in range(32)))
    assert not is_bearable(alone, "0", {"1": 1e6} | {f"{place}": 1e9 for place in range(2, 32)})


def test_at_home_paths_count_and_not_the_line_out_of_it() -> None:
    """Two mates behind a line that is a hundred times slower than what joins them."""
    size_bytes, inside_bps, line_bps = 1e8, 1e9, 1e7
    path_bps_NN, nobody_NN = np.full((2, 2), inside_bps), np.zeros((2, 2))
    lines_bps = np.full(2, line_bps)
    apart = AveragingNetwork(path_bps_NN, lines_bps, nobody_NN)
    together = AveragingNetwork(path_bps_NN, lines_bps, nobody_NN, homes=(0, 0))
    seconds = [network.averaging_s(size_bytes, (1, 1), (0, 0)) for network in (apart, together)]
    assert seconds == pytest.approx([8 * size_bytes / line_bps, 8 * size_bytes / inside_bps], rel=0.01)
