"""Routing: the route of least latency for a session, the peers considered for it, and the newcomers that it can do without.

`Lattice` finds the optimum. This module decides which peers may take part, weighs the caches of a running session, and
gives each peer at most one place in a route.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from swarmnode.codec.body import HopSpec
from swarmnode.counting import counted, ranges
from swarmnode.errors import NoRoute
from swarmnode.net.interfaces import PeerId
from swarmnode.plan.routes.lattice import Candidate, Lattice, Request, Route, RoutingConfig, SessionSize
from swarmnode.plan.view import PeerView, Span, View, draw
from swarmnode.swarm.records.announcement import State

MAX_SPLITS = 4  # depth of the search that gives one place to a peer with two
SHARE = 0.25  # of sessions, that newcomers may take part in
ESTABLISHED = 0.1  # least trust of a peer that is no newcomer
CONSIDERED = 48


def shortlist(
    view: View, client: PeerId | None, span: Span, keep: frozenset[PeerId] = frozenset(), considered: int = CONSIDERED
) -> View:
    """Return the view with about `considered` peers, drawn at random by the client's id, and those in `keep`.

    More are drawn until each layer of `span` has two ready holders. A view of at most four times `considered` peers is
    returned unchanged.
    """
    if len(view.peers) <= 4 * considered:
        return view
    chance = random.Random(str(client))
    drawn: list[PeerView] = [peer for peer in view.peers if peer.peer in keep] if keep else []
    while len(drawn) < len(view.peers):
        drawn += chance.sample(view.peers, min(considered, len(view.peers)))
        chosen = tuple({peer.peer: peer for peer in drawn}.values())
        if _cover(chosen, span):
            return replace(view, peers=chosen)
        considered *= 2
    return view


def _cover(peers: tuple[PeerView, ...], span: Span) -> bool:
    """Return whether each layer of the span has at least two ready holders."""
    held = [0] * span.end
    for peer in peers:
        if peer.state is State.READY:
            for unit in range(peer.span.start, min(peer.span.end, span.end)):
                held[unit] += 1
    return min(held[span.start :], default=2) >= 2


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
    keep: Sequence[HopSpec] = (),
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
        keep: Hops of a running session. Leaving one of them costs the time of computing its KV cache again.
        size: Planned positions of the session. A long prompt gives weight to the peers' prefill speed; a peer without room for
            the session in its KV caches gets a penalty.
        config: Weights of the cost.

    Raises:
        NoRoute: Some layer has no ready holder outside `avoid`. The text names the layers.
    """
    request = Request(units or Span(0, view.units), client, ring)
    candidates = _candidates(view, request, avoid, keep, size, config)
    _check_covered(view, candidates, request.span, avoid)
    route = _spread(view, candidates, request, config, MAX_SPLITS)
    assert route is not None, "covered units always have a route"
    return route


def _candidates(
    view: View,
    request: Request,
    avoid: Collection[PeerId],
    keep: Sequence[HopSpec],
    size: SessionSize,
    config: RoutingConfig,
) -> list[Candidate]:
    """Return all possible hops (peers with layers) of a route, in an order drawn by the client, so that ties do not send all
    clients to the same peer."""
    ready = {peer.peer: peer for peer in view.peers if peer.state is State.READY and peer.peer not in avoid}
    drafting = {name for name, peer in ready.items() if peer.has_drafts(size.proposer)}
    kept = [
        Candidate(
            hop.peer, Span(hop.start, hop.end), _unit_s(ready[hop.peer], size, config), True, hop.peer in drafting
        )
        for hop in keep
        if hop.peer in ready and _within(Span(hop.start, hop.end), ready[hop.peer].span)
    ]
    replay_s = config.replay_s if kept else 0.0
    fresh = [
        Candidate(
            peer.peer,
            peer.span,
            _unit_s(peer, size, config) + replay_s + _full_s(peer, size, config),
            drafts=peer.peer in drafting,
        )
        for peer in ready.values()
    ]
    clipped = [clip for candidate in [*kept, *fresh] if (clip := _clip(candidate, request.span))]
    return sorted(clipped, key=lambda candidate: (not candidate.exact, draw(request.client, candidate.peer)))


def _unit_s(peer: PeerView, size: SessionSize, config: RoutingConfig) -> float:
    """Return the seconds per layer that `peer` takes for one new token and the token's share of the prompt. More sessions count
    as slower."""
    prompt_share = size.prompt_tokens / max(1, size.new_tokens)
    unit_s = 1 / peer.assumed_units_per_s + prompt_share / peer.assumed_prefill_units_per_s
    return (1 + config.load_weight * peer.sessions) * unit_s


def _full_s(peer: PeerView, size: SessionSize, config: RoutingConfig) -> float:
    """Return the penalty per layer of a full peer, else 0. Full peers stay in: their announcement may be some seconds old."""
    return 0.0 if peer.has_room(size.tokens) else config.full_s


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
    choices.append(_reserved(candidates, one.peer, between))
    routes = [_without_repeats(view, choice, request, config, splits - 1) for choice in choices]
    return min((found for found in routes if found is not None), key=lambda found: found.cost_s)


def _restricted(candidates: Sequence[Candidate], peer: PeerId, place: Span) -> list[Candidate]:
    """Return the candidates with those of `peer` cut to the layers in `place`."""
    clipped = [candidate if candidate.peer != peer else _clip(candidate, place) for candidate in candidates]
    return [candidate for candidate in clipped if candidate is not None]


def _reserved(candidates: Sequence[Candidate], peer: PeerId, place: Span) -> list[Candidate]:
    """Return the candidates such that only `peer` may compute the layers in `place`."""
    rest: list[Candidate] = []
    for candidate in candidates:
        if candidate.peer == peer:
            rest.append(candidate)
            continue
        sides = (
            Span(candidate.span.start, min(candidate.span.end, place.start)),
            Span(max(candidate.span.start, place.end), candidate.span.end),
        )
        pieces = (_clip(candidate, side) for side in sides if side.start < side.end)
        rest.extend(piece for piece in pieces if piece is not None)
    return rest


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
