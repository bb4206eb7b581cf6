"""Strikes and failed attempts: the peers that failed lately and are left alone for a while, and work that fails at every stage."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Sequence

from swarmnode.errors import ErrorCode
from swarmnode.net.deadlines import Backoff
from swarmnode.net.interfaces import PeerId

OUT = 3  # failures in a row: a peer that can be spared is left out
ATTEMPTS = 6  # of a stage, with pauses between them that double: 15 s in all
ALL_REDUCE, ANY = -1, -2  # in place of a microbatch's number
LASTING = frozenset(
    {ErrorCode.INTERNAL, ErrorCode.MALFORMED, ErrorCode.TOO_LARGE, ErrorCode.INVALID_REQUEST, ErrorCode.NOT_FINITE}
)
"""Lasting reasons, which a stage gives for itself. Others are temporary: a peer is lost, busy or at another step."""


class FailedAttempts:
    """Attempts of one step that failed for a lasting reason, by microbatch and stage, and the trainers that reported them.

    ANY counts all failures of a stage since its last success, so that a stage that fails everything is found no later than
    a stage that fails a certain microbatch.
    """

    def __init__(self) -> None:
        self._by_stage: defaultdict[int, Counter[PeerId]] = defaultdict(Counter)
        self._told_by: defaultdict[int, set[PeerId]] = defaultdict(set)
        self.code = 0  # of the latest failure

    def __repr__(self) -> str:
        return f"<FailedAttempts at {dict(self._by_stage)}>"

    @property
    def peers(self) -> set[PeerId]:
        """Peers whose stages have failed attempts at work."""
        return {peer for by_stage in self._by_stage.values() for peer in by_stage}

    def note(self, number: int, peer: PeerId, code: int, trainer: PeerId | None = None) -> None:
        """Count a failed attempt of `peer` at microbatch `number`, or at the all-reduce (ALL_REDUCE). Ignores temporary reasons.
        `trainer` reported it; None if the stage did."""
        if code not in LASTING and code in ErrorCode._value2member_map_:
            return
        self.code = code
        for key in (number,) if trainer is None else (number, ANY):
            self._by_stage[key][peer] += 1
            if trainer is not None:
                self._told_by[key].add(trainer)

    def forget(self, number: int, peers: Collection[PeerId]) -> None:
        """Forget the failures of microbatch `number`, and those of `peers`, whose stages have now computed it."""
        self._by_stage.pop(number, None)
        self._told_by.pop(number, None)
        for peer in peers:
            self._by_stage[ANY].pop(peer, None)

    def hopeless_unit(self, holders: Sequence[Collection[PeerId]], trainers: Collection[PeerId]) -> int | None:
        """Return the first layer whose `holders` have all failed ATTEMPTS times at the same work; None if there is none. The word
        of one trainer is not enough: each of `trainers` must have reported such failures. Failures of the all-reduce need none."""
        for number, by_stage in self._by_stage.items():
            if number != ALL_REDUCE and not self._told_by[number].issuperset(trainers):
                continue
            for unit, peers in enumerate(holders):
                if peers and all(by_stage[peer] >= ATTEMPTS for peer in peers):
                    return unit
        return None


class Strikes:
    """Consecutive failures and pauses of peers, kept over a coordinator's terms. `clock` returns seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._backoff = Backoff(clock)
        self._in_a_row: Counter[PeerId] = Counter()
        self._banned: dict[PeerId, None] = {}

    def __repr__(self) -> str:
        return f"<Strikes {dict(self._in_a_row)}>"

    def strike(self, peer: PeerId) -> int:
        """Record a failure of `peer` and return its number of consecutive failures. Failures during the pause after an
        earlier one do not count again."""
        if not self.rests(peer):
            self._backoff.failed(peer)
            self._in_a_row[peer] += 1
        return self._in_a_row[peer]

    def ban(self, peer: PeerId) -> None:
        """Exclude `peer` from this training for good."""
        self._banned[peer] = None

    @property
    def banned(self) -> tuple[PeerId, ...]:
        """The banned peers, in the order of their bans."""
        return tuple(self._banned)

    def forgive(self, peer: PeerId) -> None:
        """Record a success of `peer`: its failures and its back-off end."""
        self._backoff.succeeded(peer)
        self._in_a_row.pop(peer, None)

    def in_a_row(self, peer: PeerId) -> int:
        """Return the number of failures of `peer` since its last success."""
        return self._in_a_row[peer]

    def rests(self, peer: PeerId) -> bool:
        """Return whether `peer` is banned or in a pause after a failure."""
        return self.pause_s(peer) > 0

    def pause_s(self, peer: PeerId) -> float:
        """Return the seconds until `peer` may be asked again; 0 if it may be now, infinite if it is banned."""
        return math.inf if peer in self._banned else self._backoff.pause_s(peer)
