"""Simulated serving: sessions that arrive, find routes, generate, and move to other peers when one is lost.

Simulated session: its lengths, its progress and the hops of its route; in small swarms it is followed token by token.

Simulated worker of a peer: one pass at a time, in the order of the nodes' scheduler (`plan/serving/scheduler.py`).

Session of a large swarm, followed as a whole: tokens flow at a rate that depends on the load of its peers.

The rate is computed anew every few seconds. A turn of the ring takes the links' delays plus the passes of all hops,
each in a batch with simultaneous sessions of that hop. It takes at least the time that the busiest hop needs for all its sessions
together.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from swarmnode.codec.body import HopSpec
from swarmnode.compute.serving.cohort import LONGEST_SHARED
from swarmnode.config import ServerConfig
from swarmnode.errors import NoRoute, UsageError
from swarmnode.net.interfaces import PeerId
from swarmnode.plan.routes.routing import Route, find_route, shortlist
from swarmnode.plan.serving.scheduler import PassScheduler
from swarmnode.plan.view import Span
from swarmnode.plan.virtual_clock import VirtualClock
from swarmnode.simulate.environment.model import WEIGHT_BYTES, Model
from swarmnode.simulate.environment.peers import Peer
from swarmnode.simulate.environment.world import World
from swarmnode.simulate.settings import EXACT_PEERS, ServeSettings


@dataclass(slots=True)
class SimulatedJob:
    """Job of a worker: `tokens` positions of `session` through `span`. `stages_after` hops follow; `done` is called at the end."""

    session: int
    span: Span
    tokens: int
    done: Callable[[], None]
    stages_after: int = 0


class SimulatedExecutor:
    """Simulated worker of a peer: it computes the waiting jobs of sessions in passes, from the peer's start until it stops."""

    def __init__(self, clock: VirtualClock, peer: Peer, model: Model) -> None:
        self._clock = clock
        self._peer = peer
        self._model = model
        self._scheduler = PassScheduler(longest_step=LONGEST_SHARED, longest_chunk=ServerConfig.longest_chunk_tokens)
        self._waiting: dict[int, deque[SimulatedJob]] = {}  # by session
        self._busy = False
        self._stopped = False

    def submit(self, job: SimulatedJob) -> None:
        """Queue `job`; its `done` is called when all its positions have passed, unless the worker is stopped before."""
        self._waiting.setdefault(job.session, deque()).append(job)
        self._scheduler.add(job.session, job.tokens, stages_after=job.stages_after)
        if not self._busy:
            self._next()

    def stop(self) -> None:
        """Drop all jobs; their `done` is never called."""
        self._stopped = True

    def _next(self) -> None:
        counts = self._scheduler.next()
        if not counts:
            return
        self._scheduler.took(counts)
        device, together = self._peer.device, dict[Span, list[int]]()
        for session, count in counts.items():
            together.setdefault(self._waiting[session][0].span, []).append(count)
        takes_s = sum(
            device.decode_s(layers, len(group)) if max(group) == 1 else device.prompt_s(layers, sum(group))
            for layers, group in ((device.layers(self._model, span), group) for span, group in together.items())
        )
        self._busy = True
        self._peer.busy_s += takes_s
        self._clock.after(takes_s, lambda: self._finish(counts, takes_s))

    def _finish(self, counts: dict[int, int], took_s: float) -> None:
        if self._stopped:
            return
        self._scheduler.ran(len(counts) * max(counts.values()), took_s)
        for session, count in counts.items():
            self._advance(session, count)  # jobs submitted meanwhile are computed together
        self._busy = False
        self._next()

    def _advance(self, session: int, count: int) -> None:
        jobs = self._waiting[session]
        while count and jobs:
            job = jobs[0]
            passed = min(count, job.tokens)
            job.tokens -= passed
            count -= passed
            if not job.tokens:
                jobs.popleft()
                job.done()
        if not jobs:
            self._waiting.pop(session, None)


ID_BYTES = 8
FRAME_BYTES = 64  # bytes of a message besides its tensor


@dataclass(frozen=True, slots=True)
class SimulatedHop:
    """Hop of a simulated route: a peer, until it vanishes or moves, and the layers that it computes."""

    peer: Peer
    name: PeerId  # id of the peer in this life
    worker: SimulatedExecutor
    span: Span
    life: int
    layers: float  # work of one token, in layers

    @property
    def lives(self) -> bool:
        """Whether the peer is still in the same life, so that it answers and has its caches."""
        return self.peer.life == self.life

    def spec(self) -> HopSpec:
        """Return the hop in the form that route search uses."""
        return HopSpec(self.name, self.span.start, self.span.end)


class Session(ABC):
    """Session of one client. `place` is the client's index in the links; `produced` of `new_tokens` tokens have been generated."""

    def __init__(self, owner: Serving, number: int, place: int, prompt_tokens: int, new_tokens: int) -> None:
        self.number = number
        self.place = place
        self.prompt_tokens = prompt_tokens
        self.new_tokens = new_tokens
        self.produced = 0
        self.hops: list[SimulatedHop] = []
        self.epoch = 0
        self.began_s = owner.clock.now_s
        self.waits_since_s: float | None = None
        self._owner = owner
        self._world = owner.world
        self._clock = owner.clock
        self._links = owner.world.links

    @property
    def client(self) -> PeerId:
        """Id of the simulated client, for choosing a route."""
        return f"client {self.number}"

    @property
    def positions(self) -> int:
        """Number of positions in the caches of the hops; 0 before the first token."""
        return self.prompt_tokens + self.produced - 1 if self.produced else 0

    @property
    def tokens(self) -> int:
        """Number of positions reserved in the caches."""
        return self.prompt_tokens + self.new_tokens

    def go(self, hops: Sequence[SimulatedHop]) -> None:
        """Begin or resume along `hops`. Hops of the former route that still live keep their caches."""
        kept = {hop for hop in self.hops if hop.lives}
        self.hops = list(hops)
        self.epoch += 1
        self.waits_since_s = None
        if self.produced:
            self._resume(kept)
        else:
            self._begin()

    def stop(self) -> None:
        """Cancel all pending actions of the session."""
        self.epoch += 1

    @abstractmethod
    def _begin(self) -> None:
        """Send the prompt into the route, when the session starts."""

    @abstractmethod
    def _resume(self, retained: set[SimulatedHop]) -> None:
        """Fill the caches of the hops that are not in `retained`, and continue."""

    def _guard(self, action: Callable[[], None]) -> Callable[[], None]:
        """Return a function that calls `action` unless the session was stopped or took another route meanwhile."""
        epoch = self.epoch
        return lambda: action() if self.epoch == epoch else None


class RingSession(Session):
    """Simulated session, followed token by token around the peers of its route."""

    _token_at_s = 0.0

    def _begin(self) -> None:
        size = self._world.settings.client.prompt_chunk_tokens
        for start in range(0, self.prompt_tokens, size):
            tokens = min(size, self.prompt_tokens - start)
            self._send(self.place, 0, tokens, ID_BYTES, last=start + tokens == self.prompt_tokens)

    def _send(self, sender: int, index: int, tokens: int, token_bytes: int, *, last: bool) -> None:
        """Send `tokens` positions from peer `sender` to hop `index` of the route, which computes them on arrival."""
        hop, size_bytes = self.hops[index], FRAME_BYTES + tokens * token_bytes
        arrives_s = self._links.send(self._clock.now_s, sender, hop.peer.index, size_bytes)
        self._clock.at(arrives_s, self._guard(lambda: self._compute(index, tokens, last)))

    def _compute(self, index: int, tokens: int, last: bool) -> None:
        hop = self.hops[index]
        if hop.lives:  # a message to a dead peer is lost; the client will notice
            done = self._guard(lambda: self._pass_on(index, tokens, last))
            hop.worker.submit(SimulatedJob(self.number, hop.span, tokens, done, len(self.hops) - 1 - index))

    def _pass_on(self, index: int, tokens: int, last: bool) -> None:
        if index + 1 < len(self.hops):
            hidden_bytes = WEIGHT_BYTES * self._world.model.hidden
            self._send(self.hops[index].peer.index, index + 1, tokens, hidden_bytes, last=last)
        elif last:
            # The token goes to the client, and to the first hop as its next input.
            end, now_s = self.hops[-1].peer.index, self._clock.now_s
            self.produced += 1
            arrives_s = self._links.send(now_s, end, self.place, FRAME_BYTES + ID_BYTES)
            measures = self._world.measures
            measures.count("tokens", 1)
            if self.produced == 1:
                measures.record("first token, s", arrives_s - self.began_s)
            else:
                measures.record("between tokens, s", arrives_s - self._token_at_s)
            self._token_at_s = arrives_s
            if self.produced == self.new_tokens:
                self._owner.finish(self)
            else:
                self._send(end, 0, 1, ID_BYTES, last=True)

    # -- after a hop was lost

    def _resume(self, kept: set[SimulatedHop]) -> None:
        self._replay(0, kept)

    def _replay(self, index: int, retained: set[SimulatedHop]) -> None:
        """Fill the caches of the hops from `index` on that are not in `retained`, one after another, then continue to generate."""
        while index < len(self.hops) and self.hops[index] in retained:
            index += 1
        if index == len(self.hops):
            self._send(self.hops[-1].peer.index, 0, 1, ID_BYTES, last=True)
            return
        hop, model = self.hops[index], self._world.model
        sender = self.hops[index - 1].peer.index if index else self.place
        token_bytes = WEIGHT_BYTES * model.hidden if index else ID_BYTES
        arrives_s = self._links.send(
            self._clock.now_s, sender, hop.peer.index, FRAME_BYTES + self.positions * token_bytes
        )
        self._world.measures.count("replayed, unit tokens", self.positions * hop.span.units)

        def compute() -> None:
            if hop.lives:
                done = self._guard(lambda: self._replay(index + 1, retained))
                hop.worker.submit(SimulatedJob(self.number, hop.span, max(2, self.positions), done))

        self._clock.at(arrives_s, self._guard(compute))


BREATH_S = 5.0  # between two computations of the rate


class FluidSession(Session):
    """Session that is followed as a whole. `produced` counts whole tokens; the fraction of a token is carried over."""

    _rest = 0.0

    def _begin(self) -> None:
        first_s = self._prompt_s(self.hops, self.prompt_tokens) + self._turn_s(alone=True)

        def begin() -> None:
            self.produced = 1
            self._world.measures.count("tokens", 1)
            self._world.measures.record("first token, s", self._clock.now_s - self.began_s)
            self._breathe()

        self._clock.after(first_s, self._guard(begin))

    def _resume(self, retained: set[SimulatedHop]) -> None:
        fresh = [hop for hop in self.hops if hop not in retained]
        for hop in fresh:
            self._world.measures.count("replayed, unit tokens", self.positions * hop.span.units)
        self._clock.after(self._prompt_s(fresh, self.positions), self._guard(self._breathe))

    def _breathe(self) -> None:
        """Let tokens flow for at most `BREATH_S` seconds at the current rate, then finish or compute the rate anew."""
        turn_s = self._turn_s()
        left_s = (self.new_tokens - self.produced - self._rest) * turn_s
        flow_s = min(BREATH_S, max(0.0, left_s))

        def flow() -> None:
            done = self._rest + flow_s / turn_s
            tokens = self.new_tokens - self.produced if flow_s == left_s else int(done)
            self._rest = done - tokens
            self.produced += tokens
            self._world.measures.count("tokens", tokens)
            self._world.measures.record("between tokens, s", turn_s)
            token_bytes = FRAME_BYTES + WEIGHT_BYTES * self._world.model.hidden
            for here, there in zip(self.hops, [*self.hops[1:], self.hops[0]], strict=True):
                size_bytes = token_bytes if there is not self.hops[0] else FRAME_BYTES + ID_BYTES
                self._links.bytes_sent[here.peer.index, there.peer.index] += tokens * size_bytes
            for hop in self.hops:
                batch = self._batch(hop, turn_s)
                hop.peer.busy_s += tokens * hop.peer.device.decode_s(hop.layers, round(batch)) / batch
            if self.produced >= self.new_tokens:
                self._owner.finish(self)
            else:
                self._breathe()

        self._clock.after(flow_s, self._guard(flow))

    def _turn_s(self, *, alone: bool = False) -> float:
        """Return the seconds of one token around the ring; `alone`: without the load of other sessions."""
        path_s = sum(
            self._links.delay_s(here.peer.index, there.peer.index)
            for here, there in zip(self.hops, [*self.hops[1:], self.hops[0]], strict=True)
            if here is not there
        )
        once_s = path_s + sum(hop.peer.device.decode_s(hop.layers, 1) for hop in self.hops)
        if alone:
            return once_s
        turn_s = path_s
        busiest_s = 0.0
        for hop in self.hops:
            batch = self._batch(hop, once_s)
            pass_s = hop.peer.device.decode_s(hop.layers, round(batch))
            turn_s += pass_s * (1 + min(1.0, batch - 1) / 2)  # waits for half of another session's pass
            busiest_s = max(busiest_s, hop.peer.device.decode_s(hop.layers, hop.peer.sessions))
        return max(turn_s, busiest_s)

    def _batch(self, hop: SimulatedHop, turn_s: float) -> float:
        """Return the average number of sessions in a batch of `hop`, this session included; at least 1."""
        share = min(1.0, hop.peer.device.decode_s(hop.layers, 1) / turn_s)
        return 1 + (hop.peer.sessions - 1) * share if hop.peer.sessions > 1 else 1.0

    def _prompt_s(self, hops: list[SimulatedHop], tokens: int) -> float:
        """Return the seconds of `tokens` positions through `hops`, in chunks, so that after the first chunk only the slowest
        hop counts. Adds the hops' busy time."""
        chunk = min(tokens, self._world.settings.client.prompt_chunk_tokens)
        sender, slowest_s, total_s = self.place, 0.0, 0.0
        for hop in hops:
            receiver = hop.peer.index
            size_bits = 8 * chunk * WEIGHT_BYTES * self._world.model.hidden
            travel_s = size_bits / self._links.bandwidth_bps(sender, receiver) if sender != self.place else 0.0
            compute_s = hop.peer.device.prompt_s(hop.layers, chunk)
            slowest_s = max(slowest_s, travel_s, compute_s)
            total_s += travel_s + compute_s + self._links.delay_s(sender, receiver)
            hop.peer.busy_s += hop.peer.device.prompt_s(hop.layers, tokens)
            sender = receiver
        return total_s + (tokens / chunk - 1) * slowest_s if chunk else 0.0


RETRY_S = 2.0  # delay that a full peer tells its clients; see ServerConfig
MAX_DEFAULT_ARRIVALS_PER_S = 2.0  # for a large swarm; half its load could be a thousand sessions a second
DEFAULT_LOAD = 0.5  # share of the throughput that the placement has without batching


class Pathfinder:
    """Route search of the simulated clients, with exact round-trip times, which live clients estimate by network coordinates."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._rtt_s: dict[tuple[PeerId, PeerId], float] = {}
        self._revision = -1

    def route(self, client: PeerId, place: int, avoid: Collection[PeerId], retain: Sequence[HopSpec]) -> Route:
        """Find a route for `client`, whose index in the links is `place`, without the peers in `avoid` and with the hops in
        `retain`. Raises NoRoute if there is none."""
        world = self._world
        picture = world.directory.view()
        view = shortlist(picture, client, Span(0, picture.units), frozenset(hop.peer for hop in retain))
        indexes = {peer.peer: world.by_id[peer.peer].index for peer in view.peers if peer.peer in world.by_id}
        if view is not picture:
            between = self._between(indexes)
        else:
            if self._revision != world.directory.revision:
                self._revision, self._rtt_s = world.directory.revision, self._between(indexes)
            between = self._rtt_s
        own = {(client, peer): 2 * world.links.delay_s(place, index) for peer, index in indexes.items()}
        seen = replace(view, rtt_s={**between, **own})
        return find_route(seen, client=client, avoid=avoid, retain=retain, config=world.settings.routing)

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
            self.world.measures.count("waits for a route", 1)
            if session.waits_since_s is None:
                session.waits_since_s = self.clock.now_s
            if self.clock.now_s - session.waits_since_s > self.world.settings.client.patience_s:
                self.world.measures.count("sessions failed", 1)
            else:
                self.clock.after(RETRY_S, lambda: self._open(session, epoch, ()))
            return
        full = {hop.name for hop in hops if hop.peer.cache_free_bytes < self._cache_bytes(hop, session)}
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

    def _hops(self, session: Session, avoid: Collection[PeerId], retain: Sequence[HopSpec]) -> list[SimulatedHop]:
        """Return the hops of a route, without peers that are in the directory but already gone, as a client finds out at its
        first attempt. Raises NoRoute if there is none."""
        avoid = set(avoid)
        while True:
            find = partial(self._pathfinder.route, session.client, session.place, avoid, retain)
            route = self.world.measures.timed("route", find)
            gone = {hop.peer for hop in route.hops if not self._serves(hop.peer, Span(hop.start, hop.end))}
            if not gone:
                break
            avoid |= gone
            retain = [hop for hop in retain if hop.peer not in gone]
        peers = [(self.world.by_id[hop.peer], Span(hop.start, hop.end)) for hop in route.hops]
        model = self.world.model
        return [
            SimulatedHop(peer, peer.peer, self._workers[peer.peer], span, peer.life, peer.device.layers(model, span))
            for peer, span in peers
        ]

    def _serves(self, peer: PeerId, span: Span) -> bool:
        known = self.world.by_id.get(peer)
        return known is not None and known.serves and known.span.start <= span.start and span.end <= known.span.end

    def finish(self, session: Session) -> None:
        """End `session` after its last token; a fixed number of clients begins the next session at once."""
        self._release(session)
        session.stop()
        self.world.measures.count("sessions done", 1)
        self.world.measures.record("session, s", self.clock.now_s - session.began_s)
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

    def _cache_bytes(self, hop: SimulatedHop, session: Session) -> float:
        return session.tokens * sum(self.world.model.cache_bytes[hop.span.start : hop.span.end])
