"""Who agrees with whom, on what, at the end of a step."""

from __future__ import annotations

import pytest

from swarmnode.codec.body import SHARED
from swarmnode.codec.training_messages import Group, How
from swarmnode.plan.training.averaging import Holder, make_groups
from swarmnode.plan.view import Span
from swarmnode.swarm.records.run import Averaging, Run

STAGES = [
    Holder("a", Span(0, 2)),
    Holder("b", Span(0, 2)),
    Holder("c", Span(2, 4)),
    Holder("d", Span(1, 4), listens=True),
]
COUNTS = {"a": 3, "b": 5, "c": 8, "d": 0}


def groups(every: int, step: int, holders: list[Holder] = STAGES, **settings: int) -> dict[tuple[int, ...], Group]:
    run = Run(bytes(32), 100, 8, 1, averaging=Averaging(every=every), **settings)  # type: ignore[arg-type]
    made = make_groups(4, run, step, holders, lambda peer, _units: COUNTS[peer])
    return {tuple(group.blocks): group for group in made}


def of(unit: int, made: dict[tuple[int, ...], Group]) -> Group:
    """The group of a unit."""
    return next(group for blocks, group in made.items() if unit in blocks)


def members(group: Group) -> dict[str, int]:
    return {member.peer: member.count for member in group.members}


def test_units_of_the_same_holders_are_one_group() -> None:
    made = groups(1, 0)
    assert {blocks: members(group) for blocks, group in made.items()} == {
        (0,): {"a": 3, "b": 5},
        (1,): {"a": 3, "b": 5, "d": 0},
        (2, 3): {"c": 8, "d": 0},
        (SHARED,): {"a": 3, "b": 5, "c": 8, "d": 0},
    }
    assert {group.how for group in made.values()} == {How.SUM}
    assert len({group.number for group in made.values()}) == len(made)


@pytest.mark.parametrize(
    ("step", "how"),
    [(0, How.SUM), (9, How.SUM), (10, How.APART), (19, How.AVERAGE), (20, How.APART), (99, How.AVERAGE)],
)
def test_apart_after_the_warm_up(step: int, how: How) -> None:
    assert of(0, groups(20, step, warmup_steps=10)).how == how


def test_what_the_ends_share_stays_one_thing() -> None:
    assert groups(20, 5)[SHARED,].how == How.SUM
    whole = [Holder("a", Span(0, 4)), Holder("b", Span(0, 4))]
    assert groups(20, 5, whole)[SHARED,].how == How.APART


def test_a_replica_without_counts_still_says_how_far_it_came() -> None:
    COUNTS["a"] = 0
    try:
        assert members(of(0, groups(20, 19))) == {"a": 1, "b": 5}
        assert members(of(0, groups(20, 5))) == {"a": 0, "b": 5}
        assert members(of(2, groups(20, 19))) == {"c": 8, "d": 0}, "a listener has come nowhere"
        assert members(of(2, groups(20, 5))) == {"c": 8}, "and need not hear of what is not agreed"
    finally:
        COUNTS["a"] = 3


def test_contributors_add_up_what_their_lines_carry_and_listeners_nothing() -> None:
    holders = [
        Holder("a", Span(0, 4), line_bps=100e6),
        Holder("b", Span(0, 4), line_bps=10e6),
        Holder("c", Span(0, 4), line_bps=100e6),
        Holder("d", Span(0, 4), listens=True, line_bps=1e12),
    ]
    shares = {member.peer: member.share for member in of(0, groups(1, 0, holders)).members}
    assert shares == {"a": 16, "b": 2, "c": 16, "d": 16}
