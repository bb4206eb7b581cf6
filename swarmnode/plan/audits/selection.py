"""Selection of audits: the share of sessions, the replicas that compute once more, and the budget. Newcomers are audited more,
peers of long standing less.

An audit computes a session's text once more, as a prompt is, which costs a few of its steps; and it is paid from what the work
itself has cost, so that audits never take more than their share of a swarm's throughput.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from random import Random

from swarmnode.codec.body import HopSpec
from swarmnode.net.interfaces import PeerId
from swarmnode.swarm.records.announcement import Announcement, State

SHARE = 0.03  # of the throughput
NEWCOMER = 2.0  # times the mean share
LONG_STANDING = 0.5


def second_route(
    route: Sequence[HopSpec],
    peers: Mapping[PeerId, Announcement],
    random: Random,
    *,
    avoid: Collection[PeerId] = (),
) -> tuple[HopSpec, ...] | None:
    """Return `route` with each hop moved to a random other peer that can replace it; None if no hop has a replica.

    The choice is random so that no peer can arrange its auditor. A hop without a replica keeps its peer. Peers in `avoid` are
    never chosen as replicas.
    """
    used: set[PeerId] = {hop.peer for hop in route}
    second: list[HopSpec] = []
    for hop in route:
        able = [
            peer.peer
            for peer in peers.values()
            if peer.peer not in used and peer.peer not in avoid and can_replace(hop, peer, peers)
        ]
        chosen = random.choice(sorted(able)) if able else hop.peer
        used.add(chosen)
        second.append(HopSpec(chosen, hop.start, hop.end))
    return tuple(second) if any(new.peer != old.peer for new, old in zip(second, route, strict=True)) else None


def can_replace(hop: HopSpec, peer: Announcement, peers: Mapping[PeerId, Announcement]) -> bool:
    """Return whether `peer` is ready, holds the hop's layers and announces the same number format as the hop's peer.

    Returns False if `peers` does not hold the hop's peer."""
    original = peers.get(hop.peer)
    return (
        original is not None
        and peer.life is State.READY
        and peer.span[0] <= hop.start
        and hop.end <= peer.span[1]
        and peer.number_format == original.number_format
    )


@dataclass(frozen=True)
class SessionCost:
    """Cost of serving a session and of auditing it, in seconds of one layer."""

    served_s: float
    audit_s: float


def cost_of(prompt: int, drawn: int, *, decode_s: float, prefill_s: float) -> SessionCost:
    """Return the cost of a session with `prompt` prompt tokens and `drawn` new tokens, at `prefill_s` seconds for a position of a
    prompt and `decode_s` seconds for a step."""
    return SessionCost(prompt * prefill_s + drawn * decode_s, (prompt + drawn) * prefill_s)


def factor(trust: float) -> float:
    """Return the multiple of the mean audit share for a peer of this `trust` (0: newcomer, 1: long standing)."""
    return NEWCOMER + (LONG_STANDING - NEWCOMER) * min(1.0, max(0.0, trust))


class AuditBudget:
    """Budget of audits: `share` of the cost of served sessions, with at most about `burst` audits ahead of it."""

    def __init__(self, share: float = SHARE, *, burst: float = 4.0) -> None:
        self.share = share
        self._burst = burst
        self._spent_s = 0.0
        self._earned_s = 0.0

    @property
    def spent_share(self) -> float:
        """Cost of audits as a share of the cost of served sessions; 0 before any was served."""
        return self._spent_s / self._earned_s * self.share if self._earned_s else 0.0

    def chance(self, cost: SessionCost, trust: float) -> float:
        """Count the session as served and return the probability of an audit for it; 0 if the budget is spent. `trust` is the
        trust of its least trusted hop."""
        self._earned_s += self.share * cost.served_s
        if self.share == 0 or self._spent_s > self._earned_s + self._burst * cost.audit_s:
            return 0.0
        return min(1.0, factor(trust) * self.share * cost.served_s / cost.audit_s)

    def afford(self, cost: SessionCost) -> bool:
        """Spend an audit that another peer asks for and return True; return False and spend nothing if the budget is spent."""
        able = self.share > 0 and self._spent_s <= self._earned_s + self._burst * cost.audit_s
        if able:
            self.spend(cost)
        return able

    def spend(self, cost: SessionCost) -> None:
        """Charge one audit of a session of this `cost` to the budget."""
        self._spent_s += cost.audit_s
