"""What a planner believes of links: delays as measured, else by network coordinates, else the median; and how long a position
takes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from swarmnode.net.interfaces import PeerId
from swarmnode.plan.cost import transfer_s
from swarmnode.plan.spans.flow import Floats
from swarmnode.plan.view import View


def one_way_delays(view: View, peers: Sequence[PeerId | None]) -> Floats:
    """delay_s [N, N] between peers that are named once each; None stands for somebody of whom nothing is known."""
    index = {peer: number for number, peer in enumerate(peers) if peer is not None}
    rtt_s = _by_coordinates(view, peers)
    for (one, other), measured_s in view.rtt_s.items():
        a, b = index.get(one), index.get(other)
        if a is not None and b is not None:
            rtt_s[a, b] = rtt_s[b, a] = measured_s
    return rtt_s / 2


def position_times(view: View, peers: Sequence[PeerId | None]) -> Floats:
    """Seconds [N, N] that one position takes from one peer to another."""
    return transfer_s(view.position_bytes, one_way_delays(view, peers), bandwidths(view, peers))


def bandwidths(view: View, peers: Sequence[PeerId | None]) -> Floats:
    """Bits/s [N, N]: the sender's uplink or the receiver's downlink, whichever is narrower; infinite if neither was measured."""
    lines = {peer.peer: (peer.up_bps, peer.down_bps) for peer in view.peers}
    bps = np.array([lines.get(peer or "", (0.0, 0.0)) for peer in peers]).reshape(-1, 2)
    known_bps = np.where(bps > 0, bps, np.inf)
    return np.minimum(known_bps[:, None, 0], known_bps[None, :, 1])


def _by_coordinates(view: View, peers: Sequence[PeerId | None]) -> Floats:
    """Estimated round trips in seconds, the view's default where one of both has no coordinate."""
    rtt_s = np.full((len(peers), len(peers)), view.default_rtt_s)
    placed = [number for number, peer in enumerate(peers) if peer is not None and peer in view.coordinates]
    if placed:
        coordinates = [view.coordinates[peers[number] or ""] for number in placed]
        place_ms = np.array([coordinate.place for coordinate in coordinates])
        height_ms = np.array([coordinate.height_ms for coordinate in coordinates])
        apart_ms = np.linalg.norm(place_ms[:, None] - place_ms[None, :], axis=2)
        rtt_s[np.ix_(placed, placed)] = (apart_ms + height_ms[:, None] + height_ms[None, :]) / 1e3
    return rtt_s
