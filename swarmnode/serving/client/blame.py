"""Blame: whether the peer or the request is at fault if a hop of a session failed.

A peer that is silent or gone failed itself. A peer that answers with an error may be right: perhaps the request cannot
be computed. So that peer is only left out of this session. If another peer then does the same work, the first peer was
at fault. If another peer fails in the same way, the request was at fault and no peer is suspected.
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
        ErrorCode.ADAPTER_REFUSED,
        ErrorCode.ADAPTER_QUOTA,
    }
)
ARGUABLE = frozenset(
    {
        ErrorCode.INTERNAL,
        ErrorCode.MALFORMED,
        ErrorCode.NOT_FINITE,
        ErrorCode.INVALID_REQUEST,
        ErrorCode.ADAPTER_EXPIRED,
        ErrorCode.ADAPTER_PRIVATE,
    }
)
LEAVING_S = 30.0  # a leaving peer does not come back soon


class Verdict(Enum):
    """Conclusion that a client draws from a fault in a session: whether the peer or the request is to blame."""

    PEER = auto()  # the peer failed: suspect it in all sessions
    ELSEWHERE = auto()  # it may be the peer or the request: use another peer in this session
    REQUEST = auto()  # the request is at fault: no other peer would help


class Blame:
    """Faults of one session. Failed peers are left out for a time that grows with each failure, until they succeed."""

    def __init__(self, clock: Callable[[], float], *, avoid_s: float) -> None:
        self._backoff = Backoff(clock, first_s=avoid_s)
        self._accused: dict[PeerId, tuple[ErrorCode, HopSpec]] = {}  # arguable faults since the last progress

    def __repr__(self) -> str:
        return f"<Blame of {len(self._accused)} peers, {self._backoff!r}>"

    def judge(self, hop: HopSpec, code: ErrorCode, *, retry_s: float = 0.0) -> Verdict:
        """Record that `hop` failed with `code` and return the verdict. `retry_s`: seconds after which the peer asked to
        be tried again.

        The verdict is REQUEST if, since the last progress, a hop with some of the same layers failed with the same
        arguable code.
        """
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
        """Leave out all peers of `route` for a while: one of them is stuck, and it is unknown which."""
        for hop in route:
            self._backoff.failed(hop.peer)

    def progress(self, route: Sequence[HopSpec]) -> list[tuple[PeerId, ErrorCode]]:
        """Forgive the peers of `route`, over which an output came, and clear the list of accused peers.

        Returns the accused peers that are not in `route`, each with its error code: they failed at work that other
        peers could do.
        """
        here = {hop.peer for hop in route}
        for peer in here:
            self._backoff.succeeded(peer)
        accused, self._accused = self._accused, {}
        return [(peer, code) for peer, (code, _) in accused.items() if peer not in here]

    @property
    def avoided(self) -> frozenset[PeerId]:
        """Peers that routes should avoid at this moment, because they failed lately."""
        return self._backoff.resting

    @property
    def pardon_s(self) -> float | None:
        """Seconds until the next of the avoided peers may be used again; None if no peer is avoided."""
        return min((self._backoff.pause_s(peer) for peer in self.avoided), default=None)


def _overlap(one: HopSpec, other: HopSpec) -> bool:
    return one.start < other.end and other.start < one.end
