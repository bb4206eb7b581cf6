"""A live swarm as a network for planning and simulation: its machines and links as announced, with gaps filled in and marked."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from itertools import permutations
from typing import Any

import numpy as np

from swarmnode.errors import LocalError
from swarmnode.net.interfaces import PeerId
from swarmnode.peer.host import Host
from swarmnode.plan.offline.planner_files import MAX_DEVICES
from swarmnode.plan.routes.delays import bandwidths, one_way_delays
from swarmnode.plan.spans.flow import Floats
from swarmnode.plan.view import View, view_of
from swarmnode.swarm.records.announcement import Announcement, State
from swarmnode.swarm.storage.swarmfile import Swarm

ASSUMED_BPS = 1e8  # bandwidth of all links if none was measured
AWAY = (State.OFFLINE, State.DRAINING)


def link_matrix(host: Host, units: int, most: int) -> dict[str, Any]:
    """Return the links between the first `most` peers with units, as matrices: rows send, columns receive.

    `rtt_s` is in seconds; `measured` says whether the two peers measured it; `bandwidth_bps` is None if it is unknown.
    """
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


def measured_network(swarm: Swarm, announced: Mapping[PeerId, Announcement]) -> dict[str, Any]:
    """Return a scenario (`plan/offline/planner_files.py`) of the peers that lend a machine, in the order of their ids.

    `estimated` lists the pairs [from, to] whose delay follows from coordinates or is assumed, and those whose bandwidth was not
    measured. Raises LocalError if no peer lends a machine.
    """
    assert swarm.manifest is not None
    lenders = [one for _, one in sorted(announced.items()) if one.memory_bytes > 0 and one.life not in AWAY][
        :MAX_DEVICES
    ]
    if not lenders:
        raise LocalError(f"no peer lends a machine to {swarm.name} at the moment, so there is no network to write")
    names, view = [one.peer for one in lenders], view_of(swarm.manifest.model.units, lenders)
    bandwidth_NN = bandwidths(view, names)
    known_bps = bandwidth_NN[np.isfinite(bandwidth_NN)].tolist()
    filled_NN = np.where(np.isfinite(bandwidth_NN), bandwidth_NN, statistics.median(known_bps or [ASSUMED_BPS]))
    return {
        "name": swarm.name,
        "swarm": swarm.id.hex(),
        "devices": len(lenders),
        "peer": names,
        "region": [one.name or None for one in lenders],
        "gpu": [one.device or None for one in lenders],
        "memory_gb": [one.memory_bytes / 1e9 for one in lenders],
        "decode_units_per_s": [one.decode_units_per_s or None for one in lenders],
        "training_units_per_s": [one.training_units_per_s or None for one in lenders],
        "delay_ms": _rounded(1e3 * one_way_delays(view, names), 3),
        "bandwidth_gbps": _rounded(filled_NN / 1e9, 6),
        "estimated": {
            "delay_ms": [pair for pair in _pairs(len(lenders)) if not _is_measured(view, names, *pair)],
            "bandwidth_gbps": [pair for pair in _pairs(len(lenders)) if not _has_rate(view, *pair)],
        },
    }


def _pairs(count: int) -> list[tuple[int, int]]:
    return list(permutations(range(count), 2))


def _is_measured(view: View, names: list[PeerId], one: int, other: int) -> bool:
    return (names[one], names[other]) in view.rtt_s or (names[other], names[one]) in view.rtt_s


def _has_rate(view: View, sender: int, receiver: int) -> bool:
    one, other = view.peers[sender], view.peers[receiver]
    return (one.peer, other.peer) in view.path_bps or (one.up_bps > 0 and other.down_bps > 0)


def _rounded(matrix_NN: Floats, digits: int) -> list[list[float]]:
    """Return rows of rounded numbers: 0 on the diagonal, and elsewhere at least the smallest step."""
    apart_NN = np.where(np.eye(len(matrix_NN), dtype=bool), 0.0, np.maximum(matrix_NN, 10.0**-digits))
    rows: list[list[float]] = apart_NN.round(digits).tolist()
    return rows
