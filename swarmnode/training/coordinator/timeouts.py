"""Answer times: how long a coordinator waits for each kind of answer, from the time that earlier answers took.

PeerFailures and failed attempts: the peers that failed lately and are left alone for a while, and work that fails at every stage.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Sequence

from swarmnode.codec.frames import FrameKind
from swarmnode.errors import ErrorCode
from swarmnode.net.deadlines import Backoff, Deadline, Expectation
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
        self._reporters: defaultdict[int, set[PeerId]] = defaultdict(set)
        self.code = 0  # of the latest failure

    @property
    def peers(self) -> set[PeerId]:
        """Peers whose stages have failed attempts at work."""
        return {peer for by_stage in self._by_stage.values() for peer in by_stage}

    def record(self, number: int, peer: PeerId, code: int, trainer: PeerId | None = None) -> None:
        """Count a failed attempt of `peer` at microbatch `number`, or at the all-reduce (ALL_REDUCE). Ignores temporary reasons.
        `trainer` reported it; None if the stage did."""
        if code not in LASTING and code in ErrorCode._value2member_map_:
            return
        self.code = code
        for key in (number,) if trainer is None else (number, ANY):
            self._by_stage[key][peer] += 1
            if trainer is not None:
                self._reporters[key].add(trainer)

    def forget(self, number: int, peers: Collection[PeerId]) -> None:
        """Forget the failures of microbatch `number`, and those of `peers`, whose stages have now computed it."""
        self._by_stage.pop(number, None)
        self._reporters.pop(number, None)
        for peer in peers:
            self._by_stage[ANY].pop(peer, None)

    def hopeless_unit(self, holders: Sequence[Collection[PeerId]], trainers: Collection[PeerId]) -> int | None:
        """Return the first layer whose `holders` have all failed ATTEMPTS times at the same work; None if there is none. The word
        of one trainer is not enough: each of `trainers` must have reported such failures. Failures of the all-reduce need none."""
        for number, by_stage in self._by_stage.items():
            if number != ALL_REDUCE and not self._reporters[number].issuperset(trainers):
                continue
            for unit, peers in enumerate(holders):
                if peers and all(by_stage[peer] >= ATTEMPTS for peer in peers):
                    return unit
        return None


class PeerFailures:
    """Consecutive failures and pauses of peers, kept over a coordinator's terms. `clock` returns seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._backoff = Backoff(clock)
        self._in_a_row: Counter[PeerId] = Counter()
        self._banned: dict[PeerId, None] = {}

    def record(self, peer: PeerId) -> int:
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


SILENCE_S = 5.0  # without a word of a coordinator, which sends one each second
STALLED_S = 60.0  # without any work, while there are trainers and every unit has a holder
SAVE_S = 120.0  # for a step of gigabytes to be written to a slow disk
CLEANUP = 2.0  # times a lease's deadline, after which a hop forgets the lease by itself: its coordinator is gone, too
STATES = Deadline(floor_s=10.0, ceiling_s=600.0)  # gigabytes are loaded or written
ROUND = Deadline(floor_s=5.0, ceiling_s=900.0)
RULES = {
    FrameKind.BEGIN: (30.0, STATES),
    FrameKind.RESTORE: (30.0, STATES),
    FrameKind.COMMIT: (30.0, Deadline(floor_s=5.0, ceiling_s=600.0)),
    FrameKind.REDUCE: (15.0, ROUND),
    FrameKind.LEASE: (15.0, ROUND),
}
"""Expected seconds while nothing is measured, and the deadline rule, by kind of command."""

ANSWER = (5.0, Deadline(floor_s=3.0, ceiling_s=300.0))  # any other command: it is done after the pass under way


class AnswerTimes:
    """Times of the answers of one peer, or (for all-reduces and leases) of all peers together."""

    def __init__(self) -> None:
        self._durations: defaultdict[FrameKind, Expectation] = defaultdict(Expectation)
        self._stretch: defaultdict[FrameKind, float] = defaultdict(lambda: 1.0)

    def record(self, kind: FrameKind, seconds: float) -> None:
        """Record that an answer of this kind took `seconds`. Ends the stretching of its deadline."""
        self._durations[kind].record(seconds)
        self._stretch[kind] = 1.0

    def stretch(self, kind: FrameKind) -> None:
        """Double the next deadlines of this kind after an answer that was late without anyone's fault, so that slow work is
        done, too."""
        self._stretch[kind] *= 2

    def wait_s(self, kind: FrameKind, *, rtt_s: float = 0.0, work_s: float = 0.0) -> float:
        """Return the seconds to wait for an answer. `work_s` is known computing time before the answer."""
        unmeasured_s, rule = RULES.get(kind, ANSWER)
        taken_s = self._durations[kind].bound
        usual_s = unmeasured_s if taken_s is None else taken_s
        return rule.wait_s(rtt_s=rtt_s, work_s=max(usual_s, work_s)) * self._stretch[kind]
