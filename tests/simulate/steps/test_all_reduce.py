"""What averaging takes where lines differ: parts sized by them, beside parts of equal size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import numpy as np
import pytest

from swarmnode.codec.training_messages import USUAL_SHARE, Group, MemberSpec
from swarmnode.plan.offline.planner_files import Scenario
from swarmnode.plan.training.averaging import AveragingClusters, part_shares
from swarmnode.simulate.environment.links import Links
from swarmnode.simulate.environment.model import Model
from swarmnode.simulate.steps.simulated_all_reduce import averaging_network, reduction_ends_s
from swarmnode.swarm.records.run import Averaging

PARAMETERS = 25_000_000


class OneUnit:
    """A model of one unit."""

    matrix_width = 1024

    def block_parameters(self, _block: int) -> int:
        return PARAMETERS


def averaging_s(uplinks_bps: Sequence[float], shares: Sequence[int]) -> float:
    """Of members whose lines are as fast down as anybody sends."""
    count = len(uplinks_bps)
    lines = np.array(uplinks_bps)
    nothing = (None,) * count
    scenario = Scenario(
        "lines",
        nothing,
        np.full((count, count), 0.02),
        np.repeat(lines[:, None], count, axis=1),
        nothing,
        nothing,
        nothing,
    )
    members = tuple(MemberSpec(f"{number}", 1, share) for number, share in enumerate(shares))
    indexes = {member.peer: number for number, member in enumerate(members)}
    links, model = Links(scenario, range(count)), cast("Model", OneUnit())
    return reduction_ends_s(0.0, [Group(0, (0,), members)], indexes, links, model, Averaging())


@pytest.mark.parametrize("fast", [3, 7, 15])
def test_one_slow_line_holds_averaging_up_little_longer_than_its_own_gradients_take(fast: int) -> None:
    uplinks_bps = [100e6] * fast + [10e6]
    flat_s = averaging_s(uplinks_bps, [USUAL_SHARE] * len(uplinks_bps))
    sized_s = averaging_s(uplinks_bps, part_shares(uplinks_bps))
    least_s = 32 * PARAMETERS / 10e6  # its gradients have to leave it once
    assert sized_s < 0.75 * flat_s and sized_s < 1.2 * least_s


def test_equal_lines_are_used_as_before() -> None:
    uplinks_bps = [50e6] * 6
    assert averaging_s(uplinks_bps, part_shares(uplinks_bps)) == averaging_s(uplinks_bps, [USUAL_SHARE] * 6)


def test_who_claims_a_line_that_it_has_not_costs_no_more_than_three_times() -> None:
    uplinks_bps = [100e6] * 7 + [10e6]
    honest_s = averaging_s(uplinks_bps, part_shares(uplinks_bps))
    false_s = averaging_s(uplinks_bps, part_shares([*uplinks_bps[:-1], 1e12]))
    assert honest_s < false_s < 3.2 * honest_s


def joined_s(sides: Sequence[int], *, clustered: bool, slow_bps: float = 50e6) -> float:
    """Of clusters with 1 Gbit/s inside, and a slow path from each member to each of another one."""
    labels = np.repeat(np.arange(len(sides)), sides)
    near = labels[:, None] == labels[None, :]
    nothing = (None,) * len(labels)
    delays, paths = np.where(near, 0.0005, 0.02), np.where(near, 1e9, slow_bps)
    links = Links(Scenario("clusters", nothing, delays, paths, nothing, nothing, nothing), range(len(labels)))
    group = Group(0, (0,), tuple(MemberSpec(f"{number}", 1) for number in range(len(labels))))
    indexes = {member.peer: number for number, member in enumerate(group.members)}
    if clustered:
        network = averaging_network(group, indexes, links)
        group = AveragingClusters().choose(group, network, 4 * PARAMETERS).group
        assert [member.cluster for member in group.members] == labels.tolist()
    return reduction_ends_s(0.0, [group], indexes, links, cast("Model", OneUnit()), Averaging())


@pytest.mark.parametrize(
    ("sides", "share", "most_s"),
    [([4, 4], 0.49, 2.0), ([8, 8], 0.79, 1.62), ([4, 4, 4], 0.64, 1.75), ([6, 2], 0.69, 2.8)],
)
def test_clusters_joined_by_slow_paths_average_sooner_one_after_another(
    sides: list[int], share: float, most_s: float
) -> None:
    """4.04 s -> 1.94 s for two of four: here each message goes as a whole, so that the four ways add up. What is handed on later
    holds nothing up that is there sooner. All with all takes as long as slow paths need for a part, there and back."""
    flat_s, clustered_s = joined_s(sides, clustered=False), joined_s(sides, clustered=True)
    assert flat_s == pytest.approx(2 * (32 * PARAMETERS / sum(sides) / 50e6 + 0.02))
    assert clustered_s < min(most_s, share * flat_s), (flat_s, clustered_s)


def test_what_is_sent_together_shares_the_line_until_it_is_through() -> None:
    """100 Mbit/s: the short one has half of it, the long one then all of it, as far as its path carries it."""
    nothing = (None,) * 4
    bandwidths = np.array([[0, 1e8, 1e8, 2e7]] * 4) + 1e8 * np.eye(4)
    links = Links(Scenario("one", nothing, np.full((4, 4), 0.01), bandwidths, nothing, nothing, nothing), range(4))
    came_s = links.send_together(1.0, 0, {1: 1e6, 2: 5e6, 3: 5e6, 0: 9e9})
    assert came_s == pytest.approx({0: 1.0, 1: 1.01 + 0.24, 2: 1.01 + 0.88, 3: 1.01 + 2.0})
    assert links.send(1.0, 0, 1, 1e6) == pytest.approx(1.01 + 0.88 + 0.08), "what is sent later follows"


@pytest.mark.parametrize("groups", [2, 12])
def test_who_waits_for_others_in_one_group_holds_no_other_group_up(groups: int) -> None:
    """While nodes are on their way to other stages each is in two groups, with others in each: a chain of them takes no longer than
    two do. Sums of one group waited for what was sent for the one before, and that for the one before it."""
    count, size_bits = groups + 1, 32 * PARAMETERS
    nothing = (None,) * count
    nowhere, bandwidths = np.zeros((count, count)), np.full((count, count), 1e8)
    links = Links(Scenario("chain", nothing, nowhere, bandwidths, nothing, nothing, nothing), range(count))
    pairs = [
        Group(number, (number,), tuple(MemberSpec(f"{one}", 1) for one in (number, number + 1)))
        for number in range(groups)
    ]
    indexes = {f"{number}": number for number in range(count)}
    took_s = reduction_ends_s(0.0, pairs, indexes, links, cast("Model", OneUnit()), Averaging())
    assert took_s == pytest.approx(2 * size_bits / 1e8), "half there and half back, of two groups"


@pytest.mark.parametrize("seed", range(6))
def test_what_averaging_takes_is_forecast_whatever_the_shares(seed: int) -> None:
    """Lines that are fast to neighbours say nothing of the slow paths over which a large part has to come and go: parts by lines
    took twice as long as was forecast of them, and were taken."""
    chance = np.random.default_rng(seed)
    labels = np.sort(chance.integers(4, size=12))
    between = 10 ** chance.uniform(7.7, 9.3, (4, 4))
    between = np.minimum(between, between.T)
    np.fill_diagonal(between, 10 ** chance.uniform(9, 10, 4))
    nothing, pairs = (None,) * 12, np.ix_(labels, labels)
    scenario = Scenario("places", nothing, np.full((12, 12), 0.001), between[pairs], nothing, nothing, nothing)
    indexes = {f"{number:02d}": number for number in range(12)}

    def links() -> Links:
        return Links(scenario, range(12))

    shares = part_shares([links().uplink_bps(number) for number in range(12)])
    sized = Group(0, (0,), tuple(MemberSpec(peer, 1, share) for peer, share in zip(indexes, shares, strict=True)))
    network = averaging_network(sized, indexes, links())
    found = AveragingClusters().choose(sized, network, 4 * PARAMETERS)

    def takes_s(group: Group) -> float:
        return reduction_ends_s(0.0, [group], indexes, links(), cast("Model", OneUnit()), Averaging())

    assert 0.8 < found.seconds / takes_s(found.group) < 1.1
    equal = Group(0, (0,), tuple(MemberSpec(peer, 1) for peer in indexes))
    assert takes_s(found.group) < 1.1 * min(takes_s(sized), takes_s(equal))


def test_a_group_in_which_nobody_has_counted_anything_has_nothing_to_agree_on() -> None:
    members = (MemberSpec("0", 0), MemberSpec("1", 0))
    nothing = (None,) * 2
    pairs = np.full((2, 2), 0.02), np.full((2, 2), 1e8)
    links = Links(Scenario("two", nothing, *pairs, nothing, nothing, nothing), range(2))
    groups = [Group(0, (0,), members)]
    assert reduction_ends_s(3.0, groups, {"0": 0, "1": 1}, links, cast("Model", OneUnit()), Averaging()) == 3.0
