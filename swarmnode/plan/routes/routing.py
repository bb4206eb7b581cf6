"""Routing: the route of least latency for a session, the peers considered for it, and the newcomers that it can do without.

`Lattice` finds the optimum. This module decides which peers may take part, weighs the caches of a running session, and
gives each peer at most one place in a route.

Lattice: least-cost routes over spans.

The model is cut into segments at the starts and ends of all spans. Changing peers anywhere else gains nothing as long
as a detour is no shorter than the direct link, since the time of a layer depends on the peer alone: the place of a
change can slide either way until it meets the end of a span. (A ring's entry counts less than its links, so a first hop of one
layer on a peer near the client may gain a per cent: not looked for.) A dynamic programme runs over the segments from the last
to the first:

    cost[k, p] = time of segment k on p + min(cost[k + 1, p],  min over q of link(p, q) + hop + cost[k + 1, q])

which is Dijkstra's result without its queue, as the segments are in order. A ring also pays the link from its last
peer to its first, which ties both ends together: first peers are tried in the order of a lower bound, and as soon as
the next bound is not below the best ring found, that one is the optimum.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from swarmnode.codec.body import HopSpec
from swarmnode.counting import counted, ranges
from swarmnode.errors import NoRoute
from swarmnode.net.interfaces import PeerId
from swarmnode.plan.routes.delays import position_times
from swarmnode.plan.spans.flow import Floats, Indexes
from swarmnode.plan.view import PeerView, Span, View, draw
from swarmnode.swarm.records.announcement import State


@dataclass(frozen=True)
class RoutingConfig:
    """Weights of a route's cost besides the measured speeds and links."""

    hop_s: float = 0.001  # framing, wake-ups and queues of one more peer
    load_weight: float = 0.2  # a peer with five sessions counts as half as fast: batching makes up for most of it
    entry_weight: float = 0.1  # a ring passes the client's link once, not once per token
    full_s: float = 0.25  # per unit: of a peer that says it has no room; it may have by now, and else answers BUSY
    replay_s: float = 0.25  # per unit: what moving its cache to another peer costs a running session
    same_bits: float = 0.98  # of the time of a peer with the same bits as one that it replaces: the text stays the same
    drafting: float = 0.8  # of a ring's time, if its first hop has the wanted draft model: it may be a quarter slower


@dataclass(frozen=True, slots=True)
class SessionSize:
    """Planned length of a session, in positions of all its rows; 0 if unknown. `proposer` is the source of guesses that its client
    wants, as in `Open`."""

    prompt_tokens: int = 0
    new_tokens: int = 0
    proposer: str = ""

    @property
    def tokens(self) -> int:
        """Positions that each cache of its route must hold."""
        return self.prompt_tokens + self.new_tokens


@dataclass(frozen=True)
class Route:
    """Hops whose spans cover the layers in order. `cost_s`: the estimated seconds of one token along them; in a running session
    `RoutingConfig.replay_s` is added for each layer that moves to another peer."""

    hops: tuple[HopSpec, ...]
    cost_s: float

    def __repr__(self) -> str:
        hops = " -> ".join(f"{hop.peer[-8:]}[{hop.start}:{hop.end})" for hop in self.hops)
        return f"<Route {hops} {self.cost_s * 1000:.2f} ms>"


@dataclass(frozen=True, slots=True)
class Candidate:
    """A peer's possible part in the route: any part of its span, or if `exact` the span as it is. `unit_s`: seconds per layer."""

    peer: PeerId
    span: Span
    unit_s: float
    exact: bool = False
    drafts: bool = False  # it has the draft model that the client wants


@dataclass(frozen=True, slots=True)
class Request:
    """Request for a route: the layers, the client, and whether the ring closes from the last hop to the first."""

    span: Span
    client: PeerId | None
    ring: bool


class Lattice:
    """All routes through the segments of the model. Index p is a candidate and k a segment; impossible routes cost infinite
    seconds."""

    def __init__(self, view: View, candidates: Sequence[Candidate], request: Request, config: RoutingConfig) -> None:
        self._candidates = candidates
        self._request = request
        self._config = config
        starts = np.array([candidate.span.start for candidate in candidates])
        ends = np.array([candidate.span.end for candidate in candidates])
        exact = np.array([candidate.exact for candidate in candidates])
        self._worth = np.array([config.drafting if candidate.drafts else 1.0 for candidate in candidates])
        unit_s = np.array([candidate.unit_s for candidate in candidates])
        self._edges = np.unique(np.concatenate([starts, ends, request.span]))
        left, right = self._edges[:-1, None], self._edges[1:, None]
        held = (starts <= left) & (ends >= right)
        self._compute = np.where(held, (right - left) * unit_s, np.inf)
        self._may_enter = ~exact | (starts == left)
        self._may_leave = ~exact | (ends == right)
        self._holders = [np.flatnonzero(row) for row in held]
        names = {name: index for index, name in enumerate(dict.fromkeys(candidate.peer for candidate in candidates))}
        seconds = position_times(view, [*names, request.client])
        index = np.array([names[candidate.peer] for candidate in candidates])
        self._link_s, self._client_s = seconds[np.ix_(index, index)], seconds[index, len(names)]
        self._same = index[:, None] == index[None, :]  # candidates of one peer
        onward = np.where(self._same, np.inf, self._link_s + config.hop_s)
        self._onward = [
            onward[np.ix_(here, there)] for here, there in zip(self._holders, self._holders[1:], strict=False)
        ]

    def best(self) -> Route | None:
        """Return the route of least cost; None if some segment has no candidate. A peer may occur twice."""
        if any(len(holders) == 0 for holders in self._holders):
            return None
        return self._best_ring() if self._request.ring else self._best_line()

    def _best_line(self) -> Route | None:
        cost, choices = self._solve(self._client_s)
        total = cost + self._client_s
        first = int(np.argmin(total))
        return self._route(first, choices, float(total[first])) if np.isfinite(total[first]) else None

    def _best_ring(self) -> Route | None:
        entry = self._client_s * self._config.entry_weight
        closing = np.where(self._same, 0.0, self._link_s)  # [last, first]
        open_cost, _ = self._solve(np.zeros(len(entry)))
        bound = self._worth * (entry + open_cost + closing[self._holders[-1]].min(axis=0))
        best: tuple[float, int, list[Indexes]] | None = None
        for first in map(int, np.argsort(bound, kind="stable")):
            if not np.isfinite(bound[first]) or (best is not None and bound[first] >= best[0]):
                break
            cost, choices = self._solve(closing[:, first])
            total = float(self._worth[first] * (entry[first] + cost[first]))
            if best is None or total < best[0]:
                best = (total, first, choices)
        return (
            None if best is None or not np.isfinite(best[0]) else self._route(best[1], choices=best[2], cost_s=best[0])
        )

    def _solve(self, exit_s: Floats) -> tuple[Floats, list[Indexes]]:
        """Return the cost from segment 0 on each candidate to the end, and for each segment the next candidate."""
        cost: Floats = self._compute[-1] + np.where(self._may_leave[-1], exit_s, np.inf)
        choices: list[Indexes] = []
        for k in range(len(self._holders) - 2, -1, -1):
            here, there = self._holders[k], self._holders[k + 1]
            enter = np.where(self._may_enter[k + 1], cost, np.inf)[there]
            through = self._onward[k] + enter
            change = np.argmin(through, axis=1)
            change_s = np.where(self._may_leave[k][here], through[np.arange(len(here)), change], np.inf)
            stays = cost[here] <= change_s
            choice = np.arange(len(cost))
            choice[here] = np.where(stays, here, there[change])
            onward = np.full(len(cost), np.inf)
            onward[here] = np.where(stays, cost[here], change_s)
            cost = self._compute[k] + onward
            choices.append(choice)
        return cost, choices[::-1]

    def _route(self, first: int, choices: list[Indexes], cost_s: float) -> Route:
        """Return the route that follows `choices` from the candidate `first`. Adjoining segments on one peer become one hop."""
        path = [first]
        for choice in choices:
            path.append(int(choice[path[-1]]))
        hops: list[HopSpec] = []
        start = 0
        for k, here in enumerate(path):
            if k + 1 == len(path) or path[k + 1] != here:
                hops.append(HopSpec(self._candidates[here].peer, int(self._edges[start]), int(self._edges[k + 1])))
                start = k + 1
        return Route(tuple(hops), cost_s)


MAX_SPLITS = 4  # depth of the search that gives one place to a peer with two
SHARE = 0.25  # of sessions, that newcomers may take part in
ESTABLISHED = 0.1  # least trust of a peer that is no newcomer
CONSIDERED = 48


def shortlist(
    view: View, client: PeerId | None, span: Span, retain: frozenset[PeerId] = frozenset(), considered: int = CONSIDERED
) -> View:
    """Return the view with about `considered` peers, drawn at random by the client's id, and those in `retain`.

    More are drawn until each layer of `span` has two ready holders. A view of at most four times `considered` peers is
    returned unchanged.
    """
    if len(view.peers) <= 4 * considered:
        return view
    chance = random.Random(str(client))
    drawn: list[PeerView] = [peer for peer in view.peers if peer.peer in retain] if retain else []
    while len(drawn) < len(view.peers):
        drawn += chance.sample(view.peers, min(considered, len(view.peers)))
        chosen = tuple({peer.peer: peer for peer in drawn}.values())
        held = [0] * span.end
        for peer in chosen:
            if peer.state is State.READY:
                for unit in range(peer.span.start, min(peer.span.end, span.end)):
                    held[unit] += 1
        if min(held[span.start :], default=2) >= 2:
            return replace(view, peers=chosen)
        considered *= 2
    return view


def dispensable(view: View, trust: Mapping[PeerId, float], avoid: Collection[PeerId] = ()) -> frozenset[PeerId]:
    """Return the newcomers that a route can do without: peers of little `trust` whose layers all have an established holder.

    Holders in `avoid`, and holders that are not ready, do not count.
    """
    established = [
        peer
        for peer in view.peers
        if trust.get(peer.peer, 0.0) >= ESTABLISHED and peer.state is State.READY and peer.peer not in avoid
    ]
    held = {unit for peer in established for unit in range(*peer.span)}
    newcomers = (peer for peer in view.peers if trust.get(peer.peer, 0.0) < ESTABLISHED)
    return frozenset(peer.peer for peer in newcomers if held.issuperset(range(*peer.span)))


def find_route(
    view: View,
    *,
    units: Span | None = None,
    client: PeerId | None = None,
    ring: bool = True,
    avoid: Collection[PeerId] = (),
    retain: Sequence[HopSpec] = (),
    alike: Collection[PeerId] = (),
    size: SessionSize = SessionSize(),
    config: RoutingConfig = RoutingConfig(),
) -> Route:
    """Find the route of least estimated latency through ready peers: the hops, each a peer with its layers, that cover `units`.

    A slower route without two hops of one public address group is preferred, if a short search finds one.

    Args:
        view: Snapshot of all peers and links. The same arguments always give the same route.
        units: Layers to cover; None means the whole model.
        client: Id of the peer that asks; None if it is unknown.
        ring: Whether each token goes from the last hop to the first one, instead of through the client.
        avoid: Peers to leave out.
        retain: Hops of a running session. Leaving one of them costs the time of computing its KV cache again.
        alike: Peers of the classes of equal bits of these hops, which are preferred for their places if they are about as fast.
        size: Planned positions of the session. A long prompt gives weight to the peers' prefill speed; a peer without room for
            the session in its KV caches gets a penalty.
        config: Weights of the cost.

    Raises:
        NoRoute: Some layer has no ready holder outside `avoid`. The text names the layers.
    """
    request = Request(units or Span(0, view.units), client, ring)
    candidates = _candidates(view, request, avoid, retain, alike, size, config)
    _check_covered(view, candidates, request.span, avoid)
    route = _spread(view, candidates, request, config, MAX_SPLITS)
    assert route is not None, "covered units always have a route"
    return route


def _candidates(
    view: View,
    request: Request,
    avoid: Collection[PeerId],
    retain: Sequence[HopSpec],
    alike: Collection[PeerId],
    size: SessionSize,
    config: RoutingConfig,
) -> list[Candidate]:
    """Return all possible hops (peers with layers) of a route, in an order drawn by the client, so that ties do not send all
    clients to the same peer."""
    ready = {peer.peer: peer for peer in view.peers if peer.state is State.READY and peer.peer not in avoid}
    drafting = {name for name, peer in ready.items() if peer.has_drafts(size.proposer)}
    retained = [
        Candidate(
            hop.peer, Span(hop.start, hop.end), _unit_s(ready[hop.peer], size, config), True, hop.peer in drafting
        )
        for hop in retain
        if hop.peer in ready and _within(Span(hop.start, hop.end), ready[hop.peer].span)
    ]
    replay_s = config.replay_s if retained else 0.0
    fresh = [
        Candidate(
            peer.peer,
            peer.span,
            _unit_s(peer, size, config) * (config.same_bits if peer.peer in alike else 1.0)
            + replay_s
            + (0.0 if peer.has_room(size.tokens) else config.full_s),
            drafts=peer.peer in drafting,
        )
        for peer in ready.values()
    ]
    clipped = [clip for candidate in [*retained, *fresh] if (clip := _clip(candidate, request.span))]
    return sorted(clipped, key=lambda candidate: (not candidate.exact, draw(request.client, candidate.peer)))


def _unit_s(peer: PeerView, size: SessionSize, config: RoutingConfig) -> float:
    """Return the seconds per layer that `peer` takes for one new token and the token's share of the prompt. More sessions count
    as slower."""
    prompt_share = size.prompt_tokens / max(1, size.new_tokens)
    unit_s = 1 / peer.assumed_units_per_s + prompt_share / peer.assumed_prefill_units_per_s
    return (1 + config.load_weight * peer.sessions) * unit_s


def _within(inner: Span, outer: Span) -> bool:
    return outer.start <= inner.start < inner.end <= outer.end


def _clip(candidate: Candidate, span: Span) -> Candidate | None:
    """Return the candidate cut to `span`; None if nothing is left, or if the candidate is exact and would be cut."""
    start, end = max(candidate.span.start, span.start), min(candidate.span.end, span.end)
    if start >= end or (candidate.exact and Span(start, end) != candidate.span):
        return None
    return replace(candidate, span=Span(start, end))


def _check_covered(view: View, candidates: Sequence[Candidate], span: Span, avoid: Collection[PeerId]) -> None:
    """Raise NoRoute if no candidate has some layer of `span`: with layers that no machine has, else with those left out."""
    held = {unit for candidate in candidates for unit in range(*candidate.span)}
    missing = [unit for unit in range(*span) if unit not in held]
    if not missing:
        return
    left_out = [
        peer
        for peer in view.peers
        if peer.peer in avoid and peer.state is State.READY and not set(missing).isdisjoint(range(*peer.span))
    ]
    nowhere = [unit for unit in missing if not any(unit in range(*peer.span) for peer in left_out)]
    if nowhere:
        raise NoRoute(f"no machine has {_ranges(nowhere)} of the model's {view.units}; more machines must join")
    machines = counted(len(left_out), "machine")
    layers = f"{_ranges(missing)} of the model's {view.units}"
    raise NoRoute(f"no machine with {layers} can be used: {machines} failed, could not be reached or had no room")


def _ranges(units: Sequence[int]) -> str:
    """Runs of units in words: `layer 3`, `layers 3-5, 8`."""
    return f"layer{'s' if len(units) > 1 else ''} {', '.join(ranges(units))}"


def _spread(
    view: View, candidates: Sequence[Candidate], request: Request, config: RoutingConfig, splits: int
) -> Route | None:
    """Return the best route without two hops of one public address group, as all peers of a group may belong to one stranger.

    If none is found within `splits` levels of search, returns the best route regardless of groups; None without any route.
    """
    route = _without_repeats(view, candidates, request, config, MAX_SPLITS) if candidates else None
    group = None if route is None else _shared_group(view, route.hops)
    if route is None or group is None or splits == 0:
        return route
    members = {peer.peer for peer in view.peers if peer.group == group}
    one_of_them = (
        [candidate for candidate in candidates if candidate.peer == hop.peer or candidate.peer not in members]
        for hop in route.hops
        if hop.peer in members
    )
    routes = (_spread(view, choice, request, config, splits - 1) for choice in one_of_them)
    spread = [found for found in routes if found is not None and _shared_group(view, found.hops) is None]
    return min(spread, key=lambda found: found.cost_s, default=route)


def _shared_group(view: View, hops: Sequence[HopSpec]) -> str | None:
    """Return the first address group with several hops; None if there is none."""
    groups = {peer.peer: peer.group for peer in view.peers}
    counts = Counter(groups[hop.peer] for hop in hops if groups[hop.peer])
    return next((group for group, count in counts.items() if count > 1), None)


def _without_repeats(
    view: View, candidates: Sequence[Candidate], request: Request, config: RoutingConfig, splits: int
) -> Route | None:
    """Return the best route that gives each peer at most one place; None without any route.

    The plain optimum may use a peer twice, before and after a faster peer. Then three cases are tried: the peer keeps to the
    part before its second place, to the part after its first, or gets everything in between. After `splits` levels it
    just gets everything in between.
    """
    route = Lattice(view, candidates, request, config).best()
    repeated = None if route is None else _repeated(route.hops)
    if route is None or repeated is None:
        return route
    if splits == 0:
        return _merge_repeats(view, candidates, request, config, route.hops)
    one, other = repeated
    before, between = Span(request.span.start, other.start), Span(one.end, other.start)
    after = Span(one.end, request.span.end)
    choices = [_restricted(candidates, one.peer, before), _restricted(candidates, one.peer, after)]
    rest: list[Candidate] = []
    for candidate in candidates:
        if candidate.peer == one.peer:
            rest.append(candidate)
            continue
        sides = (
            Span(candidate.span.start, min(candidate.span.end, between.start)),
            Span(max(candidate.span.start, between.end), candidate.span.end),
        )
        pieces = (_clip(candidate, side) for side in sides if side.start < side.end)
        rest.extend(piece for piece in pieces if piece is not None)
    choices.append(rest)
    routes = [_without_repeats(view, choice, request, config, splits - 1) for choice in choices]
    return min((found for found in routes if found is not None), key=lambda found: found.cost_s)


def _restricted(candidates: Sequence[Candidate], peer: PeerId, place: Span) -> list[Candidate]:
    """Return the candidates with those of `peer` cut to the layers in `place`."""
    clipped = [candidate if candidate.peer != peer else _clip(candidate, place) for candidate in candidates]
    return [candidate for candidate in clipped if candidate is not None]


def _repeated(hops: Sequence[HopSpec]) -> tuple[HopSpec, HopSpec] | None:
    """Return the first two hops of a repeated peer; None if no peer repeats."""
    for index, hop in enumerate(hops):
        again = next((other for other in hops[index + 1 :] if other.peer == hop.peer), None)
        if again is not None:
            return hop, again
    return None


def _merge_repeats(
    view: View, candidates: Sequence[Candidate], request: Request, config: RoutingConfig, hops: Sequence[HopSpec]
) -> Route:
    """Return the route with all layers between a peer's two places given to that peer, whose span is contiguous."""
    while repeated := _repeated(hops):
        first, last = repeated
        before = [hop for hop in hops if hop.end <= first.start]
        after = [hop for hop in hops if hop.start >= last.end]
        hops = [*before, HopSpec(first.peer, first.start, last.end), *after]
    exact = [_exact(hop, candidates) for hop in hops]
    route = Lattice(view, exact, request, config).best()
    assert route is not None, "these hops join"
    return route


def _exact(hop: HopSpec, candidates: Sequence[Candidate]) -> Candidate:
    """Return `hop` as an exact candidate, with the cheapest time per layer of the candidates that can be it."""
    span = Span(hop.start, hop.end)
    able = [c for c in candidates if c.peer == hop.peer and _clip(c, span) is not None]
    return replace(min(able, key=lambda candidate: candidate.unit_s), span=span, exact=True)
