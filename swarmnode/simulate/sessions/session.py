"""Simulated session: its lengths, its progress and the hops of its route; in small swarms it is followed token by token."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from swarmnode.codec.body import HopSpec
from swarmnode.net.interfaces import PeerId
from swarmnode.plan.view import Span
from swarmnode.plan.virtual_clock import VirtualClock
from swarmnode.simulate.environment.model import WEIGHT_BYTES
from swarmnode.simulate.environment.peers import Peer
from swarmnode.simulate.environment.world import World
from swarmnode.simulate.sessions.executor import SimulatedExecutor, SimulatedJob

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

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.number}: {self.produced} of {self.new_tokens} tokens, epoch {self.epoch}>"

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
