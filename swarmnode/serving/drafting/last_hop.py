"""Guesses of one session at its last hop: the token ids, which come from the first hop, and inputs that wait for them.

Results of guesses that were taken back while they were computed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from msgspec.structs import replace

from swarmnode.codec.body import MAX_DRAFTS
from swarmnode.codec.messages import Drafts, ProposerKind
from swarmnode.compute.serving.sampling import Guess
from swarmnode.serving.job import Job, drop_from


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

    def hear(self, start: int, drafts: Drafts) -> None:
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


class TakenBack:
    """Cuts of a session's guesses, each a turn and a position: results of earlier turns do not count behind the position."""

    def __init__(self) -> None:
        self._cuts: deque[tuple[int, int]] = deque()  # (turn, position), both rising

    def note(self, turn: int, position: int) -> None:
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
