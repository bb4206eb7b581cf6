"""A greedy peer slows itself, and others hardly: seen on a stage that has no rest."""

from __future__ import annotations

import pytest

from swarmnode.plan.serving.scheduler import (
    ALLOWED_POSITIONS,
    MAX_OWNERS,
    SLOWDOWN,
    USUAL_CHUNK,
    DeviceShares,
    PassCost,
    PassScheduler,
)
from tests.plan.serving.stage import OTHERS, cost_s, open_greedy, p99_s, with_others


@pytest.mark.parametrize("steps", [0, 60], ids=["", "many sessions"])
@pytest.mark.parametrize("prompts", [0, 20], ids=["", "long prompts"])
def test_others_wait_at_most_half_as_long_again(steps: int, prompts: int) -> None:
    usual_s = p99_s(with_others())
    assert usual_s == pytest.approx(cost_s(dict.fromkeys(OTHERS, 1)))
    stage = with_others()
    for session in open_greedy(stage, steps):
        stage.scheduler.add(session, 1)
        stage.decoding.add(session)
    for session in open_greedy(stage, prompts):
        stage.scheduler.add(session, 100_000)
    assert p99_s(stage) <= SLOWDOWN * usual_s


def test_a_few_greedy_peers_are_no_more_than_one() -> None:
    usual_s = p99_s(with_others())
    stage = with_others()
    for session in open_greedy(stage, 60, peers=3):
        stage.scheduler.add(session, 1)
        stage.decoding.add(session)
    assert p99_s(stage) <= SLOWDOWN * usual_s


def test_all_sessions_of_a_greedy_peer_have_their_turn() -> None:
    stage = with_others()
    greedy = list(open_greedy(stage, 30))
    for session in greedy:
        stage.scheduler.add(session, 1)
        stage.decoding.add(session)
    for _ in range(20):
        stage.turn()
    turns = [sum(session in counts for counts in stage.passes) for session in greedy]
    assert max(turns) - min(turns) <= 1
    assert min(turns) >= 3


def test_a_greedy_peers_prompt_goes_on_and_where_nobody_else_is_it_is_not_held_back() -> None:
    stage = with_others()
    (session,) = open_greedy(stage, 1)
    stage.scheduler.add(session, 100_000)
    for _ in range(400):
        stage.turn()
    beside = [counts[session] for counts in stage.passes[-200:] if session in counts]
    assert len(beside) == 200 and min(beside) >= 2, "beside the others' steps"
    stage.decoding.clear()
    while set(OTHERS) & stage.turn().keys():
        pass
    for _ in range(20):
        stage.turn()
    assert stage.turn() == {session: USUAL_CHUNK}


def test_one_long_prompt_of_somebody_who_had_nothing_is_not_held_back() -> None:
    stage = with_others()
    (session,) = open_greedy(stage, 1)
    stage.scheduler.add(session, ALLOWED_POSITIONS // 2)
    while session in stage.scheduler._backlogs:
        stage.turn()
    alone = [counts for counts in stage.passes if set(counts) == {session}]
    passes = [counts for counts in stage.passes if session in counts]
    assert alone == passes[: len(alone)] and len(alone) >= len(passes) - 1, "its last positions may share a step"


def test_who_comes_back_has_saved_up_nothing_and_forgotten_nothing() -> None:
    cost = PassCost()
    cost.record(1, 0.01)
    shares = DeviceShares(cost)
    for session, owner in enumerate(("early", "late", "early")):
        shares.open(session, owner)
    shares.arrive(0, ())
    shares.charge({0: 10})
    shares.arrive(1, (0,))
    assert shares.ahead_s([1], [0, 1]) == {1: 0.0}
    shares.charge({0: 5})
    shares.close(0)
    assert shares.ahead_s([2], [1, 2]) == {2: pytest.approx(5 * cost.seconds(1))}, (
        "by another session it is no newcomer"
    )


def test_what_is_remembered_of_owners_is_bounded() -> None:
    shares = DeviceShares(PassCost())
    for session in range(2 * MAX_OWNERS):
        shares.open(session, f"peer {session}")
        shares.arrive(session, ())
        shares.close(session)
    assert len(shares._used_s) == MAX_OWNERS
    assert not shares._owners


def test_who_has_weight_has_so_many_times_as_much_of_a_busy_device() -> None:
    scheduler = PassScheduler(longest_step=8, longest_chunk=64)
    for session, weight in ((1, 4.0), (2, 1.0)):
        scheduler.open(session, f"owner {session}", weight)
        scheduler.add(session, 1_000_000)
    had = {1: 0, 2: 0}
    for _ in range(500):
        counts = scheduler.next()
        scheduler.took(counts)
        for session, count in counts.items():
            had[session] += count
        scheduler.ran(sum(counts.values()), 0.01 + 0.001 * sum(counts.values()))
    assert had[1] / had[2] == pytest.approx(4.0, rel=0.1)
