"""Blame: whether a peer or the request is at fault if a hop of a route failed.

A peer that is gone, or says so itself, failed itself. A peer that answers with an error may be right: perhaps the request cannot
be computed. So that peer is only left out of this session. If another peer then does the same work, the first peer was
at fault. If peers of two routes without a common suspect fail in the same way, the request is at fault and no peer is suspected.

A hop that reports a fault of another hop may lie, and so may the hops that pass the report on. Such a report is a claim that one of
several suspects is at fault. It leaves peers out of this session, in turn, and makes no peer suspected in others.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from heapq import heappop, heappush
from itertools import islice
from typing import TypeVar

from swarmnode.codec.body import HopSpec
from swarmnode.errors import ErrorCode, NoRoute, PeerRefused
from swarmnode.net.deadlines import Backoff
from swarmnode.net.interfaces import PeerId

T = TypeVar("T")

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
CLAIM_S = 60.0  # how long a claim counts against a hop that makes others
MOST_CLAIMS = 4
"""Arguable claims, or repeated ones about the same peers, since the last progress after which nothing can be decided"""
MOST_TRIES, MOST_STEPS = 64, 512  # sets of suspects that are tried for one route, and that are looked at


class Verdict(Enum):
    """Conclusion that a client draws from a fault in a session: whether the peer or the request is to blame."""

    PEER = auto()  # the peer failed: suspect it in all sessions
    ELSEWHERE = auto()  # it may be the peer or the request: use another peer in this session
    REQUEST = auto()  # the request is at fault: no other peer would help
    UNDECIDED = auto()  # it fails again and again, and there are too few peers to tell which one is at fault


class HopFault(PeerRefused):
    """Fault of the hop `peer`, as `claimant` reports it: of itself, or of another hop. One of `suspects` is at fault, or the
    request."""

    def __init__(self, refused: PeerRefused, *, claimant: PeerId, suspects: Collection[PeerId]) -> None:
        says = "" if claimant == refused.peer else f", says peer {claimant}"
        super().__init__(f"{refused}{says}", code=refused.code, retry_s=refused.retry_s, peer=refused.peer)
        self.claimant = claimant
        self.suspects = frozenset(suspects)


@dataclass(frozen=True)
class _Claim:
    """Fault of `hop` for which one of `suspects` is to blame. `peers` may have made the request look wrong."""

    hop: HopSpec
    code: ErrorCode
    suspects: frozenset[PeerId]
    peers: frozenset[PeerId]
    until_s: float

    def confirmed_by(self, other: _Claim) -> bool:
        """Return whether no single peer can have made both claims true, and both are about the same work."""
        is_same = self.code == other.code and self.hop.start < other.hop.end and other.hop.start < self.hop.end
        return is_same and not self.peers & other.peers


class Blame:
    """Faults of one session. Failed peers are left out for a time that grows with each failure, until they succeed."""

    def __init__(self, clock: Callable[[], float], *, avoid_s: float) -> None:
        self._clock = clock
        self._backoff = Backoff(clock, first_s=avoid_s)
        self._claims: list[_Claim] = []  # arguable ones since the last progress, others of the last CLAIM_S

    def judge(
        self,
        hop: HopSpec,
        code: ErrorCode,
        *,
        retry_s: float = 0.0,
        suspects: Collection[PeerId] = (),
        route: Collection[PeerId] = (),
    ) -> Verdict:
        """Record that `hop` failed with `code` and return the verdict.

        Args:
            hop: The hop that is said to have failed.
            code: Code of the fault.
            retry_s: Seconds after which the peer asked to be tried again.
            suspects: Peers of which one is at fault, or the request; empty if this client itself observed the fault.
            route: Further peers that may have made the request look wrong.
        """
        is_seen, suspects = not suspects, frozenset(suspects) or frozenset({hop.peer})
        now_s, earlier, is_arguable = self._clock(), tuple(self._claims), code in ARGUABLE
        # A hop that names one neighbour after the other is in all of these claims.
        recent = [one for one in earlier if one.until_s > now_s]
        again = [one.suspects & suspects for one in recent if one.hop.peer != hop.peer]
        for peer in suspects if is_arguable else frozenset({hop.peer}).union(*again):
            self._backoff.failed(peer, at_least_s=0.0 if peer != hop.peer else _pause_s(code, retry_s))
        plain = Verdict.PEER if suspects == {hop.peer} and code not in ARGUABLE | MILD else Verdict.ELSEWHERE
        if is_seen and not is_arguable:
            return plain
        claim = _Claim(hop, code, suspects, suspects.union(route), now_s + CLAIM_S)
        self._claims.append(claim)
        if is_arguable and any(claim.confirmed_by(one) for one in earlier):
            return Verdict.REQUEST
        arguable = sum(one.code in ARGUABLE for one in self._claims)
        lost = [one.hop.peer for one in self._claims if one.code not in ARGUABLE | MILD]
        if arguable >= MOST_CLAIMS or len(lost) - len(set(lost)) >= MOST_CLAIMS:
            self._claims.clear()
            return Verdict.UNDECIDED
        return plain

    def leave_out(self, route: Sequence[HopSpec]) -> None:
        """Leave out all peers of `route` for a while: one of them is stuck, and it is unknown which."""
        for hop in route:
            self._backoff.failed(hop.peer)

    def progress(self, route: Sequence[HopSpec]) -> list[tuple[PeerId, ErrorCode]]:
        """Forgive the peers of `route`, over which an output came, and forget arguable claims.

        Returns the peers outside of `route` that alone can have been at fault, each with its error code: they failed at work that
        other peers could do.
        """
        here = {hop.peer for hop in route}
        for peer in here:
            self._backoff.succeeded(peer)
        if not self._claims:
            return []
        now_s, over = self._clock(), [one for one in self._claims if one.code in ARGUABLE]
        self._claims = [one for one in self._claims if one.code not in ARGUABLE and one.until_s > now_s]
        return [(one.hop.peer, one.code) for one in over if one.suspects == {one.hop.peer} and not one.suspects & here]

    @property
    def avoided(self) -> frozenset[PeerId]:
        """Peers that routes should avoid at this moment, because they failed lately."""
        return self._backoff.resting

    def best_route(self, find: Callable[[frozenset[PeerId]], T]) -> T:
        """Return the first route that `find` returns for a set of peers to avoid. Raises NoRoute if there is none.

        A route without any peer of the failed ones is tried first, since only such a route judges them; then one without all
        suspects; then those without the fewest suspects that explain all claims, so that suspects rest in turn.
        """
        resting = self._backoff.resting
        tried = frozenset[PeerId]().union(*(one.peers for one in self._claims if one.code in ARGUABLE))
        error: NoRoute | None = None
        for avoid in dict.fromkeys([resting, resting | tried][::-1]):
            try:
                return find(avoid)
            except NoRoute as failure:
                error = failure
        for avoid in islice(self._explanations(resting), MOST_TRIES):
            try:
                return find(avoid)
            except NoRoute:
                continue
        assert error is not None
        raise error

    def _explanations(self, resting: frozenset[PeerId]) -> Iterator[frozenset[PeerId]]:
        """Yield the resting peers with other suspects instead of those of the claims whose accused hop rests: at least one of each
        claim, the fewest first. Many liars can make claims without a common suspect, so at most MOST_STEPS sets are looked at."""
        claims = [one.suspects for one in self._claims if one.hop.peer in resting]
        named = Counter(peer for suspects in claims for peer in sorted(suspects))
        ranks = {peer: rank for rank, (peer, _) in enumerate(named.most_common())}
        sets: list[tuple[int, int, list[int], frozenset[PeerId]]] = [(0, 0, [], frozenset())]
        pushed = {frozenset[PeerId]()}
        for _ in range(MOST_STEPS):
            if not sets:
                return
            _, _, places, few = heappop(sets)
            left = [suspects for suspects in claims if not suspects & few]
            if not left:
                if few:
                    yield resting.difference(ranks).union(few)
                continue
            for peer in left[0]:
                more = few | {peer}
                if more not in pushed:
                    pushed.add(more)
                    # Claims without a common suspect need one each, so the size of a complete set is at least this.
                    least = len(more) + _disjoint([suspects for suspects in left if peer not in suspects])
                    heappush(sets, (least, -len(more), sorted([*places, ranks[peer]]), more))

    @property
    def pardon_s(self) -> float | None:
        """Seconds until the next of the avoided peers may be used again; None if no peer is avoided."""
        return min((self._backoff.pause_s(peer) for peer in self.avoided), default=None)

    async def wait(self, changed: Awaitable[None], left_s: float) -> None:
        """Wait for `changed`, at most until the next of the avoided peers may be used again, or for `left_s` seconds."""
        waiting, pardon_s = asyncio.ensure_future(changed), self.pardon_s
        try:
            await asyncio.wait(
                [waiting], timeout=max(0.01, left_s if pardon_s is None else min(left_s, pardon_s + 0.01))
            )
        finally:
            waiting.cancel()


def suspects_of(route: Sequence[HopSpec], index: int, code: ErrorCode, claimant: int | None) -> frozenset[PeerId]:
    """Return the peers of which one is at fault, if hop `claimant` of a session reports that hop `index` failed with `code`.

    Any hop up to there may have made the report if it is not known who did (None). Any hop before may have sent inputs, or an OPEN,
    that make an honest hop fail with an arguable code; a hop that fails for a reason of its own has no such excuse.
    """
    last = index + 1 if claimant is None else max(index, claimant)
    is_plain = claimant is not None and (code not in ARGUABLE or code == ErrorCode.INTERNAL)
    return frozenset(
        hop.peer for place, hop in enumerate(route[: last + 1]) if not is_plain or place in (index, claimant)
    )


def _disjoint(claims: Sequence[frozenset[PeerId]]) -> int:
    """Return the number of claims without a common suspect, taken one after another."""
    seen: set[PeerId] = set()
    count = 0
    for suspects in claims:
        if seen.isdisjoint(suspects):
            seen |= suspects
            count += 1
    return count


def _pause_s(code: ErrorCode, retry_s: float) -> float:
    return LEAVING_S if code == ErrorCode.DRAINING else retry_s
