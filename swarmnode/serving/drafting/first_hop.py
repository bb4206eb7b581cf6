"""Guesses of one session at its first hop, which sends them ahead of the verdicts.

    text -> propose -> in flight -> judge by the tokens that the last hop draws

Pure state: the session sends what `propose` returns, and tells it each token that comes back round the ring.
"""

from __future__ import annotations

from array import array
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from swarmnode.measuring.meters import ACCEPTED, WASTED
from swarmnode.serving.drafting.drafter import DraftBudget, Drafter, ForcedDrafter, LiveDrafter, SuggestedDrafter


class Flight(NamedTuple):
    """Guess in flight: its token and the name of its proposer."""

    id: int
    proposer: str


class Foreseen(NamedTuple):
    """Tokens at `position` and behind it, as the last hop told with the token before: forced ones, and its guesses."""

    position: int
    forced: tuple[int, ...] = ()
    guesses: tuple[int, ...] = ()


class DraftLead:
    """Text and guesses in flight of one session. At most `most` guesses are in flight.

    `begin` is the first position whose token it knows: earlier ones were computed before this session guessed. `clock` is in
    seconds. Guesses are counted in each of `counts` by (proposer, result).
    """

    def __init__(
        self,
        drafter: Drafter,
        budget: DraftBudget,
        *,
        most: int,
        begin: int,
        clock: Callable[[], float],
        counts: Sequence[Counter[tuple[str, str]]],
    ) -> None:
        self.most = most
        self._counts = counts
        self._drafter = drafter
        self._forced = ForcedDrafter()
        self._foreseen = Foreseen(0)
        self._budget = budget
        self._clock = clock
        self._begin = begin
        self._text = array("i")
        self._flying: deque[Flight] = deque()
        self._sent_s: dict[int, float] = {}  # by position of the awaited token: when the position before it was sent
        self._goes_on = False

    @property
    def end(self) -> int:
        """Position after the last token of the known text."""
        return self._begin + len(self._text)

    @property
    def in_flight(self) -> int:
        """Number of guesses without a verdict."""
        return len(self._flying)

    def listen(self, wake: Callable[[], None]) -> None:
        """Call `wake` whenever a drafter that computes in the background has more guesses."""
        if isinstance(self._drafter, LiveDrafter):
            self._drafter.listen(wake)

    def close(self) -> None:
        """Stop a drafter that computes in the background: the session guesses no more."""
        if isinstance(self._drafter, LiveDrafter):
            self._drafter.close()

    def pause(self) -> None:
        """Guess nothing until the next token comes back: a new epoch begins, or the text is whole."""
        self._goes_on = False
        self._sent_s.clear()

    def know(self, ids: Sequence[int]) -> None:
        """Append tokens that are of the text, and that were not guessed."""
        self._text.extend(ids)
        self._drafter.push(ids)
        self._forced.push(ids)

    def share(self, other: DraftLead, length: int) -> None:
        """Begin with the first `length` tokens of another session's text, if that session knows its text from the beginning."""
        self._begin = length
        if other._begin == 0:
            self._begin = 0
            self.know(other._text[:length].tolist())
            self._begin = length - len(self._text)

    def cut(self, to: int) -> None:
        """Forget the guesses in flight, and the text from position `to` on."""
        self._waste()
        kept = max(0, to - self._begin)
        if kept < len(self._text):
            del self._text[kept:]
            self._drafter.cut(kept)
            self._forced.cut(kept)
        self._begin = min(self._begin, to)

    def heard(self, position: int) -> None:
        """Note that the token at `position` came back from the last hop: guessing goes on."""
        self._goes_on = True
        sent_s = self._sent_s.pop(position, None)
        if sent_s is not None:
            self._budget.turn(self._clock() - sent_s)

    def judge(self, token: int) -> bool:
        """Compare the oldest guess in flight with the token that was drawn at its position. If they differ, all guesses in flight
        are forgotten."""
        flight = self._flying[0]
        if flight.id == token:
            self._flying.popleft()
            self._count(flight.proposer, ACCEPTED, 1)
            self._tell_budget(flight.proposer, 1, 0)
            self.know([token])
            return True
        for proposer, count in self._waste().items():
            self._tell_budget(proposer, 0, count)
        self._sent_s.clear()
        return False

    def _waste(self) -> Counter[str]:
        """Forget the guesses in flight. Returns their numbers by proposer."""
        wasted = Counter(flight.proposer for flight in self._flying)
        self._flying.clear()
        for proposer, count in wasted.items():
            self._count(proposer, WASTED, count)
        return wasted

    def _count(self, proposer: str, result: str, count: int) -> None:
        for counts in self._counts:
            counts[proposer, result] += count

    def _tell_budget(self, proposer: str, accepted: int, rejected: int) -> None:
        """Tell the budget a verdict, except about forced tokens, which it does not limit."""
        if proposer != ForcedDrafter.name:
            self._budget.verdict(proposer, accepted, rejected)

    def foresee(self, position: int, forced: tuple[int, ...], guesses: tuple[int, ...] = ()) -> None:
        """Take the tokens that the last hop says must stand at `position` and behind it by the grammar, and its own guesses."""
        self._foreseen = Foreseen(position, forced, guesses)

    def propose(self, limit: int) -> list[Flight]:
        """Return guesses for the positions after the text and the guesses in flight, below position `limit`. They are in flight
        from now on."""
        if not self._goes_on:
            return []
        if self._foreseen.position == self.end:
            self._forced.suggest(self._foreseen.forced)
            if isinstance(self._drafter, SuggestedDrafter):
                self._drafter.suggest(self._foreseen.guesses)
            self._foreseen = Foreseen(0)
        sure = self._ask(self._forced, self._room(limit))
        return sure + self._ask(self._drafter, min(self._room(limit), self._budget.count(self.in_flight)))

    def _room(self, limit: int) -> int:
        """Return how many more guesses may be in flight, all below position `limit`."""
        return min(self.most, limit - self.end) - self.in_flight

    def _ask(self, drafter: Drafter, count: int) -> list[Flight]:
        """Return at most `count` guesses of a drafter, which are in flight from now on."""
        if count <= 0:
            return []
        ids = drafter.propose([flight.id for flight in self._flying], count)[:count]
        flights = [Flight(token, drafter.name) for token in ids]
        self._flying.extend(flights)
        return flights

    def sent(self, start: int, end: int) -> None:
        """Note that the positions [start, end) leave now."""
        now_s = self._clock()
        self._sent_s.update((position + 1, now_s) for position in range(start, end))
        for position in [position for position in self._sent_s if position < end - self.most]:
            del self._sent_s[position]
