"""The ledger: after anything that may happen, each microbatch counts exactly once for every unit."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarmnode.plan.training.step_ledger import OutstandingLease, StepLedger
from swarmnode.plan.view import Span

UNITS = 4
MICROBATCHES = 6
PEERS = {"a": Span(0, 2), "b": Span(2, 4), "c": Span(0, 4), "d": Span(1, 3)}


def ledger() -> StepLedger:
    return StepLedger(7, UNITS, range(MICROBATCHES))


def test_a_new_ledger_misses_everything() -> None:
    new = ledger()
    assert new.missing() == list(range(MICROBATCHES)) and not new.complete()
    assert new.counters(0) == [None] * UNITS
    assert repr(new) == "<StepLedger of step 7: 0 of 6 counted everywhere, 0 leases>"


def test_a_microbatch_that_went_the_whole_way_is_not_missing() -> None:
    held = ledger()
    for peer in "ab":
        held.report(peer, PEERS[peer], {})
        held.count(peer, PEERS[peer], 3)
    assert held.missing() == [0, 1, 2, 4, 5]
    assert held.counters(3) == ["a", "a", "b", "b"]
    assert held.counts("a", (0, 1)) == 1 and held.counts("a", (2,)) == 0 and held.counts("nobody", (0,)) == 0


def test_who_holds_both_ends_counts_for_what_they_share_whichever_end_it_computed() -> None:
    held = StepLedger(0, 3, range(MICROBATCHES))
    held.report("whole", Span(0, 3), {})
    held.report("front", Span(0, 1), {})
    for number in range(MICROBATCHES):
        held.count("front", Span(0, 1), number)
        held.count("whole", Span(1, 3), number)
    assert held.counts("whole", (0,)) == 0
    assert held.counts("whole", (0, 2)) == held.counts("front", (0, 2)) == MICROBATCHES


def test_a_lost_replica_takes_its_counts_with_it() -> None:
    held = ledger()
    for peer in "abc":
        held.report(peer, PEERS[peer], {})
    for number in range(MICROBATCHES):
        for peer in "ab" if number % 2 else "c":
            held.count(peer, PEERS[peer], number)
    assert held.complete()
    held.lose("a")
    assert held.missing() == [1, 3, 5]
    assert held.counters(1) == [None, None, "b", "b"], "what the others counted stays"


def test_counts_outside_of_a_span_and_of_strangers_are_nothing() -> None:
    held = ledger()
    held.report("a", PEERS["a"], {0: 1, 3: 1})
    held.count("a", Span(0, 4), 2)
    held.count("stranger", Span(0, 4), 2)
    assert held.counters(2) == ["a", "a", None, None] and held.counters(0) == ["a", None, None, None]


def test_of_two_that_counted_the_same_the_lesser_is_discarded() -> None:
    held = ledger()
    held.report("a", PEERS["a"], {0: 0b1, 1: 0b1})
    held.report("c", PEERS["c"], {0: 0b111, 1: 0b110, 2: 0b1, 3: 0b1})
    assert held.conflicts() == ["a"]
    held.report("a", PEERS["a"], {0: 0b1000, 1: 0b1000})
    assert held.conflicts() == []


FIRST, LAST = Span(0, 1), Span(1, 2)


@pytest.fixture
def two() -> StepLedger:
    """Three microbatches, two units with a stage each."""
    held = StepLedger(0, 2, range(3))
    held.report("first", FIRST, {})
    held.report("last", LAST, {})
    return held


def test_what_a_trainer_has_back_counts_everywhere(two: StepLedger) -> None:
    for number, loss in enumerate((1.0, 2.0, 6.0)):
        assert number in two.missing()
        two.done(OutstandingLease(number, number, (("first", FIRST), ("last", LAST))), loss)
    assert two.complete() and two.loss == pytest.approx(3.0)


def test_the_last_stage_tells_losses_of_what_it_has_counted(two: StepLedger) -> None:
    two.report("last", LAST, {1: 0b101}, (4.0, 8.0))
    assert two.loss == pytest.approx(6.0)
    two.report("first", FIRST, {0: 0b111})
    assert two.loss == pytest.approx(6.0) and two.missing() == [1]


def test_what_a_stage_says_replaces_what_was_known_or_adds_to_it(two: StepLedger) -> None:
    two.report("first", FIRST, {0: 0b001})
    two.report("first", FIRST, {0: 0b010}, adds=True)
    assert two.holdings["first"].mask(0) == 0b011
    two.report("first", FIRST, {0: 0b010})
    assert two.holdings["first"].mask(0) == 0b010


events = st.lists(
    st.one_of(
        st.tuples(st.just("report"), st.sampled_from(sorted(PEERS)), st.integers(0, (1 << MICROBATCHES) - 1)),
        st.tuples(st.just("count"), st.sampled_from(sorted(PEERS)), st.integers(0, MICROBATCHES - 1)),
        st.tuples(st.just("lose"), st.sampled_from(sorted(PEERS)), st.just(0)),
    ),
    max_size=25,
)


def play(sequence: list[tuple[str, str, int]]) -> StepLedger:
    held = ledger()
    for event, peer, number in sequence:
        span = PEERS[peer]
        if event == "report":
            held.report(peer, span, dict.fromkeys(range(*span), number))
        elif event == "count":
            held.count(peer, span, number)
        else:
            held.lose(peer)
    return held


@settings(max_examples=200, deadline=None)
@given(sequence=events)
def test_without_conflicts_nothing_is_counted_twice(sequence: list[tuple[str, str, int]]) -> None:
    held = play(sequence)
    for peer in held.conflicts():
        held.lose(peer)
    assert held.conflicts() == []
    for unit in range(UNITS):
        masks = [holding.mask(unit) for holding in held.holdings.values()]
        assert sum(mask.bit_count() for mask in masks) == held._union(unit).bit_count()


@settings(max_examples=200, deadline=None)
@given(sequence=events)
def test_missing_is_what_some_unit_has_not_counted(sequence: list[tuple[str, str, int]]) -> None:
    held = play(sequence)
    assert held.missing() == [number for number in range(MICROBATCHES) if None in held.counters(number)]
    assert held.complete() == (held.missing() == [])


@settings(max_examples=100, deadline=None)
@given(sequence=events)
def test_discarding_keeps_the_replica_with_most_counts(sequence: list[tuple[str, str, int]]) -> None:
    held = play(sequence)
    losers = set(held.conflicts())
    weights = {peer: held._weight(peer) for peer in held.holdings}
    assert not losers or max(weights.values()) == max(weights[peer] for peer in weights if peer not in losers)


@pytest.mark.parametrize("loss", [1.7e308, -1.7e308, float("nan"), float("inf")])
def test_losses_of_no_reason_that_a_stage_reports_are_nothing(loss: float) -> None:
    held = ledger()
    held.report("b", PEERS["b"], {UNITS - 1: 0b1111}, (loss, 2.0, loss, 4.0))
    assert held.loss == 3.0
