"""Findings about others: what the rule decides from them, and how the record keeps them over restarts, for days, within bounds."""

from __future__ import annotations

import itertools
import random
from functools import reduce
from pathlib import Path

import msgspec
import pytest

from swarmnode.decisions import DecisionLog
from swarmnode.peer.findings_record import MAX_EVIDENCE, MAX_PEERS, Findings
from swarmnode.plan.findings import (
    LATEST,
    Kind,
    PeerAction,
    PeerFinding,
    PeerStanding,
    Signs,
    after,
    are_too_many,
    outlier,
)
from swarmnode.tolerances import (
    AGAINST,
    CONSTANT,
    DOUBTS,
    FAILURES,
    HALF_LIFE_S,
    HALF_TRUST,
    MAX_NEAR_TEXTS,
    NEAR_MISS_RATE,
    OUTLYING,
    SHUN_S,
    STEPS,
)
from swarmnode.training.coordinator.link_times import Failures

DAY_S = 86_400.0
NOW = 1e9


def text(number: int) -> str:
    return number.to_bytes(32, "big").hex()


def of(*told: tuple[Kind, float, float, str]) -> PeerStanding:
    """The standing after findings of a kind at a time (in days), with a weight and another side."""
    findings = [PeerFinding(kind.value, NOW + days * DAY_S, weight, other) for kind, days, weight, other in told]
    return reduce(after, findings, PeerStanding())


def near(*numbers: int, positions: float = 128) -> list[tuple[Kind, float, float, str]]:
    return [(Kind.NEAR, 0.0, positions, text(number)) for number in numbers]


RIGHT = (Kind.RIGHT, 0.0, 2_000.0, "")


@pytest.mark.parametrize(
    ("findings", "days", "action", "passed"),
    [
        ([], 0, PeerAction.USE, 0),
        ([RIGHT], 0, PeerAction.USE, 2_000),
        ([RIGHT, RIGHT], 3, PeerAction.USE, 2_000),
        ([RIGHT, (Kind.UNCLEAR, 0, 1, "")], 0, PeerAction.USE, 1_000),
        ([RIGHT, (Kind.SILENT, 0, 1, "")], 0, PeerAction.USE, 0),
        ([RIGHT, (Kind.FAILED, 0, 1, "")] * 9, 0, PeerAction.USE, 18_000),
        ([RIGHT, (Kind.OUTLYING, 0, 1, ""), (Kind.LEFT_OUT, 0, 1, "")], 0, PeerAction.USE, 2_000),
        ([RIGHT, *near(1)], 0, PeerAction.USE, 1_000),
        (near(1, 2, 3, 4), 0, PeerAction.USE, 0),
        (near(1, 2, 3, 4, 5), 0, PeerAction.SHUN, 0),
        (near(1, 2, 3, 4, positions=56), 0, PeerAction.SHUN, 0),
        (near(*[1] * 16), 0, PeerAction.USE, 0),
        (near(*[1] * 20), 0, PeerAction.SHUN, 0),
        (near(*range(20), positions=50_000), 0, PeerAction.USE, 0),
        ([(Kind.CONTRADICTION, 0, 1, "one")] * 9, 0, PeerAction.DOUBT, 0),
        ([(Kind.CONTRADICTION, 0, 1, other) for other in "ab"], 0, PeerAction.DOUBT, 0),
        ([(Kind.CONTRADICTION, 0, 1, other) for other in "abc"], 0, PeerAction.SHUN, 0),
        ([(Kind.CONTRADICTION, 4 * n, 1, other) for n, other in enumerate("abc")], 8, PeerAction.DOUBT, 0),
        ([RIGHT, (Kind.FALSE, 0, 1, "")], 6.9, PeerAction.SHUN, 0),
        ([RIGHT, (Kind.FALSE, 0, 1, "")], 7.1, PeerAction.USE, 0),
        ([(Kind.FALSE, 0, 1, ""), RIGHT], 0, PeerAction.SHUN, 2_000),
    ],
)
def test_the_rule(
    findings: list[tuple[Kind, float, float, str]], days: float, action: PeerAction, passed: float
) -> None:
    known, now = of(*findings), NOW + days * DAY_S
    assert known.action(now) is action
    assert known.passed * known.fading(now) == pytest.approx(passed)


def test_findings_of_later_versions_decide_nothing_and_are_kept() -> None:
    known = after(of(RIGHT), PeerFinding("a kind to come", NOW))
    assert (known.passed, known.action(NOW)) == (2_000, PeerAction.USE)
    assert "a kind to come" in {found.kind for found in known.findings}


def test_a_file_of_the_version_before_is_read(tmp_path: Path) -> None:
    path = tmp_path / "standing.json"
    path.write_text(
        '{"liar":{"passed":0.0,"at":5.0,"shunned_until":2e9,"doubts":{},"near_misses":0.0,"audited":0.0,"near_texts":[]},'
        '"odd":{"passed":9.0,"at":1e9,"shunned_until":0.0,"doubts":{"other":1e9},"near_misses":1.0,"audited":9.0,'
        '"near_texts":["AAAA"]}}'
    )
    standing = Findings(path, lambda: NOW)
    assert standing.shunned == {"liar"} and not standing.proved
    assert standing.doubted == {"odd"} and standing.trust("odd") > 0


def test_what_is_decided_is_noted_with_its_evidence(tmp_path: Path) -> None:
    decisions = DecisionLog(lambda: NOW)
    standing = Findings(tmp_path / "standing.json", lambda: NOW, decisions)
    standing.add("liar", Kind.SILENT, "it gave no account of text 1")
    assert not decisions.about("liar")
    assert standing.add("liar", Kind.FALSE, "two others agree on text 2")
    (decision,) = decisions.about("liar")
    assert decision.what == "leaves it out for a week"
    assert decision.facts[:2] == ("it returned wrong results", "two others agree on text 2")
    assert [found.evidence for found in standing.of("liar").findings] == [
        "it gave no account of text 1",
        "two others agree on text 2",
    ]
    counts = {reading.labels: reading.value for reading in standing.readings()}
    assert (counts["false",], counts["silent",], counts["right",]) == (1, 1, 0)


def test_a_full_record_of_the_largest_entries_is_read_again(tmp_path: Path) -> None:
    """A file that is too large to be read would forget everybody who is shunned."""
    path = tmp_path / "standing.json"
    standing = Findings(path, lambda: NOW)
    for number in range(MAX_PEERS):
        peer = f"{number:060}"
        for kind in Kind:
            if kind is not Kind.NEAR:
                standing.add(peer, kind, "ü" * 2 * MAX_EVIDENCE, other="o" * 60)
        texts = tuple(bytes.fromhex(text(one)) for one in range(MAX_NEAR_TEXTS))
        standing._peers[peer] = msgspec.structs.replace(standing.of(peer), near_texts=texts)
    assert all(len(standing.of(peer).findings) <= LATEST for peer in standing._peers)
    standing.save()
    assert len(Findings(path, lambda: NOW).shunned) == MAX_PEERS


def test_failures_rest_longer_each_time_and_a_ban_is_for_good(tmp_path: Path) -> None:
    now_s = 0.0
    standing = Findings(tmp_path / "standing.json", lambda: NOW)
    failures = Failures(lambda: now_s, standing)
    pauses = []
    for _ in range(FAILURES):
        failures.record("slow")
        assert failures.record("slow") == len(pauses) + 1, "what fails in a pause is the same failure"
        pauses.append(failures.pause_s("slow"))
        now_s += pauses[-1]
        assert not failures.rests("slow")
    assert pauses == [0.5, 1.0, 2.0] and failures.in_a_row("slow") == FAILURES
    failures.forgive("slow")
    assert failures.in_a_row("slow") == 0
    failures.ban("false")
    now_s += 1e9
    assert failures.rests("false") and failures.banned == ("false",)
    failures.leave_out("false", "others find it wrong")
    assert [found.kind for found in standing.of("false").findings] == ["left out"] and not standing.shunned


HONEST = Signs(1.0, 0.0, 1.0, STEPS)


@pytest.mark.parametrize(
    ("odd", "found"),
    [
        (HONEST, None),
        (HONEST._replace(distance=1.01 * OUTLYING, steps=1), "odd"),
        (HONEST._replace(against=1.01 * AGAINST), "odd"),
        (HONEST._replace(constancy=1.01 * CONSTANT), "odd"),
        (HONEST._replace(constancy=9 * CONSTANT, steps=STEPS - 1), None),
    ],
)
def test_which_member_of_an_all_reduce_stands_out(odd: Signs, found: str | None) -> None:
    assert outlier({"a": HONEST, "b": HONEST, "odd": odd}) == found
    assert outlier({}) is None


class Clock:
    now = NOW

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def standing(tmp_path: Path, clock: Clock) -> Findings:
    return Findings(tmp_path / "standing" / "swarm.json", clock)


def test_trust_grows_with_audits_and_fades_in_days(standing: Findings, clock: Clock) -> None:
    assert standing.trust("newcomer") == 0
    standing.add("old", Kind.RIGHT, "right", weight=int(HALF_TRUST))
    assert standing.trust("old") == pytest.approx(0.5)
    assert standing.weights(["old", "newcomer"]) == pytest.approx({"old": 1.0, "newcomer": 0.4})
    clock.now += HALF_LIFE_S
    assert standing.trust("old") == pytest.approx(1 / 3)


def test_where_all_are_new_nobody_has_less_weight(standing: Findings) -> None:
    assert standing.weights(["a", "b"]) == {"a": 1.0, "b": 1.0}


def test_who_is_shunned_stays_so_over_restarts_and_begins_anew(
    standing: Findings, clock: Clock, tmp_path: Path
) -> None:
    standing.add("false", Kind.RIGHT, "right", weight=9_000)
    standing.add("false", Kind.FALSE, "wrong")
    standing.save()
    again = Findings(tmp_path / "standing" / "swarm.json", clock)
    assert again.shunned == again.proved == {"false"}
    clock.now += SHUN_S + 1
    assert not again.shunned
    assert again.trust("false") == 0


def test_doubts_with_one_peer_count_once_and_with_several_add_up(standing: Findings) -> None:
    for _ in range(9):
        assert not standing.doubt("one", "other")
    for number in range(DOUBTS - 2):
        assert not standing.doubt("one", f"peer {number}")
    assert standing.doubt("one", "the last")
    assert standing.shunned == {"one"} and not standing.proved


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


def test_near_misses_lower_trust_add_up_and_are_forgotten(standing: Findings, clock: Clock, tmp_path: Path) -> None:
    texts = map(text, itertools.count())

    def is_shunned(standing: Findings, peer: str, positions: int, other: str | None = None) -> bool:
        return standing.add(peer, Kind.NEAR, "near", weight=positions, other=other or next(texts))

    standing.add("honest", Kind.RIGHT, "right", weight=int(HALF_TRUST))
    assert not is_shunned(standing, "honest", 128)
    assert standing.trust("honest") == pytest.approx(1 / 3)
    standing.add("honest", Kind.UNCLEAR, "unclear")
    assert standing.trust("honest") == pytest.approx(1 / 5)
    assert not any(is_shunned(standing, "honest", 50_000) for _ in range(20)), "as often as chance has it"
    assert not any(is_shunned(standing, "peculiar", 128, text(0)) for _ in range(16)), (
        "a text that comes again counts less"
    )

    for peer in ("liar", "slow liar"):
        assert [is_shunned(standing, peer, 128) for _ in range(4)] == [False] * 4
    standing.save()
    assert is_shunned(Findings(tmp_path / "standing" / "swarm.json", clock), "liar", 128), "over restarts"
    clock.now += 3 * HALF_LIFE_S
    assert not is_shunned(standing, "slow liar", 128)


def test_a_crowd_of_names_does_not_make_the_shunned_forgotten(standing: Findings) -> None:
    standing.add("false", Kind.FALSE, "wrong")
    for number in range(MAX_PEERS + 9):
        standing.add(f"name {number}", Kind.RIGHT, "right", weight=1)
    assert standing.shunned == {"false"}


def test_a_damaged_file_is_an_empty_one(standing: Findings, clock: Clock, tmp_path: Path) -> None:
    standing.add("false", Kind.FALSE, "wrong")
    standing.save()
    path = tmp_path / "standing" / "swarm.json"
    path.write_bytes(path.read_bytes()[:-3])
    assert not Findings(path, clock).shunned
