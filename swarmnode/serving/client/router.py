"""Router: the choice of peers for a session.

The live router finds routes with the directory's view and the round trips that this peer measured.

Blame: whether a peer or the request is at fault if a hop of a route failed.

A peer that is gone, or says so itself, failed itself. A peer that answers with an error may be right: perhaps the request cannot
be computed. So that peer is only left out of this session. If another peer then does the same work, the first peer was
at fault. If peers of two routes without a common suspect fail in the same way, the request is at fault and no peer is suspected.

A hop that reports a fault of another hop may lie, and so may the hops that pass the report on. Such a report is a claim that one of
several suspects is at fault. It leaves peers out of this session, in turn, and makes no peer suspected in others.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from abc import abstractmethod
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from heapq import heappop, heappush
from itertools import islice
from typing import Protocol, TypeVar

from swarmnode import tolerances
from swarmnode.codec.body import HopSpec
from swarmnode.counting import counted, layers
from swarmnode.decisions import Topic
from swarmnode.errors import ErrorCode, NoRoute, PeerRefused
from swarmnode.net.clock import Backoff
from swarmnode.net.interfaces import PeerId
from swarmnode.peer.host import Host
from swarmnode.peer.paths import ObservedLatency
from swarmnode.plan.cost import BYTES_PER_HIDDEN
from swarmnode.plan.routes import routing
from swarmnode.plan.routes.routing import SessionSize, find_route
from swarmnode.plan.view import Span, View, view_of
from swarmnode.swarm.records.announcement import EVERYBODY, Announcement, State, Trust

Route = tuple[HopSpec, ...]


class Router(Protocol):
    """Source of routes for a client's session; the live router reads the directory. Used on the event loop.

    Attributes:
        observed_latency: Measured speeds of the peers on routes, as sessions note them.
    """

    observed_latency: ObservedLatency

    @abstractmethod
    def route(self, avoid: frozenset[PeerId], retain: Sequence[HopSpec], size: SessionSize) -> Route:
        """Return the best route at this moment, without waiting.

        Args:
            avoid: Peers that must not be in the route.
            retain: Hops of an earlier route, preferred unless others are much better: their peers have caches.
            size: Positions of the session.

        Returns:
            Hops whose layers follow one another without a gap, over all layers of the router.

        Raises:
            NoRoute: Some layers have no holder outside `avoid`.
        """

    @abstractmethod
    def suspect(self, peer: PeerId, reason: str) -> None:
        """Leave a failed peer out of routes until it announces itself again, unless there is no route without it.

        Args:
            peer: The peer.
            reason: Name of the error, for the log of decisions.
        """

    def drafts(self, route: Route) -> int:
        """Return how many guesses all hops of `route` take in flight for one session; 0 if a hop takes none.

        Args:
            route: A route that this router returned.
        """
        return 0

    @abstractmethod
    async def changed(self) -> None:
        """Wait until the picture of the swarm changes, however long that takes. The caller may cancel it."""


class DirectoryRouter(Router):
    """Router for the sessions of one client. `span` is the part of the model that the swarm computes; only peers in
    `trust` take part."""

    def __init__(self, host: Host, units: int, span: Span, *, ring: bool, trust: Trust = EVERYBODY) -> None:
        self.observed_latency = host.observed_latency
        self._host = host
        manifest = host.swarm.manifest
        self._position_bytes = manifest.width * BYTES_PER_HIDDEN if manifest is not None else 0
        self._units = units
        self._span = span
        self._ring = ring
        self._trust = trust
        self._dice = random.Random(host.directory.network.peer_id)
        self._group = (lambda _peer: "") if host.access_control is None else host.access_control.group

    def route(self, avoid: frozenset[PeerId], retain: Sequence[HopSpec], size: SessionSize = SessionSize()) -> Route:
        avoid = avoid | self._host.standing.shunned
        try:
            return self._route(self._host.directory.peers(), avoid, retain, size)
        except NoRoute:
            # A peer that failed a while ago is better than no peer: a machine that was asleep is back before it
            # announces itself.
            suspects = self._host.directory.suspects()
            if not suspects:
                raise
            return self._route({**suspects, **self._host.directory.peers()}, avoid, retain, size)

    def _route(
        self,
        peers: Mapping[PeerId, Announcement],
        avoid: frozenset[PeerId],
        retain: Sequence[HopSpec],
        size: SessionSize,
    ) -> Route:
        view = view_of(
            self._units,
            self._trusted(peers.values()),
            observer=self._host.directory.network.peer_id,
            rtt_s=self._host.paths.link_statistics.rtts_s(),
            coordinate=self._host.paths.coordinate,
            unit_s=self.observed_latency.units_s(),
            weights=self._host.standing.weights(peers),
            position_bytes=self._position_bytes,
        )
        own = self._host.directory.network.peer_id
        avoid |= self._newcomers_left_out(view, avoid) - {hop.peer for hop in retain}
        known = {**self._host.directory.suspects(), **peers}
        classes = {known[hop.peer].bits for hop in retain if hop.peer in known} - {b""}
        alike = frozenset(peer.peer for peer in peers.values() if peer.bits in classes)
        try:
            route = find_route(
                view,
                units=self._span,
                client=own,
                ring=self._ring,
                avoid=avoid,
                retain=retain,
                alike=alike,
                size=size,
            )
        except NoRoute as error:
            self._record("finds no route", str(error), view, avoid)
            raise error if self._trust == EVERYBODY else NoRoute(f"among those you trust, {error}") from None
        what = "a token" if self._ring else "a pass"
        self._record("takes a route", f"{what} takes about {1000 * route.cost_s:.1f} ms on it", view, avoid, route.hops)
        return tuple(route.hops)

    def _record(
        self, what: str, result: str, view: View, avoid: frozenset[PeerId], hops: Sequence[HopSpec] = ()
    ) -> None:
        """Record a routing decision, with the facts about the peers behind it, for `swarmnode why`."""
        peers, own = {peer.peer: peer for peer in view.peers}, self._host.directory.network.peer_id
        ready = sum(peer.state is State.READY and peer.span.units > 0 for peer in view.peers)
        left_out = avoid & peers.keys()
        facts = [
            result,
            f"{counted(ready, 'machine')} ready, {len(left_out)} left out (failed, busy, new, or wrong before)",
        ]
        for hop in hops:
            peer, rtt_s = peers[hop.peer], view.rtt_s.get((own, hop.peer))
            distance = "its distance is not known" if rtt_s is None else f"{rtt_s * 1e3:.1f} ms away"
            speed = f"{peer.assumed_units_per_s:,.4g} layers/s"
            facts.append(
                f"{hop.peer[-8:]}, {layers(hop.start, hop.end)}: {speed}, {counted(peer.sessions, 'text')} now, {distance}"
            )
        self._host.decisions.record(Topic.ROUTING, what, facts, about=tuple(hop.peer for hop in hops), units=self._span)

    def _newcomers_left_out(self, view: View, avoid: frozenset[PeerId]) -> frozenset[PeerId]:
        """Return newcomers to leave out of a session: none in a share of sessions, else those that established peers
        can replace."""
        if self._dice.random() < routing.SHARE:
            return frozenset()
        trust = {peer.peer: self._host.standing.trust(peer.peer) for peer in view.peers}
        return routing.dispensable(view, trust, avoid)

    def _trusted(self, peers: Iterable[Announcement]) -> list[Announcement]:
        return [peer for peer in peers if self._trust.covers(peer, self._group(peer.peer))]

    def suspect(self, peer: PeerId, reason: str) -> None:
        self._host.directory.suspect(peer, reason)

    def drafts(self, route: Route) -> int:
        peers = {**self._host.directory.suspects(), **self._host.directory.peers()}
        announced = [0 if (peer := peers.get(hop.peer)) is None else peer.drafts for hop in route]
        return min(announced, default=0)

    async def changed(self) -> None:
        self._host.directory.hurry()
        await self._host.directory.changed(self._host.directory.revision)
        await asyncio.sleep(0)


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
        claim = _Claim(hop, code, suspects, suspects.union(route), now_s + tolerances.CLAIM_S)
        self._claims.append(claim)
        if is_arguable and any(claim.confirmed_by(one) for one in earlier):
            return Verdict.REQUEST
        arguable = sum(one.code in ARGUABLE for one in self._claims)
        lost = [one.hop.peer for one in self._claims if one.code not in ARGUABLE | MILD]
        if arguable >= tolerances.CLAIMS or len(lost) - len(set(lost)) >= tolerances.CLAIMS:
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
        pardon_s = self.pardon_s
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(changed, max(0.05, left_s if pardon_s is None else min(left_s, pardon_s + 0.01)))


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
    return tolerances.LEAVING_S if code == ErrorCode.DRAINING else retry_s
