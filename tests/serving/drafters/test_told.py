"""Suggested tokens are proposed as long as the text and the guesses go on with them."""

from __future__ import annotations

from collections import Counter

from swarmnode.measuring.meters import ACCEPTED, WASTED
from swarmnode.serving.drafting.drafter import ForcedDrafter
from swarmnode.serving.drafting.lookup import LookupDrafter
from swarmnode.serving.drafting.session_guesses import DraftLead


def suggested() -> ForcedDrafter:
    drafter = ForcedDrafter()
    drafter.push([1, 2, 3])
    drafter.suggest([4, 5, 6, 7])
    return drafter


def test_the_rest_of_a_suggestion_is_proposed() -> None:
    drafter = suggested()
    assert drafter.propose((), 8) == [4, 5, 6, 7]
    assert drafter.propose((), 2) == [4, 5]
    assert drafter.propose((4, 5), 8) == [6, 7]
    assert drafter.propose((4, 5, 6, 7), 8) == []
    assert drafter.propose((4, 5, 6, 7, 8), 8) == []


def test_other_guesses_end_it() -> None:
    assert suggested().propose((4, 9), 8) == []


def test_the_text_goes_on_with_it_or_ends_it() -> None:
    drafter = suggested()
    drafter.push([4, 5])
    assert drafter.propose((), 8) == [6, 7]
    assert drafter.propose((6,), 8) == [7]
    drafter.push([9])
    assert drafter.propose((), 8) == []
    other = suggested()
    other.push([4, 5, 6, 7, 8])
    assert other.propose((), 8) == []


def test_cutting_back_keeps_what_still_follows() -> None:
    drafter = suggested()
    drafter.push([4, 5])
    drafter.cut(4)
    assert drafter.propose((), 8) == [5, 6, 7]
    drafter.cut(2)
    assert drafter.propose((), 8) == []


def test_forced_tokens_go_ahead_without_a_budget_and_before_other_guesses() -> None:
    class NoBudget:
        def count(self, in_flight: int) -> int:
            return 0

        def verdict(self, proposer: str, accepted: int, rejected: int) -> None:
            raise AssertionError(f"forced tokens are not for the budget: {proposer}")

        def turn(self, took_s: float) -> None: ...

    counts: Counter[tuple[str, str]] = Counter()
    lead = DraftLead(LookupDrafter(), NoBudget(), most=3, begin=0, clock=lambda: 0.0, counts=[counts])

    def proposed() -> list[int]:
        return [guess.id for guess in lead.propose(100)]

    lead.know([9, 8, 9, 8])
    lead.record_token(3)
    lead.foresee(5, (1, 2, 3, 4, 5))
    assert proposed() == [], "the token before them is not known yet"
    lead.know([7])
    assert proposed() == [1, 2, 3]
    assert lead.judge(1)
    assert proposed() == [4]
    assert not lead.judge(6), "a last hop that forces what it does not draw wastes work and nothing else"
    assert counts == {("forced", ACCEPTED): 1, ("forced", WASTED): 3}
    lead.know([6])
    assert proposed() == []
