import pytest

from swarmnode.net.addressing.addresses import Claimant
from swarmnode.net.fair_share import MAX_BUCKETS, FairPace, Pace


def test_who_asks_for_much_waits_and_others_do_not():
    now = [100.0]
    pace = FairPace(Pace(10, 20), Pace(20, 60), clock=lambda: now[0])
    greedy, neighbour, other = Claimant("a", "1"), Claimant("a", "2"), Claimant("b", "3")
    assert [pace.wait_s(greedy) for _ in range(20)] == [0] * 20
    assert pace.wait_s(greedy, 10) == pytest.approx(1)
    assert pace.wait_s(neighbour) == pace.wait_s(other) == 0
    now[0] += 60
    assert pace.wait_s(greedy, 20) == 0, "after a rest"


def test_many_identities_share_their_groups_pace():
    pace = FairPace(Pace(10, 20), Pace(20, 60), clock=lambda: 0.0)
    waits = [pace.wait_s(Claimant("a", f"{number}")) for number in range(100)]
    assert waits[:60] == [0] * 60 and waits[-1] == pytest.approx(2)
    assert pace.wait_s(Claimant("b", "x")) == 0


def test_memory_is_bounded():
    pace = FairPace(Pace(10, 20), Pace(20, 60), clock=lambda: 0.0)
    for number in range(2 * MAX_BUCKETS):
        pace.wait_s(Claimant("a", f"{number}"))
    assert len(pace._free_at_s) <= MAX_BUCKETS


def test_what_one_is_refused_its_neighbours_do_not_pay_for():
    pace = FairPace(Pace(10, 20), Pace(20, 60), clock=lambda: 0.0)
    greedy, neighbour = Claimant("a", "1"), Claimant("a", "2")
    waits = [pace.wait_s(greedy, within_s=1.01) for _ in range(10_000)]
    assert sum(wait <= 1.01 for wait in waits) == 30, "its own pace, and a second ahead"
    assert waits[-1] == pytest.approx(1.1), "and no debt that grows"
    assert all(pace.wait_s(neighbour, within_s=1.0) < 1e-9 for _ in range(20))
