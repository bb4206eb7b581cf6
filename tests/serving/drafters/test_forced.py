"""Suggested tokens are proposed as long as the text and the guesses go on with them."""

from __future__ import annotations

from swarmnode.serving.drafting.forced import ForcedDrafter


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
