"""Newcomers: who has passed few audits. They get a share of a client's sessions, and not the rest, for as long as others hold what
they hold: whoever makes a hundred identities attracts no more with them than that."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from swarmnode.net.interfaces import PeerId
from swarmnode.plan.view import View
from swarmnode.swarm.records.announcement import State

SHARE = 0.25  # of sessions, that newcomers may take part in
ESTABLISHED = 0.1  # trust, from which on one is no newcomer


def dispensable(view: View, trust: Mapping[PeerId, float], avoid: Collection[PeerId] = ()) -> frozenset[PeerId]:
    """The newcomers without whom each of their units still has an established holder that is not in `avoid`."""
    established = [
        peer
        for peer in view.peers
        if trust.get(peer.peer, 0.0) >= ESTABLISHED and peer.state is State.READY and peer.peer not in avoid
    ]
    held = {unit for peer in established for unit in range(*peer.span)}
    newcomers = (peer for peer in view.peers if trust.get(peer.peer, 0.0) < ESTABLISHED)
    return frozenset(peer.peer for peer in newcomers if held.issuperset(range(*peer.span)))
