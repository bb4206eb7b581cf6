"""Where peers would rather be: the rule of placement, asked no more often than its answer can change.

Live, every peer asks every second. Here all peers share one picture. By the rule for throughput whoever has the same span, memory
and speed as somebody who wants to stay wants to stay as well; and in a large swarm in good order it is seen at once that nobody
can gain.
"""

from __future__ import annotations

from dataclasses import replace

from swarmnode.net.interfaces import PeerId
from swarmnode.plan.spans.flow import throughput
from swarmnode.plan.spans.placement import BY_THROUGHPUT, Move, MovePolicy, PlacementRule
from swarmnode.simulate.environment.directory import SimulatedDirectory
from swarmnode.simulate.environment.peers import Peer
from swarmnode.simulate.results.measures import Measures


class Outlook:
    """Of the picture that the directory has now."""

    def __init__(
        self,
        directory: SimulatedDirectory,
        measures: Measures,
        move_policy: MovePolicy,
        rule: PlacementRule = BY_THROUGHPUT,
    ) -> None:
        self._rule = rule
        self._directory = directory
        self._measures = measures
        self._move_policy = move_policy
        self._revision = -1
        self._gain_is_possible = True
        self._staying: set[tuple[object, ...]] = set()
        self._moves: dict[PeerId, Move | None] = {}

    def __repr__(self) -> str:
        return f"<Outlook at revision {self._revision}: {len(self._moves)} peers asked>"

    def all_stay(self) -> bool:
        """Whether nobody needs to be asked."""
        if self._revision != self._directory.revision:
            self._look_anew()
        return not self._gain_is_possible

    def move(self, peer: Peer) -> Move | None:
        """Where a peer should rather be; None where it should stay."""
        if self.all_stay():
            return None
        kind = self._kind(peer)
        if kind in self._staying:
            return None
        if peer.peer not in self._moves:
            move = self._ask(peer)
            self._moves[peer.peer] = move
            if move is None:
                self._staying.add(kind)
        return self._moves[peer.peer]

    def _kind(self, peer: Peer) -> tuple[object, ...]:
        """Peers of the same kind want the same."""
        kind = (peer.span, peer.capacity_units, peer.device.decode_units_per_s, peer.up_bps, peer.down_bps, peer.move_s)
        return kind if self._rule is BY_THROUGHPUT else (peer.peer, *kind)

    def _ask(self, peer: Peer) -> Move | None:
        view, joiner = self._directory.view(), peer.joiner()
        move_policy = replace(self._move_policy, move_s=peer.move_s)
        return self._measures.timed("reconsider", lambda: self._rule.reconsider(view, joiner, move_policy))

    def _look_anew(self) -> None:
        self._revision = self._directory.revision
        self._staying.clear()
        self._moves.clear()
        self._gain_is_possible = self._can_gain()

    def _can_gain(self) -> bool:
        """Whether a move may fill a gap, or gain more than the hysteresis.

        One more peer of speed v raises no unit's level by more than v, so it gains v / throughput at most. Where a unit hangs
        on one peer more counts than throughput, and every peer is asked.
        """
        if self._rule is not BY_THROUGHPUT:
            return True
        capacity_index = self._directory.capacity_index
        least_holders = int(capacity_index.holders_U.min())
        if least_holders <= 1 or not self._move_policy.for_gain:
            return least_holders == 0 or self._move_policy.for_gain
        most_units_per_s = max(self._directory.speeds)
        return most_units_per_s > self._move_policy.hysteresis * throughput(capacity_index.supply_SE)
