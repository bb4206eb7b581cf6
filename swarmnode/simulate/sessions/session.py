"""Simulated session: its lengths, its progress and the hops of its route; in small swarms it is followed token by token.

Simulated worker of a peer: one pass at a time, in the order of the nodes' scheduler (`plan/serving/scheduler.py`).

Session of a large swarm, followed as a whole: tokens flow at a rate that depends on the load of its peers.

The rate is computed anew every few seconds. A turn of the ring takes the links' delays plus the passes of all hops,
each in a batch with simultaneous sessions of that hop. It takes at least the time that the busiest hop needs for all its sessions
together.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from swarmnode.codec.body import HopSpec
from swarmnode.compute.serving.cohort import LONGEST_SHARED
from swarmnode.config import ServerConfig
from swarmnode.net.interfaces import PeerId
from swarmnode.plan.serving.scheduler import PassScheduler
from swarmnode.plan.view import Span
from swarmnode.plan.virtual_clock import VirtualClock
from swarmnode.simulate.environment.model import WEIGHT_BYTES, Model
from swarmnode.simulate.environment.peers import Peer
from swarmnode.simulate.environment.world import World


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
        takes_s = self._pass_s(counts)
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

    def _pass_s(self, counts: dict[int, int]) -> float:
        """Return the seconds of a pass with `counts` positions by session. Sessions over the same layers are computed together."""
        device, together = self._peer.device, dict[Span, list[int]]()
        for session, count in counts.items():
            together.setdefault(self._waiting[session][0].span, []).append(count)
        return sum(
            device.decode_s(layers, len(group)) if max(group) == 1 else device.prompt_s(layers, sum(group))
            for layers, group in ((device.layers(self._model, span), group) for span, group in together.items())
        )


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


class SessionOwner(Protocol):
    """Interface of the workload that a session belongs to (`serving.py`)."""

    world: World
    clock: VirtualClock

    def finish(self, session: Session) -> None:
        """End `session`, whose last token has been generated."""


class Session(ABC):
    """Session of one client. `place` is the client's index in the links; `produced` of `new_tokens` tokens have been generated."""

    def __init__(self, owner: SessionOwner, number: int, place: int, prompt_tokens: int, new_tokens: int) -> None:
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
    def _resume(self, kept: set[SimulatedHop]) -> None:
        """Fill the caches of the hops that are not in `kept`, and continue."""

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
            self._emit()

    def _emit(self) -> None:
        """Send the token that the last hop has sampled to the client, and to the first hop as its next input."""
        end, now_s = self.hops[-1].peer.index, self._clock.now_s
        self.produced += 1
        arrives_s = self._links.send(now_s, end, self.place, FRAME_BYTES + ID_BYTES)
        self._note_token(arrives_s)
        if self.produced == self.new_tokens:
            self._owner.finish(self)
        else:
            self._send(end, 0, 1, ID_BYTES, last=True)

    def _note_token(self, arrives_s: float) -> None:
        measures = self._world.measures
        measures.count("tokens", 1)
        if self.produced == 1:
            measures.note("first token, s", arrives_s - self.began_s)
        else:
            measures.note("between tokens, s", arrives_s - self._token_at_s)
        self._token_at_s = arrives_s

    # -- after a hop was lost

    def _resume(self, kept: set[SimulatedHop]) -> None:
        self._replay(0, kept)

    def _replay(self, index: int, kept: set[SimulatedHop]) -> None:
        """Fill the caches of the hops from `index` on that are not in `kept`, one after another, then continue to generate."""
        while index < len(self.hops) and self.hops[index] in kept:
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
                done = self._guard(lambda: self._replay(index + 1, kept))
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
            self._world.measures.note("first token, s", self._clock.now_s - self.began_s)
            self._breathe()

        self._clock.after(first_s, self._guard(begin))

    def _resume(self, kept: set[SimulatedHop]) -> None:
        fresh = [hop for hop in self.hops if hop not in kept]
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
            self._note(tokens, turn_s)
            if self.produced >= self.new_tokens:
                self._owner.finish(self)
            else:
                self._breathe()

        self._clock.after(flow_s, self._guard(flow))

    def _note(self, tokens: int, turn_s: float) -> None:
        self.produced += tokens
        self._world.measures.count("tokens", tokens)
        self._world.measures.note("between tokens, s", turn_s)
        token_bytes = FRAME_BYTES + WEIGHT_BYTES * self._world.model.hidden
        for here, there in zip(self.hops, [*self.hops[1:], self.hops[0]], strict=True):
            size_bytes = token_bytes if there is not self.hops[0] else FRAME_BYTES + ID_BYTES
            self._links.bytes_sent[here.peer.index, there.peer.index] += tokens * size_bytes
        for hop in self.hops:
            batch = self._batch(hop, turn_s)
            hop.peer.busy_s += tokens * hop.peer.device.decode_s(hop.layers, round(batch)) / batch

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
