"""The choice among drafters: the most promising first, the next one if that proposes nothing."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from swarmnode.plan.serving.draft_budget import MeasuredBudget, RowCost
from swarmnode.serving.drafting.drafter import Drafter, MtpDrafter, Weighed
from swarmnode.serving.drafting.proposers import DrafterChoice


class Listed:
    """A drafter that proposes given tokens, and notes what it is told."""

    def __init__(self, name: str, tokens: Sequence[int]) -> None:
        self.name = name
        self.tokens = list(tokens)
        self.told: list[object] = []

    def push(self, ids: Sequence[int]) -> None:
        self.told.append(list(ids))

    def cut(self, length: int) -> None:
        self.told.append(length)

    def propose(self, guessed: Sequence[int], count: int) -> list[int]:
        return self.tokens[len(guessed) :][:count]


def chosen(*drafters: Drafter) -> tuple[DrafterChoice, MeasuredBudget]:
    budget = MeasuredBudget(lambda: RowCost(0.001, 0.0001))
    budget.turn(0.1)
    for one in drafters:
        budget.proposer(one.name).allowed = 32
    ticks = iter(range(1_000_000))
    return DrafterChoice(drafters, budget, clock=lambda: next(ticks) * 1e-6), budget


def test_the_better_one_proposes() -> None:
    choice, budget = chosen(Listed("model", [1] * 40), Listed("lookup", [2] * 40))
    for _ in range(30):
        budget.verdict("model", 0, 1)
        budget.verdict("lookup", 3, 0)
    assert choice.propose((), 4) == [2] * 4
    assert choice.name == "lookup"


def test_the_next_one_is_asked_if_the_best_is_silent() -> None:
    choice, budget = chosen(Listed("lookup", []), Listed("model", [1] * 40))
    for _ in range(30):
        budget.verdict("lookup", 3, 0)
    assert choice.propose((), 4) == [1] * 4
    assert choice.name == "model"


def test_a_resting_one_is_not_asked() -> None:
    choice, budget = chosen(Listed("lookup", []), Listed("model", [1] * 40))
    for _ in range(30):
        budget.verdict("lookup", 3, 0)
        budget.verdict("model", 0, 1)
    assert budget.proposer("model").resting > 0 or budget.window("model") < 8
    budget.proposer("model").resting = 5
    assert choice.propose((), 4) == []


def test_guesses_in_flight_count_for_the_window() -> None:
    choice, budget = chosen(Listed("lookup", range(100)))
    window = budget.window("lookup")
    assert choice.propose(range(window - 1), 8) == [window - 1]
    assert choice.propose(range(window), 8) == []


def test_all_of_them_follow_the_text() -> None:
    one, other = Listed("lookup", []), Listed("model", [])
    choice, _ = chosen(one, other)
    choice.push([1, 2])
    choice.cut(1)
    assert one.told == other.told == [[1, 2], 1]


def test_what_the_last_hop_guesses_is_for_its_own_drafter() -> None:
    lookup, told = Listed("lookup", []), MtpDrafter()
    choice, _ = chosen(lookup, told)
    choice.push([1, 2])
    choice.suggest([3, 4])
    assert choice.propose((), 8) == [3, 4] and choice.name == "mtp"
    choice.push([3])
    assert choice.propose((), 8) == [4] and lookup.told == [[1, 2], [3]]
    choice.suggest([])
    assert choice.propose((), 8) == []


def test_a_choice_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="drafters"):
        DrafterChoice([], MeasuredBudget())


class Doubtful(Listed):
    """A drafter that knows how likely its guesses are."""

    def weigh(self, guessed: Sequence[int], count: int) -> list[Weighed]:
        return [Weighed(token, 0.4 / 4**place) for place, token in enumerate(self.propose(guessed, count))]


def test_only_guesses_that_are_worth_their_rows_are_chosen() -> None:
    choice, budget = chosen(Doubtful("lookup", [1] * 40))
    chances = [0.4 / 4**place for place in range(8)]
    assert choice.propose((), 8) == [1] * budget.worthwhile(chances)
    assert 0 < budget.worthwhile(chances) < 8
