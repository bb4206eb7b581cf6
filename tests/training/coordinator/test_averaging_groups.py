"""Who averages over which clusters, by what members tell of their paths."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from swarmnode.codec.tensors import Codec
from swarmnode.codec.training_messages import PathRate
from swarmnode.decisions import DecisionLog
from swarmnode.plan.compression import LADDER
from swarmnode.plan.training.averaging import REST
from swarmnode.plan.view import Span
from swarmnode.swarm.records.run import Averaging, Run
from swarmnode.training.coordinator.averaging_groups import AveragingGroups
from swarmnode.training.coordinator.link_times import LinkTimes
from swarmnode.training.coordinator.worker_group import WorkerHandle, WorkerState

NAMES = "abcdefgh"
FAST_BPS, SLOW_BPS = 1e9, 50e6


class Links:
    """Lines of 1 Gbit/s, and 100 MB to average. `announced`: who says how fast their paths are; `homes`: numbers of their homes."""

    def __init__(self, announced: str = "", homes: tuple[int, ...] = ()) -> None:
        self._announced = announced
        self._homes = homes

    def between(self, peers: Sequence[str], _positions: int) -> tuple[Any, Any]:
        return np.full((len(peers), len(peers)), 0.01), np.zeros((len(peers), len(peers)))

    def homes(self, _peers: Sequence[str]) -> tuple[int, ...]:
        return self._homes

    def line_bps(self, _peer: str) -> float:
        return FAST_BPS

    def paths_bps(self, peers: Sequence[str]) -> Any:
        return np.array([[near(here, there) if here in self._announced else 0.0 for there in peers] for here in peers])

    def averaged_bytes(self, _blocks: Sequence[int], _how: Averaging) -> float:
        return 100e6


def members(names: str = NAMES) -> list[WorkerHandle]:
    handles = [
        WorkerHandle(name, cast("Any", SimpleNamespace(open=True)), lambda: 0.0, WorkerState.USABLE) for name in names
    ]
    for handle in handles:
        handle.worker.span = Span(0, 2)
    return handles


def run(averaging: Averaging = Averaging()) -> Run:
    return Run(bytes(32), 100, 8, 1, averaging=averaging)


def near(one: str, other: str) -> float:
    return FAST_BPS if (one in "abcd") == (other in "abcd") else SLOW_BPS


def told(groups: AveragingGroups, names: str = NAMES, bps: Callable[[str, str], float] = near) -> None:
    for name in names:
        groups.record_rates(name, [PathRate(other, bps(other, name)) for other in NAMES if other != name])


def clusters(groups: AveragingGroups, of: Run | None = None, who: str = NAMES) -> dict[str, int]:
    (first, *_) = groups.make(of or run(), 3, members(who), lambda _peer, _units: 1)
    return {member.peer: member.cluster for member in first.members}


def made(announced: str = "", homes: tuple[int, ...] = ()) -> tuple[AveragingGroups, DecisionLog]:
    decisions = DecisionLog()
    return AveragingGroups(2, cast("LinkTimes", Links(announced, homes)), LADDER, decisions), decisions


def test_after_the_first_averaging_clusters_are_known_and_why_tells_what_they_gain() -> None:
    groups, decisions = made()
    assert set(clusters(groups).values()) == {0} and not decisions.about()
    told(groups)
    assert clusters(groups) == {name: int(name in "efgh") for name in NAMES}
    (decision, *_) = decisions.about("0")
    assert (
        decision.what == "averages layers 0 to 1 in 2 groups of machines near one another"
        and "in a single group" in decision.facts[0]
    )


def test_before_the_first_averaging_what_both_ends_announce_counts() -> None:
    groups, _ = made(announced=NAMES)
    assert clusters(groups) == {name: int(name in "efgh") for name in NAMES}
    alone, _ = made(announced="a")
    assert set(clusters(alone).values()) == {0}
    told(groups, bps=lambda _sender, _receiver: FAST_BPS)
    groups.clusters.give_up()
    assert set(clusters(groups).values()) == {0}, "it is what came of parts that counts"


def test_one_end_alone_makes_no_path_slow_or_fast() -> None:
    groups, _ = made()
    told(groups, names="a")
    assert set(clusters(groups).values()) == {0}, "the others have said nothing yet"
    told(groups, bps=lambda sender, receiver: FAST_BPS if receiver == "a" else near(sender, receiver))
    assert clusters(groups) == {name: int(name in "efgh") for name in NAMES}, "a would join them by its word alone"


def test_who_says_that_all_its_paths_are_slow_parts_nobody_else() -> None:
    groups, _ = made()
    told(groups, bps=lambda _sender, receiver: 1e3 if receiver == "a" else FAST_BPS)
    found = clusters(groups)
    assert len({found[name] for name in NAMES[1:]}) == 1


def test_who_is_gone_is_forgotten_and_a_failure_ends_it_for_a_while() -> None:
    groups, _ = made()
    told(groups)
    assert len(set(clusters(groups).values())) == 2
    groups.clusters.give_up()
    assert all(set(clusters(groups).values()) == {0} for _ in range(REST - 1))
    assert len(set(clusters(groups).values())) == 2
    assert set(clusters(groups, who="abcd").values()) == {0}
    assert set(clusters(groups).values()) == {0}, "of whom came back nothing is known"


@pytest.mark.parametrize("averaging", [Averaging(robust=True), Averaging(codec=Codec.TOPK)])
def test_where_each_contribution_counts_by_itself_there_are_none(averaging: Averaging) -> None:
    groups, _ = made()
    told(groups)
    assert set(clusters(groups, run(averaging)).values()) == {0}


@pytest.mark.parametrize("claim_bps", [5e-324, 1e-9, 1e15])
def test_whatever_one_claims_of_its_paths_what_is_expected_stays_within_reason(claim_bps: float) -> None:
    groups, _ = made()
    told(groups, bps=lambda _sender, receiver: claim_bps if receiver == "a" else FAST_BPS)
    assert 0 < groups.expected_s(run(), 3, members()) < 1e5
    assert groups.expected_s(run(Averaging(every=5)), 3, members()) == 0.0, "nobody averages"


def test_a_line_of_a_home_is_as_fast_as_one_path_was_alone() -> None:
    """As parts came while all four of each home sent, each path had a part of the line."""
    groups, _ = made(announced=NAMES, homes=(0, 0, 0, 0, 4, 4, 4, 4))
    expected_s = groups.expected_s(run(), 0, members())
    told(groups, bps=lambda one, other: near(one, other) / (1 if near(one, other) == FAST_BPS else 8))
    assert groups.expected_s(run(), 1, members()) == pytest.approx(expected_s)
    apart, _ = made(announced=NAMES)
    told(apart)
    usual_s = apart.expected_s(run(), 1, members())
    told(apart, bps=lambda one, other: near(one, other) / (1 if near(one, other) == FAST_BPS else 8))
    assert apart.expected_s(run(), 2, members()) > 4 * usual_s, (
        "where no line is shared what came is what a path carries"
    )
