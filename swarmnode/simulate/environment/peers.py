"""A simulated peer: a device at a place of the scenario, and what it holds."""

from __future__ import annotations

from dataclasses import dataclass, field

from swarmnode.net.interfaces import PeerId
from swarmnode.plan.spans.placement import Joiner, Move, MovePolicy
from swarmnode.plan.view import PeerView, Span
from swarmnode.simulate.environment.devices import SimulatedDevice
from swarmnode.swarm.records.announcement import State

NOTHING = Span(0, 0)


@dataclass(eq=False)
class Peer:
    """`index` is its number in `Links`. A peer that is not `alive` is away; when it comes back it is another one, with a new id."""

    index: int
    peer: PeerId
    device: SimulatedDevice
    capacity_units: int
    up_bps: float = 0.0
    down_bps: float = 0.0
    started_at: float = 0.0
    span: Span = NOTHING
    state: State = State.OFFLINE
    sessions: int = 0
    cache_free_bytes: float = 0.0
    life: int = 0  # how often it came: what was planned for an earlier life is void
    load_is_news: bool = field(default=False, repr=False)  # an announcement of it is planned
    wish: Move | None = field(default=None, repr=False)  # where it would rather be
    move_s: float = field(default=MovePolicy().move_s, repr=False)  # what its last move took
    busy_s: float = field(default=0.0, repr=False)

    def __repr__(self) -> str:
        return f"<Peer {self.peer} {self.state.name} {self.span} {self.device!r}>"

    @property
    def alive(self) -> bool:
        """Whether it is there at all."""
        return self.state is not State.OFFLINE

    @property
    def serves(self) -> bool:
        """Whether it computes for others; one that drains still does for those it has."""
        return self.state in (State.READY, State.DRAINING)

    def computes(self, takes_s: float) -> None:
        """Note that its device is busy for so long."""
        self.busy_s += takes_s

    def view(self) -> PeerView:
        """As it announces itself."""
        return PeerView(
            self.peer,
            self.span,
            self.state,
            self.device.decode_units_per_s,
            self.sessions,
            self.started_at,
            self.up_bps,
            self.down_bps,
        )

    def joiner(self) -> Joiner:
        """As it decides for itself."""
        return Joiner(self.peer, self.capacity_units, self.device.decode_units_per_s, self.started_at)
