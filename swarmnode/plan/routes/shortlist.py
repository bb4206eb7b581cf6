"""Who is considered at all for a route through a large swarm.

Working out a route among n peers takes n² links. In a swarm of thousands a client draws a few dozen peers instead, and weighs
only those: routes are as good as those dozens allow, and clients that draw differently do not all run to the same peers
(the power of choices, Mitzenmacher 2001).
"""

from __future__ import annotations

import random
from dataclasses import replace

from swarmnode.net.interfaces import PeerId
from swarmnode.plan.view import PeerView, Span, View
from swarmnode.swarm.records.announcement import State

CONSIDERED = 48


def shortlist(
    view: View, client: PeerId | None, span: Span, keep: frozenset[PeerId] = frozenset(), considered: int = CONSIDERED
) -> View:
    """The view with `considered` peers, drawn by the client, more where those do not cover `span`. `keep` stay in any case.

    A swarm of up to four times as many is left as it is.
    """
    if len(view.peers) <= 4 * considered:
        return view
    chance = random.Random(str(client))
    drawn: list[PeerView] = [peer for peer in view.peers if peer.peer in keep] if keep else []
    while len(drawn) < len(view.peers):
        drawn += chance.sample(view.peers, min(considered, len(view.peers)))
        chosen = tuple({peer.peer: peer for peer in drawn}.values())
        if _cover(chosen, span):
            return replace(view, peers=chosen)
        considered *= 2
    return view


def _cover(peers: tuple[PeerView, ...], span: Span) -> bool:
    """Whether each unit of the span has two holders to choose from."""
    held = [0] * span.end
    for peer in peers:
        if peer.state is State.READY:
            for unit in range(peer.span.start, min(peer.span.end, span.end)):
                held[unit] += 1
    return min(held[span.start :], default=2) >= 2
