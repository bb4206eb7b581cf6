"""What is kept about others: over restarts, for days, within bounds."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import pytest

from swarmnode.swarm.peers.standing import (
    DOUBTS,
    HALF_LIFE_S,
    HALF_TRUST,
    MAX_PEERS,
    NEAR_MISS_RATE,
    SHUN_S,
    Standing,
    are_too_many,
)


class Clock:
    now = 1e9

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def standing(tmp_path: Path, clock: Clock) -> Standing:
    return Standing(tmp_path / "standing" / "swarm.json", clock)


def test_trust_grows_with_audits_and_fades_in_days(standing: Standing, clock: Clock) -> None:
    assert standing.trust("newcomer") == 0
    standing.pass_audit("old", int(HALF_TRUST))
    assert standing.trust("old") == pytest.approx(0.5)
    assert standing.weights(["old", "newcomer"]) == pytest.approx({"old": 1.0, "newcomer": 0.4})
    clock.now += HALF_LIFE_S
    assert standing.trust("old") == pytest.approx(1 / 3)


def test_where_all_are_new_nobody_has_less_weight(standing: Standing) -> None:
    assert standing.weights(["a", "b"]) == {"a": 1.0, "b": 1.0}


def test_who_is_shunned_stays_so_over_restarts_and_begins_anew(
    standing: Standing, clock: Clock, tmp_path: Path
) -> None:
    standing.pass_audit("false", 9_000)
    standing.shun("false")
    standing.save()
    again = Standing(tmp_path / "standing" / "swarm.json", clock)
    assert again.shunned == {"false"}
    clock.now += SHUN_S + 1
    assert not again.shunned
    assert again.trust("false") == 0


def test_doubts_with_one_peer_count_once_and_with_several_add_up(standing: Standing) -> None:
    for _ in range(9):
        assert not standing.doubt("one", "other")
    for number in range(DOUBTS - 2):
        assert not standing.doubt("one", f"peer {number}")
    assert standing.doubt("one", "the last")
    assert standing.shunned == {"one"}


def test_near_misses_add_up_over_texts() -> None:
    """Honest peers have one in 10,000 positions. One in each text of 128 is found after a few, one in each fourth text later."""
    assert not are_too_many(2, 0), "whatever their texts are"
    assert not are_too_many(4, 4 * 128)
    assert are_too_many(5, 5 * 128) and are_too_many(4, 4 * 56)
    assert not are_too_many(100, 1e6)
    assert are_too_many(10, 40 * 128)


@pytest.mark.parametrize(("rate", "out"), [(NEAR_MISS_RATE / 2, 0), (NEAR_MISS_RATE, 0)])
def test_no_honest_peer_is_left_out_in_thousands_of_sessions(rate: float, out: int) -> None:
    """2,000 peers with 1,000 audited texts of 56 positions each, judged at each near miss as in use."""
    dice, found = random.Random(1), 0
    for _ in range(2_000):
        near, audited = 0, 0.0
        while (audited := audited + dice.expovariate(rate)) < 1_000 * 56:
            near += 1
            found += are_too_many(near, audited)
    assert found == out


@pytest.mark.parametrize("share", [1.0, 0.5, 0.25], ids=["each text", "each second", "each fourth"])
def test_a_peer_that_comes_near_in_a_share_of_its_texts_is_found(share: float) -> None:
    dice = random.Random(2)
    for _ in range(200):
        near = texts = 0
        while not are_too_many(near, texts * 56):
            texts += 1
            near += dice.random() < share
        assert texts <= 12 / share**1.5


def test_near_misses_lower_trust_add_up_and_are_forgotten(standing: Standing, clock: Clock, tmp_path: Path) -> None:
    texts = (number.to_bytes(32, "big") for number in itertools.count())
    standing.pass_audit("honest", int(HALF_TRUST))
    assert not standing.near_miss("honest", 128, next(texts))
    assert standing.trust("honest") == pytest.approx(1 / 3)
    standing.halve_trust("honest")
    assert standing.trust("honest") == pytest.approx(1 / 5)
    assert not any(standing.near_miss("honest", 50_000, next(texts)) for _ in range(20)), "as often as chance has it"
    assert not any(standing.near_miss("peculiar", 128, bytes(32)) for _ in range(16)), (
        "a text that comes again counts less"
    )

    said = [standing.near_miss("liar", 128, next(texts)) for _ in range(5)]
    assert said == [False] * 4 + [True]
    standing.save()
    assert Standing(tmp_path / "standing" / "swarm.json", clock).near_miss("liar", 128, next(texts)), "over restarts"
    clock.now += 3 * HALF_LIFE_S
    assert not standing.near_miss("liar", 128, next(texts))


def test_a_crowd_of_names_does_not_make_the_shunned_forgotten(standing: Standing) -> None:
    standing.shun("false")
    for number in range(MAX_PEERS + 9):
        standing.pass_audit(f"name {number}", 1)
    assert standing.shunned == {"false"}


def test_a_damaged_file_is_an_empty_one(standing: Standing, clock: Clock, tmp_path: Path) -> None:
    standing.shun("false")
    standing.save()
    path = tmp_path / "standing" / "swarm.json"
    path.write_bytes(path.read_bytes()[:-3])
    assert not Standing(path, clock).shunned
