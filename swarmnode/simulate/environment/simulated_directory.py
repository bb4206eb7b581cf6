"""Simulated directory: announcements, which all peers read with a delay until they expire; and the wishes of peers to move.

Live peers read the directory at different times. In the simulation all peers read at the same ticks, one read period apart, and
share one picture: an announcement is known at the next tick.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

from swarmnode.net.interfaces import PeerId
from swarmnode.plan.spans.flow import throughput
from swarmnode.plan.spans.span_placement import BY_THROUGHPUT, HOLDING, CapacityIndex, Move, MovePolicy, PlacementRule
from swarmnode.plan.view import PeerView, Span, View
from swarmnode.plan.virtual_clock import VirtualClock
from swarmnode.simulate.environment.peers import Peer
from swarmnode.simulate.results.measures import Measures
from swarmnode.swarm.peers.directory import DirectoryConfig
from swarmnode.swarm.records.announcement import State


class SimulatedDirectory:
    """Directory that all simulated peers share. `revision` grows when a peer comes, goes, or changes its state or span."""

    def __init__(self, clock: VirtualClock, units: int, config: DirectoryConfig, position_bytes: int = 0) -> None:
        self.revision = 0
        self._clock = clock
        self._units = units
        self._position_bytes = position_bytes
        self._config = config
        self._views: dict[PeerId, PeerView] = {}
        self._announced: dict[PeerId, PeerView | None] = {}
        # Index of the peers that hold units or soon will, kept up to date.
        self.capacity_index = CapacityIndex(units, (), position_bytes)
        self.speeds: Counter[float] = Counter()  # how many of the same peers have each speed
        self._view: View | None = None

    def start(self) -> None:
        """Take in the announcements now and again after every read period."""
        self.know_now()
        self._clock.after(self._config.read_period_s(len(self._views)), self.start)

    @property
    def publish_period_s(self) -> float:
        """Seconds between two regular announcements of a peer."""
        return self._config.publish_period_s(len(self._views))

    def announce(self, peer: PeerView) -> None:
        """Announce `peer`, visible from the next tick on. A peer in state OFFLINE is removed at that tick."""
        self._announced[peer.peer] = None if peer.state is State.OFFLINE else peer

    def vanish(self, peer: PeerId) -> None:
        """Let the last announcement of `peer` expire `life_factor` - 0.5 publish periods from now; drop its pending
        announcement."""
        expires_s = self.publish_period_s * (self._config.life_factor - 0.5)

        def expire() -> None:
            self._announced[peer] = None

        self._announced.pop(peer, None)
        self._clock.after(expires_s, expire)

    def view(self) -> View:
        """Return the picture of the last tick; it has no round-trip times."""
        if self._view is None:
            self._view = View(self._units, tuple(self._views.values()), position_bytes=self._position_bytes)
        return self._view

    def know_now(self) -> None:
        """Apply all pending announcements to the picture, without waiting for the next tick."""
        changed = False
        for name, peer in self._announced.items():
            before = self._views.pop(name, None) if peer is None else self._views.get(name)
            if peer is not None:
                self._views[name] = peer
            if _place(before) != _place(peer):
                changed = True
                self._count(before, -1)
                self._count(peer, 1)
        if self._announced:
            self._view = None
        self._announced.clear()
        self.revision += changed

    def _count(self, peer: PeerView | None, change: int) -> None:
        if peer is not None and peer.state in HOLDING:
            self.capacity_index.change(peer, change)
            self.speeds[peer.decode_units_per_s] += change
            self.speeds += Counter()  # drops speeds with a count of 0


def _place(peer: PeerView | None) -> tuple[State, Span] | None:
    return None if peer is None else (peer.state, peer.span)


@dataclass(eq=False)
class Outlook:
    """Wishes of peers to move, computed from the directory's current picture. If a peer stays, peers of the same kind are not
    asked."""

    directory: SimulatedDirectory
    measures: Measures
    move_policy: MovePolicy
    rule: PlacementRule = BY_THROUGHPUT

    def __post_init__(self) -> None:
        self._revision = -1
        self._gain_is_possible = True
        self._staying: set[tuple[object, ...]] = set()
        self._moves: dict[PeerId, Move | None] = {}

    def __repr__(self) -> str:
        return f"<Outlook at revision {self._revision}: {len(self._moves)} peers asked>"

    def all_stay(self) -> bool:
        """Return whether no move can be worthwhile, so that no peer needs to be asked."""
        if self._revision != self.directory.revision:
            self._revision = self.directory.revision
            self._staying.clear()
            self._moves.clear()
            self._gain_is_possible = self._can_gain()
        return not self._gain_is_possible

    def move(self, peer: Peer) -> Move | None:
        """Return the move that `peer` should make; None if it should stay."""
        if self.all_stay():
            return None
        kind = self._kind(peer)
        if kind in self._staying:
            return None
        if peer.peer not in self._moves:
            view, joiner = self.directory.view(), peer.joiner()
            move_policy = replace(self.move_policy, move_s=peer.move_s)
            move = self.measures.timed("reconsider", lambda: self.rule.reconsider(view, joiner, move_policy))
            self._moves[peer.peer] = move
            if move is None:
                self._staying.add(kind)
        return self._moves[peer.peer]

    def _kind(self, peer: Peer) -> tuple[object, ...]:
        """Return a key that is equal for peers with the same wish; under a rule other than BY_THROUGHPUT it is the peer's own."""
        kind = (peer.span, peer.capacity_units, peer.device.decode_units_per_s, peer.up_bps, peer.down_bps, peer.move_s)
        return kind if self.rule is BY_THROUGHPUT else (peer.peer, *kind)

    def _can_gain(self) -> bool:
        """Return whether a move may fill a gap, or gain more than the hysteresis.

        One more peer of speed v raises no layer's level by more than v, so it gains v / throughput at most. If a layer has only one
        holder, more than throughput counts: every peer is asked if the policy moves `for_gain`. Other rules always ask.
        """
        if self.rule is not BY_THROUGHPUT:
            return True
        capacity_index = self.directory.capacity_index
        least_holders = int(capacity_index.holders_U.min())
        if least_holders <= 1 or not self.move_policy.for_gain:
            return least_holders == 0 or self.move_policy.for_gain
        most_units_per_s = max(self.directory.speeds)
        return most_units_per_s > self.move_policy.hysteresis * throughput(capacity_index.supply_SE)
