"""Leases that are out, and those being called back."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from swarmnode.plan.training.step_ledger import OutstandingLease, StepLedger
from swarmnode.plan.view import Span

ROUTE = (("a", Span(0, 1)), ("b", Span(1, 2)))
FEEDER = "feeder"


def leases_out(*numbers: int) -> StepLedger:
    ledger = StepLedger(0, 2, range(4))
    for number in numbers:
        ledger.grant(OutstandingLease(number, number % 10, ROUTE, FEEDER))
    return ledger


def leased(ledger: StepLedger) -> set[int]:
    """Microbatches that must not be leased now."""
    assert (
        not ledger.complete()
        and sorted({*ledger.free(), *(lease.number for lease in ledger.leases)}) == ledger.missing()
    )
    return set(ledger.missing()) - set(ledger.free())


def call_back(ledger: StepLedger, number: int, *peers: str) -> None:
    found = ledger.find(number, FEEDER)
    assert found is not None
    ledger.call_back(found, set(peers))


def test_a_lease_is_its_trainers_and_done_once() -> None:
    ledger = leases_out(11)
    assert leased(ledger) == {1} and len(ledger.held_by(FEEDER)) == 1 and not ledger.held_by("another")
    assert ledger.find(11, "another") is None
    done = ledger.find(11, FEEDER)
    assert done is not None and done.number == 1 and done.passes("a") and not done.passes("c")
    ledger.done(done, 1.0)
    assert ledger.find(11, FEEDER) is None and not ledger.leases and leased(ledger) == set()


def test_a_number_is_free_when_all_stages_have_released_it() -> None:
    ledger = leases_out(11, 12)
    call_back(ledger, 11, "a", "b")
    assert [lease.lease for lease in ledger.out] == [12], "it is not out any more"
    assert ledger.find(11, FEEDER) is None, "what comes late is not done"
    assert ledger.released(11, "a") is None
    assert leased(ledger) == {1, 2} and len(ledger.leases) == 2
    over = ledger.released(11, "b")
    assert over is not None and over.number == 1
    assert leased(ledger) == {2} and len(ledger.leases) == 1


def test_nobody_to_ask() -> None:
    ledger = leases_out(11)
    call_back(ledger, 11)
    assert not ledger.leases and repr(ledger).endswith(" 0 leases>")


def test_words_about_leases_of_before_are_nothing() -> None:
    ledger = leases_out(11)
    call_back(ledger, 11, "a")
    ledger.void()
    assert ledger.released(11, "a") is None and not ledger.leases


@given(st.lists(st.tuples(st.sampled_from(["grant", "done", "late", "a", "b"]), st.integers(0, 3)), max_size=40))
def test_a_microbatch_has_one_lease_at_most_and_is_free_or_counted_without(events: list[tuple[str, int]]) -> None:
    """Whatever is done, called back and released in whatever order: what is said of a lease that is over changes nothing."""
    ledger, newest = leases_out(), dict.fromkeys(range(4), -1)
    for peer, span in ROUTE:
        ledger.report(peer, span, {})
    for count, (event, number) in enumerate(events):
        if event == "grant" and number in ledger.free():
            newest[number] = count
            ledger.grant(OutstandingLease(count, number, ROUTE, FEEDER))
        elif event in ("a", "b"):
            ledger.released(newest[number], event)
        elif (lease := ledger.find(newest[number], FEEDER)) is not None:
            ledger.done(lease, 1.0) if event == "done" else ledger.call_back(lease, {"a", "b"})
        leased = [lease.number for lease in ledger.leases]
        assert len(leased) == len(set(leased)), "one lease at most"
        assert {*leased, *ledger.free()} == set(ledger.missing()) and not set(leased) & set(ledger.free())
