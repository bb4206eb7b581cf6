"""Choice among several proposers, turn by turn, by what each has achieved in the session."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from swarmnode.plan.serving.draft_budget import MeasuredBudget
from swarmnode.serving.drafting.drafter import Drafter, LiveDrafter, SuggestedDrafter, WeighingDrafter


class DrafterChoice:
    """Drafter that asks the most promising of several `drafters` first, and the next one if that proposes nothing.

    The `budget` says how many tokens/s each is worth. `name` is the proposer of the latest guesses.
    """

    def __init__(
        self, drafters: Sequence[Drafter], budget: MeasuredBudget, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        if not drafters:
            raise ValueError("a choice needs drafters")
        self.name = drafters[0].name
        self._drafters = list(drafters)
        self._live = [one for one in drafters if isinstance(one, LiveDrafter)]
        self._suggested = [one for one in drafters if isinstance(one, SuggestedDrafter)]
        self._budget = budget
        self._clock = clock

    def __repr__(self) -> str:
        return f"<DrafterChoice of {', '.join(one.name for one in self._drafters)}, now {self.name}>"

    def listen(self, wake: Callable[[], None]) -> None:
        """Call `wake` on the loop whenever a drafter that computes in the background has more guesses."""
        for drafter in self._live:
            drafter.listen(wake)

    def close(self) -> None:
        """Stop the drafters that compute in the background."""
        for drafter in self._live:
            drafter.close()

    def suggest(self, ids: Sequence[int]) -> None:
        """Take tokens that may follow the text, as the last hop says."""
        for drafter in self._suggested:
            drafter.suggest(ids)

    def push(self, ids: Sequence[int]) -> None:
        """Append accepted tokens to the text; the prompt comes first."""
        for drafter in self._drafters:
            drafter.push(ids)

    def cut(self, length: int) -> None:
        """Forget all but the first `length` accepted tokens."""
        for drafter in self._drafters:
            drafter.cut(length)

    def propose(self, guessed: Sequence[int], count: int) -> list[int]:
        """Return at most `count` tokens that may follow the accepted tokens and then `guessed`, the guesses in flight.

        No drafter proposes beyond its own window. Returns an empty list if none proposes anything.
        """
        for drafter in sorted(self._drafters, key=lambda one: -self._budget.worth(one.name)):
            allowed = min(count, self._budget.window(drafter.name) - len(guessed))
            if allowed <= 0:
                continue
            began_s = self._clock()
            if proposed := self._ask(drafter, guessed, allowed):
                if drafter not in self._live:  # which know by themselves how long they compute
                    self._budget.proposer(drafter.name).took(len(proposed), self._clock() - began_s)
                self.name = drafter.name
                return proposed
        return []

    def _ask(self, drafter: Drafter, guessed: Sequence[int], count: int) -> list[int]:
        """Return at most `count` guesses of one drafter, of those with known probabilities only as many as are worth their rows."""
        if not isinstance(drafter, WeighingDrafter):
            return drafter.propose(guessed, count)
        weighed = drafter.weigh(guessed, count)
        worthwhile = self._budget.worthwhile([guess.likely for guess in weighed])
        return [guess.id for guess in weighed[:worthwhile]]
