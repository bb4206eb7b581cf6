"""Strikes and failed attempts: which peers failed lately and rest, and what fails at every stage that could do it."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Sequence

from swarmnode.errors import ErrorCode
from swarmnode.net.deadlines import Backoff
from swarmnode.net.interfaces import PeerId

OUT = 3  # in a row: whoever can be done without is left out
ATTEMPTS = 6  # of a stage, with pauses between them that double: 15 s in all
ALL_REDUCE, ANY = -1, -2  # in the place of a microbatch's number
LASTING = frozenset({ErrorCode.INTERNAL, ErrorCode.MALFORMED, ErrorCode.TOO_LARGE, ErrorCode.INVALID_REQUEST})


"""Reasons that a stage gives for itself. Others are of a moment: a peer is lost, busy or at another step."""


class FailedAttempts:
    """Attempts of one step that failed for a lasting reason, by microbatch and stage, and the trainers that told of them.

    ANY counts those of a stage since it last did its part, so that a stage that fails everything is found as soon as one that fails
    a certain microbatch.
    """

    def __init__(self) -> None:
        self._by_stage: defaultdict[int, Counter[PeerId]] = defaultdict(Counter)
        self._told_by: defaultdict[int, set[PeerId]] = defaultdict(set)
        self.code = 0  # of the last one

    def __repr__(self) -> str:
        return f"<FailedAttempts at {dict(self._by_stage)}>"

    @property
    def peers(self) -> set[PeerId]:
        """Stages at which something failed."""
        return {peer for by_stage in self._by_stage.values() for peer in by_stage}

    def note(self, number: int, peer: PeerId, code: int, trainer: PeerId | None = None) -> None:
        """Count an attempt at a microbatch, or the all-reduce, that failed at `peer`. `trainer` told of it; None: the stage did."""
        if code not in LASTING and code in ErrorCode._value2member_map_:
            return
        self.code = code
        for key in (number,) if trainer is None else (number, ANY):
            self._by_stage[key][peer] += 1
            if trainer is not None:
                self._told_by[key].add(trainer)

    def forget(self, number: int, peers: Collection[PeerId]) -> None:
        """Forget the failures of a microbatch that these stages have done."""
        self._by_stage.pop(number, None)
        self._told_by.pop(number, None)
        for peer in peers:
            self._by_stage[ANY].pop(peer, None)

    def hopeless_unit(self, holders: Sequence[Collection[PeerId]], trainers: Collection[PeerId]) -> int | None:
        """Return the first unit whose `holders` have all failed at the same ATTEMPTS times; None if there is none.

        One trainer's word is not enough: each of `trainers` must have told of such failures.
        """
        for number, by_stage in self._by_stage.items():
            if number != ALL_REDUCE and not self._told_by[number].issuperset(trainers):
                continue
            for unit, peers in enumerate(holders):
                if peers and all(by_stage[peer] >= ATTEMPTS for peer in peers):
                    return unit
        return None


class Strikes:
    """Kept over a coordinator's terms. `clock` in seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._backoff = Backoff(clock)
        self._in_a_row: Counter[PeerId] = Counter()
        self._banned: dict[PeerId, None] = {}

    def __repr__(self) -> str:
        return f"<Strikes {dict(self._in_a_row)}>"

    def strike(self, peer: PeerId) -> int:
        """It failed. What fails while it is left alone for a failure before is the same one. How often in a row now."""
        if not self.rests(peer):
            self._backoff.failed(peer)
            self._in_a_row[peer] += 1
        return self._in_a_row[peer]

    def ban(self, peer: PeerId) -> None:
        """It is asked nothing any more."""
        self._banned[peer] = None

    @property
    def banned(self) -> tuple[PeerId, ...]:
        """In the order in which they were found."""
        return tuple(self._banned)

    def forgive(self, peer: PeerId) -> None:
        """It did what was asked."""
        self._backoff.succeeded(peer)
        self._in_a_row.pop(peer, None)

    def in_a_row(self, peer: PeerId) -> int:
        """How often it has failed since it last did what was asked."""
        return self._in_a_row[peer]

    def rests(self, peer: PeerId) -> bool:
        """Whether it is left alone now."""
        return self.pause_s(peer) > 0

    def pause_s(self, peer: PeerId) -> float:
        """For how many seconds more; infinitely many where it is banned."""
        return math.inf if peer in self._banned else self._backoff.pause_s(peer)
