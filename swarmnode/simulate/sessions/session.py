"""A session: what it asked for, how far it is, and the hops of its route."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from swarmnode.codec.messages import HopSpec
from swarmnode.net.interfaces import PeerId
from swarmnode.plan.view import Span
from swarmnode.plan.virtual_clock import VirtualClock
from swarmnode.simulate.environment.peers import Peer
from swarmnode.simulate.environment.world import World
from swarmnode.simulate.sessions.executor import SimulatedExecutor

ID_BYTES = 8
FRAME_BYTES = 64  # of a message, besides its tensor


@dataclass(frozen=True, slots=True)
class SimulatedHop:
    """A peer's part in a route, in one of its lives."""

    peer: Peer
    name: PeerId  # in this life
    worker: SimulatedExecutor
    span: Span
    life: int
    layers: float  # of work for one token

    @property
    def lives(self) -> bool:
        """Whether it still answers."""
        return self.peer.life == self.life

    def spec(self) -> HopSpec:
        """As the planners name it."""
        return HopSpec(self.name, self.span.start, self.span.end)


class SessionOwner(Protocol):
    """What a session needs of the workload that it belongs to (`serving.py`)."""

    world: World
    clock: VirtualClock

    def finish(self, session: Session) -> None:
        """All its tokens have come."""


class Session(ABC):
    """`place`: of the client in the links. `produced` tokens of `new_tokens` have come."""

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
        """A name for the planners."""
        return f"client {self.number}"

    @property
    def positions(self) -> int:
        """That the hops have in their caches."""
        return self.prompt_tokens + self.produced - 1 if self.produced else 0

    @property
    def tokens(self) -> int:
        """Positions for which caches are reserved."""
        return self.prompt_tokens + self.new_tokens

    def go(self, hops: Sequence[SimulatedHop]) -> None:
        """Begin, or go on, along these hops; those that it had and that still live keep their caches."""
        kept = {hop for hop in self.hops if hop.lives}
        self.hops = list(hops)
        self.epoch += 1
        self.waits_since_s = None
        if self.produced:
            self._resume(kept)
        else:
            self._begin()

    def stop(self) -> None:
        """Nothing of what is under way counts any more."""
        self.epoch += 1

    @abstractmethod
    def _begin(self) -> None:
        """Send the prompt."""

    @abstractmethod
    def _resume(self, kept: set[SimulatedHop]) -> None:
        """Fill the caches of the hops that are not among those `kept`, and go on."""

    def _guard(self, action: Callable[[], None]) -> Callable[[], None]:
        """The action, unless the session goes another way by then."""
        epoch = self.epoch
        return lambda: action() if self.epoch == epoch else None
