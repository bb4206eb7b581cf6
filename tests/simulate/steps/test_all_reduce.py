"""What averaging takes where lines differ: parts sized by them, beside parts of equal size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import numpy as np
import pytest

from swarmnode.codec.averaging_messages import USUAL_SHARE, Group, MemberSpec
from swarmnode.plan.offline.scenario import Scenario
from swarmnode.plan.training.shares import part_shares
from swarmnode.simulate.environment.links import Links
from swarmnode.simulate.environment.model import Model
from swarmnode.simulate.steps.all_reduce import reduction_ends_s
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
