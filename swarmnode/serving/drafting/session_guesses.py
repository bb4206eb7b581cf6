"""Guesses of a session: at its first hop, which sends them with the text, and at its last hop, which judges them."""

from __future__ import annotations

from array import array
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from msgspec.structs import replace

from swarmnode.codec.body import MAX_DRAFTS
from swarmnode.codec.messages import Drafts, ProposerKind
from swarmnode.compute.serving.sampler import Guess
from swarmnode.measuring.meters import ACCEPTED, WASTED
from swarmnode.serving.drafting.drafter import DraftBudget, Drafter, ForcedDrafter, LiveDrafter, SuggestedDrafter
from swarmnode.serving.job import Job, drop_from


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

    def record_token(self, position: int) -> None:
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


class GuessedJobs:
    """Inputs of a session on their way to the device. One with guesses waits until their token ids are known, and goes on with
    them by `submit`.

    The ids come straight from the first hop, and nearly always before the input. Without them nothing can be drawn.
    """

    def __init__(self, submit: Callable[[Job], None]) -> None:
        self._submit = submit
        self._turn = 0
        self._guesses: dict[int, Guess] = {}  # of the turn, by position
        self._waiting: deque[Job] = deque()

    def accept(self, start: int, drafts: Drafts) -> None:
        """Take the ids of the guesses from position `start` on. Ids of an older turn are ignored; of more than MAX_DRAFTS
        positions only the latest are kept."""
        if drafts.turn < self._turn:
            return
        if drafts.turn > self._turn:
            self._turn, self._guesses = drafts.turn, {}
        proposers = drafts.proposers or (ProposerKind.OTHER,) * len(drafts.ids)
        for position, (token, proposer) in enumerate(zip(drafts.ids, proposers, strict=True), start):
            self._guesses[position] = Guess(position, token, ProposerKind.numbered(proposer))
        for position in sorted(self._guesses)[:-MAX_DRAFTS]:
            del self._guesses[position]
        self._go_on()

    def put(self, job: Job) -> None:
        """Submit a job after those that wait."""
        if job.cut_to is not None:
            self.drop_from(job.cut_to)
        self._waiting.append(job)
        self._go_on()

    def drop_from(self, position: int) -> None:
        """Drop what waits from `position` on: its guesses were taken back."""
        drop_from(self._waiting, position)
        self._go_on()

    def _go_on(self) -> None:
        while self._waiting and (guesses := self._guesses_of(self._waiting[0])) is not None:
            self._submit(replace(self._waiting.popleft(), guesses=guesses))

    def _guesses_of(self, job: Job) -> tuple[Guess, ...] | None:
        """Return the guesses among the job's positions; None if some are not known yet, or their turn is over."""
        positions = range(job.first_guessed, job.end)
        if not positions:
            return ()
        if job.turn != self._turn or not all(position in self._guesses for position in positions):
            return None
        return tuple(self._guesses[position] for position in positions)


class Retractions:
    """Cuts of a session's guesses, each a turn and a position: results of earlier turns do not count behind the position."""

    def __init__(self) -> None:
        self._cuts: deque[tuple[int, int]] = deque()  # (turn, position), both rising

    def record(self, turn: int, position: int) -> None:
        """Note that inputs of turns before `turn` do not count from `position` on."""
        while self._cuts and self._cuts[-1][1] >= position:
            self._cuts.pop()
        self._cuts.append((turn, position))

    def limit(self, turn: int) -> int | None:
        """Return the end of the positions that count in a result of `turn`; None if all count. Results come in the order of
        their turns."""
        while self._cuts and self._cuts[0][0] <= turn:
            self._cuts.popleft()
        return self._cuts[0][1] if self._cuts else None
