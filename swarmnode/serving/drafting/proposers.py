"""Drafter and budget of each session at its first hop, by what the client allows and what the route's hops announce.

Choice among several proposers, turn by turn, by what each has achieved in the session.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from swarmnode.codec.body import HopSpec
from swarmnode.codec.messages import ANY_DRAFTS, Open
from swarmnode.net.interfaces import PeerId
from swarmnode.plan.serving.draft_budget import MeasuredBudget, RowCost, busiest
from swarmnode.serving.drafting.drafter import (
    DraftBudget,
    Drafter,
    LiveDrafter,
    MtpDrafter,
    SuggestedDrafter,
    WeighingDrafter,
)
from swarmnode.serving.drafting.lookup import LookupDrafter
from swarmnode.serving.drafting.model_drafter import ModelDrafter
from swarmnode.swarm.records.announcement import Announcement


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


class BusyNode(Protocol):
    """A node that computes sessions, like `StageServer`."""

    @property
    def load(self) -> int:
        """Number of sessions in use."""

    @property
    def row_load(self) -> float:
        """Share of the time that rows of all sessions take, between 0 and 1."""


class OpensDrafters(Protocol):
    """Source of drafters that a model computes for, like `DraftModel`. `name` is the model's."""

    name: str

    def open(self, max_length: int, took: Callable[[int, float], None]) -> ModelDrafter | None:
        """Return the drafter of a new session of at most `max_length` positions; None if too many sessions guess already.

        The drafter calls `took` with the number of guesses and the seconds that computing them took.
        """


class Proposers:
    """Maker of the drafter and the budget of a session.

    `announced` returns the announcements of the known peers, this node included. `node` returns this node. `model` is
    its draft model, for sessions whose client lets it use anything; None if it has none. `clock` times the drafters.
    """

    def __init__(
        self,
        announced: Callable[[], Mapping[PeerId, Announcement]],
        node: Callable[[], BusyNode],
        model: OpensDrafters | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._announced = announced
        self._node = node
        self._model = model
        self._clock = clock

    def __call__(self, opened: Open) -> tuple[Drafter, DraftBudget]:
        """Return a new drafter and budget for the session of `opened`."""
        budget = MeasuredBudget(lambda: self._cost(opened.route), max_window=opened.drafts)
        drafters: list[Drafter] = [LookupDrafter()]
        if opened.proposer == ANY_DRAFTS:
            drafters.append(MtpDrafter())
        if self._model is not None and opened.proposer in (ANY_DRAFTS, self._model.name):
            drafter = self._model.open(opened.max_length, lambda *took: budget.proposer(ModelDrafter.name).took(*took))
            drafters += [] if drafter is None else [drafter]
        return DrafterChoice(drafters, budget, self._clock), budget

    def _cost(self, route: tuple[HopSpec, ...]) -> RowCost:
        """Return the cost of rows at the busiest hop of a route, as far as its hops announce their speeds.

        Its load is estimated from that of this node: all sessions count as equally busy.
        """
        known, node = self._announced(), self._node()
        costs = []
        for place, hop in enumerate(route):
            peer = known.get(hop.peer)
            sessions = node.load if place == 0 else 0 if peer is None else peer.sessions
            speeds = (0.0, 0.0, 0.0) if peer is None else _speeds(peer)
            costs.append(RowCost.of_speeds(hop.end - hop.start, *speeds, sharing=max(0, sessions - 1)))
        worst = busiest(costs)
        here_s, there_s = costs[0].rows_s, worst.rows_s
        return worst._replace(load=min(1.0, node.row_load * there_s / here_s) if here_s else node.row_load)


def _speeds(peer: Announcement) -> tuple[float, float, float]:
    """Return the speeds of a peer for single positions, inside prompts, and for steps of two positions."""
    return peer.decode_units_per_s, peer.prefill_units_per_s, peer.pair_units_per_s
