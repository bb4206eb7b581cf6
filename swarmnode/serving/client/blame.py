"""Blame: whose fault it is that a hop of a session failed.

Who is silent or gone failed by itself. Who answers with an error may be right: the request itself may be what cannot be
computed. So the peer is only left out; where another one then does the same work it was that peer, and where another one
fails in the same way it was the request, and no peer is suspected for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum, auto

from swarmnode.codec.body import HopSpec
from swarmnode.errors import ErrorCode
from swarmnode.net.deadlines import Backoff
from swarmnode.net.interfaces import PeerId

MILD = frozenset(
    {
        ErrorCode.BUSY,
        ErrorCode.DRAINING,
        ErrorCode.WRONG_SPAN,
        ErrorCode.TOO_LARGE,
        ErrorCode.NO_SESSION,
        ErrorCode.STALE,
        ErrorCode.NOT_FOUND,  # an adapter that the peer could not fetch
    }
)
ARGUABLE = frozenset({ErrorCode.INTERNAL, ErrorCode.MALFORMED, ErrorCode.NOT_FINITE, ErrorCode.INVALID_REQUEST})
LEAVING_S = 30.0  # who leaves does not come back soon


class Verdict(Enum):
    """What to do about a fault."""

    PEER = auto()  # the peer failed: nobody should count on it
    ELSEWHERE = auto()  # it may be the peer or not: take another one for this session
    REQUEST = auto()  # it is the request: no other peer would help


class Blame:
    """Of one session. Peers that failed are left out for a time that grows, and that their success forgives."""

    def __init__(self, clock: Callable[[], float], *, avoid_s: float) -> None:
        self._backoff = Backoff(clock, first_s=avoid_s)
        self._accused: dict[PeerId, tuple[ErrorCode, HopSpec]] = {}  # since the last progress

    def __repr__(self) -> str:
        return f"<Blame of {len(self._accused)} peers, {self._backoff!r}>"

    def judge(self, hop: HopSpec, code: ErrorCode, *, retry_s: float = 0.0) -> Verdict:
        """A hop failed with this code. `retry_s`: when it asked to be tried again."""
        self._backoff.failed(hop.peer, at_least_s=LEAVING_S if code == ErrorCode.DRAINING else retry_s)
        if code not in MILD | ARGUABLE:
            return Verdict.PEER
        if code in ARGUABLE:
            follows = any(code == known and _overlap(hop, other) for known, other in self._accused.values())
            self._accused[hop.peer] = (code, hop)
            if follows:
                return Verdict.REQUEST
        return Verdict.ELSEWHERE

    def leave_out(self, route: Sequence[HopSpec]) -> None:
        """One of them stands still, and none says which: others are taken for a while, where there are any."""
        for hop in route:
            self._backoff.failed(hop.peer)

    def progress(self, route: Sequence[HopSpec]) -> list[tuple[PeerId, ErrorCode]]:
        """An output came over this route: who could not bring it forth, and said an error instead."""
        here = {hop.peer for hop in route}
        for peer in here:
            self._backoff.succeeded(peer)
        accused, self._accused = self._accused, {}
        return [(peer, code) for peer, (code, _) in accused.items() if peer not in here]

    @property
    def avoided(self) -> frozenset[PeerId]:
        """Who is left out now."""
        return self._backoff.resting

    @property
    def pardon_s(self) -> float | None:
        """Seconds until the next of them may be asked again; None where nobody is left out."""
        return min((self._backoff.pause_s(peer) for peer in self.avoided), default=None)


def _overlap(one: HopSpec, other: HopSpec) -> bool:
    return one.start < other.end and other.start < one.end
