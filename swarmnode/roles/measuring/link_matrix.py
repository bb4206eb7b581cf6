"""The links between peers as one of them sees them: what was measured, and what follows from coordinates where nothing was."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from swarmnode.plan.routes.delays import bandwidths, one_way_delays
from swarmnode.plan.view import view_of
from swarmnode.roles.host import Host


def link_matrix(host: Host, units: int, most: int) -> dict[str, Any]:
    """Between the first `most` peers that hold units. Rows send, columns receive: `rtt_s` in seconds, whether it was `measured`
    between the two, and `bandwidth_bps`, None where neither end's was measured."""
    paths, own = host.paths, host.directory.network.peer_id
    rtts_s = paths.link_statistics.rtts_s()
    view = view_of(units, host.directory.peers().values(), observer=own, rtt_s=rtts_s, coordinate=paths.coordinate)
    holders = sorted((peer for peer in view.peers if peer.span.units), key=lambda peer: (peer.span, peer.peer))
    peers = [peer.peer for peer in holders[:most]]
    rtt_s = 2 * one_way_delays(view, peers)
    np.fill_diagonal(rtt_s, 0.0)
    rates_bps = bandwidths(view, peers).tolist()
    return {
        "peers": peers,
        "rtt_s": rtt_s.round(6).tolist(),
        "measured": [[(a, b) in view.rtt_s or (b, a) in view.rtt_s for b in peers] for a in peers],
        "bandwidth_bps": [[None if math.isinf(rate_bps) else rate_bps for rate_bps in row] for row in rates_bps],
    }
