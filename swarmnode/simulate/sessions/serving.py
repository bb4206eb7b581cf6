"""Simulated serving: sessions that arrive, find routes, generate, and move to other peers when one is lost."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial

from swarmnode.codec.body import HopSpec
from swarmnode.errors import NoRoute, UsageError
from swarmnode.net.interfaces import PeerId
from swarmnode.plan.routes.routing import Route, find_route, shortlist
from swarmnode.plan.view import Span
from swarmnode.simulate.environment.peers import Peer
from swarmnode.simulate.environment.world import World
from swarmnode.simulate.sessions.session import FluidSession, RingSession, Session, SimulatedExecutor, SimulatedHop
from swarmnode.simulate.settings import EXACT_PEERS, ServeSettings

RETRY_S = 2.0  # delay that a full peer tells its clients; see ServerConfig
MAX_DEFAULT_ARRIVALS_PER_S = 2.0  # for a large swarm; half its load could be a thousand sessions a second
DEFAULT_LOAD = 0.5  # share of the throughput that the placement has without batching


class Pathfinder:
    """Route search of the simulated clients, with exact round-trip times, which live clients estimate by network coordinates."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._rtt_s: dict[tuple[PeerId, PeerId], float] = {}
        self._revision = -1

    def route(self, client: PeerId, place: int, avoid: Collection[PeerId], keep: Sequence[HopSpec]) -> Route:
        """Find a route for `client`, whose index in the links is `place`, without the peers in `avoid` and with the hops in
        `keep`. Raises NoRoute if there is none."""
        return self._world.measures.timed("route", lambda: self._route(client, place, avoid, keep))

    def _route(self, client: PeerId, place: int, avoid: Collection[PeerId], keep: Sequence[HopSpec]) -> Route:
        world = self._world
        picture = world.directory.view()
        view = shortlist(picture, client, Span(0, picture.units), frozenset(hop.peer for hop in keep))
        indexes = {peer.peer: world.by_id[peer.peer].index for peer in view.peers if peer.peer in world.by_id}
        between = self._kept(indexes) if view is picture else self._between(indexes)
        own = {(client, peer): 2 * world.links.delay_s(place, index) for peer, index in indexes.items()}
        seen = replace(view, rtt_s={**between, **own})
        return find_route(seen, client=client, avoid=avoid, keep=keep, config=world.settings.routing)

    def _kept(self, indexes: Mapping[PeerId, int]) -> dict[tuple[PeerId, PeerId], float]:
        """Return the round-trip times between all pairs, computed anew when the directory's revision has changed."""
        if self._revision != self._world.directory.revision:
            self._revision = self._world.directory.revision
            self._rtt_s = self._between(indexes)
        return self._rtt_s

    def _between(self, indexes: Mapping[PeerId, int]) -> dict[tuple[PeerId, PeerId], float]:
        delay_s, peers = self._world.links.delay_s, sorted(indexes.items())
        return {
            (one, other): 2 * delay_s(here, there)
            for number, (one, here) in enumerate(peers)
            for other, there in peers[:number]
        }


class Serving:
    """Workload of a swarm that serves. Clients stand at places of the scenario, drawn uniformly."""

    def __init__(self, world: World, settings: ServeSettings, chance: random.Random) -> None:
        self.world = world
        self.clock = world.clock
        self.settings = settings
        self.arrivals_per_s = settings.arrivals_per_s
        self._chance = chance
        self._pathfinder = Pathfinder(world)
        self._workers: dict[PeerId, SimulatedExecutor] = {}
        self._sessions: dict[PeerId, dict[Session, None]] = defaultdict(dict)  # by arrival
        self._numbers = 0
        self._kind: type[Session] = RingSession if len(world.peers) <= EXACT_PEERS else FluidSession

    def begin(self) -> None:
        """Begin the sessions of `clients` clients, or else random arrivals. Raises UsageError if the peers cannot serve the
        model."""
        for _ in range(self.settings.clients):
            self._begin_session()
        if self.settings.clients:
            return
        if not self.arrivals_per_s:
            half = DEFAULT_LOAD * self.world.throughput() / self.settings.new_tokens
            self.arrivals_per_s = half if self._kind is RingSession else min(half, MAX_DEFAULT_ARRIVALS_PER_S)
        if not self.arrivals_per_s:
            raise UsageError("the devices together cannot hold the model: use more or larger devices")
        self.clock.after(self._chance.expovariate(self.arrivals_per_s), self._arrive)

    @property
    def has_learnt(self) -> bool:
        """False: weights do not change while a swarm serves."""
        return False

    def gauges(self) -> dict[str, float]:
        """Return the number of running sessions for the curves."""
        running = {session for sessions in self._sessions.values() for session in sessions}
        return {"sessions running": len(running)}

    # -- peers

    def ready(self, peer: Peer) -> None:
        """Give `peer` a worker, so that it can serve sessions."""
        self._workers[peer.peer] = SimulatedExecutor(self.clock, peer, self.world.model)

    def leaving(self, peer: Peer) -> None:
        """Move the sessions of `peer` to other peers now; the peer still answers meanwhile."""
        self._move_all(peer, 0.0)

    def lost(self, peer: Peer) -> None:
        """Stop the worker of `peer`, count the lost work, and move its sessions `detect_s` seconds later."""
        worker = self._workers.pop(peer.peer, None)
        if worker is not None:
            worker.stop()
        for session in self._sessions.get(peer.peer, {}):
            units = sum(hop.span.units for hop in session.hops if hop.name == peer.peer)
            self.world.measures.count("lost, unit tokens", session.positions * units)
        self._move_all(peer, self.world.settings.detect_s)

    def _move_all(self, peer: Peer, after_s: float) -> None:
        for session in list(self._sessions.get(peer.peer, {})):
            self._release(session)
            session.stop()
            self.clock.after(after_s, partial(self._open, session, session.epoch, {peer.peer}))

    # -- sessions

    def _arrive(self) -> None:
        self.clock.after(self._chance.expovariate(self.arrivals_per_s), self._arrive)
        self._begin_session()

    def _begin_session(self) -> None:
        settings, chance = self.settings, self._chance
        place = len(self.world.peers) + chance.randrange(self.world.links.sites)
        lengths = [
            max(1, round(tokens * chance.uniform(1 - settings.spread, 1 + settings.spread)))
            for tokens in (settings.prompt_tokens, settings.new_tokens)
        ]
        session = self._kind(self, self._numbers, place, *lengths)
        self._numbers += 1
        self.world.measures.count("sessions begun", 1)
        self._open(session, session.epoch, set())

    def _open(self, session: Session, epoch: int, avoid: Collection[PeerId]) -> None:
        """Find a route with room at every hop and start the session on it; if there is none try again later."""
        if session.epoch != epoch:
            return
        keep = [hop.spec() for hop in session.hops if hop.lives and hop.name not in avoid] if session.produced else []
        try:
            hops = self._hops(session, avoid, keep)
        except NoRoute:
            self._wait(session, epoch)
            return
        full = {hop.name for hop in hops if not self._has_room(hop, session)}
        if full:
            self.world.measures.count("busy answers", len(full))
            self.clock.after(RETRY_S, lambda: self._open(session, epoch, {*avoid, *full}))
            return
        for hop in hops:
            hop.peer.sessions += 1
            hop.peer.cache_free_bytes -= self._cache_bytes(hop, session)
            self.world.load_changed(hop.peer)
            self._sessions[hop.name][session] = None
        session.go(hops)

    def _hops(self, session: Session, avoid: Collection[PeerId], keep: Sequence[HopSpec]) -> list[SimulatedHop]:
        """Return the hops of a route, without peers that are in the directory but already gone, as a client finds out at its
        first attempt. Raises NoRoute if there is none."""
        avoid = set(avoid)
        while True:
            route = self._pathfinder.route(session.client, session.place, avoid, keep)
            gone = {hop.peer for hop in route.hops if not self._serves(hop.peer, Span(hop.start, hop.end))}
            if not gone:
                break
            avoid |= gone
            keep = [hop for hop in keep if hop.peer not in gone]
        peers = [(self.world.by_id[hop.peer], Span(hop.start, hop.end)) for hop in route.hops]
        model = self.world.model
        return [
            SimulatedHop(peer, peer.peer, self._workers[peer.peer], span, peer.life, peer.device.layers(model, span))
            for peer, span in peers
        ]

    def _serves(self, peer: PeerId, span: Span) -> bool:
        known = self.world.by_id.get(peer)
        return known is not None and known.serves and known.span.start <= span.start and span.end <= known.span.end

    def _wait(self, session: Session, epoch: int) -> None:
        self.world.measures.count("waits for a route", 1)
        if session.waits_since_s is None:
            session.waits_since_s = self.clock.now_s
        if self.clock.now_s - session.waits_since_s > self.world.settings.client.patience_s:
            self.world.measures.count("sessions failed", 1)
        else:
            self.clock.after(RETRY_S, lambda: self._open(session, epoch, ()))

    def finish(self, session: Session) -> None:
        """End `session` after its last token; a fixed number of clients begins the next session at once."""
        self._release(session)
        session.stop()
        self.world.measures.count("sessions done", 1)
        self.world.measures.note("session, s", self.clock.now_s - session.began_s)
        if self.settings.clients:
            self._begin_session()

    def _release(self, session: Session) -> None:
        for hop in session.hops:
            held = self._sessions.get(hop.name, {})
            if session in held:
                del held[session]
                if hop.lives:
                    hop.peer.sessions -= 1
                    hop.peer.cache_free_bytes += self._cache_bytes(hop, session)
                    self.world.load_changed(hop.peer)

    def _has_room(self, hop: SimulatedHop, session: Session) -> bool:
        return hop.peer.cache_free_bytes >= self._cache_bytes(hop, session)

    def _cache_bytes(self, hop: SimulatedHop, session: Session) -> float:
        return session.tokens * sum(self.world.model.cache_bytes[hop.span.start : hop.span.end])
