"""Who computes a session once more: other peers over the same units, in the same number format."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from random import Random

from swarmnode.codec.messages import HopSpec
from swarmnode.net.interfaces import PeerId
from swarmnode.swarm.records.announcement import Announcement, State


def second_route(
    route: Sequence[HopSpec],
    peers: Mapping[PeerId, Announcement],
    random: Random,
    *,
    avoid: Collection[PeerId] = (),
) -> tuple[HopSpec, ...] | None:
    """The hops of `route` over other peers than its own, drawn at random, so that nobody can arrange whom he is compared with.

    Where a hop has no replica it stays: it is not judged, those after it are. None where no hop has one. `avoid` take no part
    unless nobody else can.
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
    """Whether a peer holds the hop's units, and says that it computes as the hop's peer says that it does."""
    original = peers.get(hop.peer)
    return (
        original is not None
        and peer.life is State.READY
        and peer.span[0] <= hop.start
        and hop.end <= peer.span[1]
        and peer.number_format == original.number_format
    )
