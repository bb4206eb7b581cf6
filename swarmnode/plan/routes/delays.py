"""Estimates of links for planners: delays, bandwidths, and the time that one position takes.

A delay is the measured one, else that of the network coordinates, else the median. A bandwidth is the measured one, else it
follows from the lines of both peers and from measurements of peers nearby.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import compress, groupby
from operator import itemgetter

import numpy as np

from swarmnode.net.interfaces import PeerId
from swarmnode.plan.cost import transfer_s
from swarmnode.plan.spans.flow import Bools, Floats
from swarmnode.plan.view import PeerView, View

# A measured link stands for another one if its ends are near those of the other: both delays together are at most
# NEAR_S + NEAR_SHARE * the delay of the other link.
NEAR_S, NEAR_SHARE = 0.002, 0.25
VOICES, LEAST_VOICES = 5, 2  # number of measuring peers that count at most, and that an estimate needs

HELD_S = 300.0  # seconds that the best bandwidth of a path is kept

MeasuredLinks = tuple[int, list[int], list[float]]
"""A sender, its receivers, and the bits/s to each"""


def shared_homes(homes: Sequence[str]) -> tuple[int, ...]:
    """Return one number for each peer, equal for peers of the same home; empty if no two of `homes` are equal."""
    return tuple(map(homes.index, homes)) if len(set(homes)) < len(homes) else ()


def crowded(homes: Sequence[int], peers: int) -> Bools:
    """Return [N]: True for each peer that shares its home with another. `homes` come from `shared_homes`; empty: none shares."""
    home_N = np.array(homes or range(peers))
    crowded_N: Bools = (home_N[:, None] == home_N).sum(axis=1) > 1
    return crowded_N


def sharing_lines(homes: Sequence[int], peers: int) -> Bools:
    """Return [N, N]: True for each path between two homes that shares a home's line with paths of other peers.

    `homes` are the numbers of `shared_homes`. While all such paths are in use, each gets only a part of the line.
    """
    home_N = np.array(homes or range(peers))
    crowded_N = crowded(homes, peers)
    sharing_NN: Bools = (home_N[:, None] != home_N) & (crowded_N[:, None] | crowded_N)
    return sharing_NN


class HomeLines:
    """Best recent bandwidth of paths out of homes with several peers. While several such paths are in use, each measures only a
    part of its home's line. `clock` returns seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._best: dict[tuple[PeerId, PeerId], tuple[float, float]] = {}  # bits/s, and until when they count

    def held(self, view: View, peers: Sequence[PeerView]) -> View:
        """Return the view with each path out of a shared home at its best bandwidth of the last `HELD_S` seconds."""
        now_s, homes = self._clock(), {peer.peer: peer.home or peer.peer for peer in peers}
        at_home = Counter(homes.values())
        before, self._best = self._best, {}
        for path, bps in view.path_bps.items():
            here, there = (homes.get(end, end) for end in path)
            if here != there and (at_home[here] > 1 or at_home[there] > 1):
                best_bps, until_s = before.get(path, (0.0, 0.0))
                self._best[path] = (bps, now_s + HELD_S) if bps >= best_bps or now_s >= until_s else (best_bps, until_s)
        return replace(view, path_bps={**view.path_bps, **{path: bps for path, (bps, _) in self._best.items()}})


def one_way_delays(view: View, peers: Sequence[PeerId | None]) -> Floats:
    """Return the one-way delays [N, N] in seconds between `peers`, each named once; None stands for an unknown peer."""
    index = {peer: number for number, peer in enumerate(peers) if peer is not None}
    # by network coordinates; the view's default if one of both peers has none
    rtt_s = np.full((len(peers), len(peers)), view.default_rtt_s)
    placed = [number for number, peer in enumerate(peers) if peer is not None and peer in view.coordinates]
    if placed:
        coordinates = [view.coordinates[peers[number] or ""] for number in placed]
        place_ms = np.array([coordinate.place for coordinate in coordinates])
        height_ms = np.array([coordinate.height_ms for coordinate in coordinates])
        apart_ms = np.linalg.norm(place_ms[:, None] - place_ms[None, :], axis=2)
        rtt_s[np.ix_(placed, placed)] = (apart_ms + height_ms[:, None] + height_ms[None, :]) / 1e3
    for (one, other), measured_s in view.rtt_s.items():
        a, b = index.get(one), index.get(other)
        if a is not None and b is not None:  # the larger one of both ends' measurements counts
            rtt_s[a, b] = rtt_s[b, a] = max(measured_s, view.rtt_s.get((other, one), 0.0))
    return rtt_s / 2


def likely_delays(view: View, peers: Sequence[PeerId | None]) -> Floats:
    """Return the one-way delays [N, N] in seconds between `peers`, raised if a measurement breaks the triangle inequality.

    A delay that only one end measured is raised to the least value that fits the delays measured by both ends: no peer can
    be near to two peers that are far from each other. None in `peers` stands for an unknown peer.
    """
    delay_NN = one_way_delays(view, peers)
    told_NN = np.array([[(one, other) in view.rtt_s for other in peers] for one in peers])
    agreed_NN = np.where(told_NN & told_NN.T, delay_NN, 0.0)
    likely_NN: Floats = delay_NN.copy()
    for teller in np.flatnonzero((told_NN & ~told_NN.T).any(axis=1)):
        told, alone = told_NN[teller], told_NN[teller] & ~told_NN[:, teller]
        around_N = (agreed_NN - delay_NN[teller])[:, told].max(axis=1)
        likely_NN[teller, alone] = likely_NN[alone, teller] = np.maximum(delay_NN[teller], around_N)[alone]
    return likely_NN


def position_times(view: View, peers: Sequence[PeerId | None]) -> Floats:
    """Return the seconds [N, N] that the hidden state of one position takes from one of `peers` to another."""
    return transfer_s(view.position_bytes, one_way_delays(view, peers), bandwidths(view, peers))


def bandwidths(view: View, peers: Sequence[PeerId | None]) -> Floats:
    """Return the bandwidths [N, N] in bits/s, from sender to receiver; infinite if nothing was measured.

    A bandwidth is that measured by the sender. Else it is the narrower of the sender's uplink and the receiver's downlink, and
    at most that of links between peers near both ends. Without such links it is at most the usual one of the sender's links out
    of its home.
    """
    # the narrower of the sender's uplink and the receiver's downlink; infinite if neither was measured
    lines = {peer.peer: (peer.up_bps, peer.down_bps) for peer in view.peers}
    bps = np.array([lines.get(peer or "", (0.0, 0.0)) for peer in peers]).reshape(-1, 2)
    known_bps = np.where(bps > 0, bps, np.inf)
    bps_NN = np.minimum(known_bps[:, None, 0], known_bps[None, :, 1])
    index = {peer: number for number, peer in enumerate(peers) if peer is not None}
    measured = [
        (index[one], index[other], bps) for (one, other), bps in view.path_bps.items() if {one, other} <= index.keys()
    ]
    if measured:
        delay_NN = likely_delays(view, peers)
        by_sender = list(_by_sender(measured))
        told_NN = _by_neighbours(delay_NN, by_sender)
        # fast links inside a home say nothing about links out of it
        home_of = {peer.peer: peer.home for peer in view.peers if peer.home}
        homes = [home_of.get(peer or "") for peer in peers]
        at_home_NN = np.array([[one is not None and one == other for other in homes] for one in homes])
        usual_NN = _usual(delay_NN, by_sender, at_home_NN)
        bps_NN = np.minimum(bps_NN, np.where(np.isfinite(told_NN), told_NN, usual_NN))
        senders, receivers, rates_bps = zip(*measured, strict=True)
        bps_NN[senders, receivers] = rates_bps
    return bps_NN


def _by_neighbours(delay_NN: Floats, by_sender: Sequence[MeasuredLinks]) -> Floats:
    """Return bits/s [N, N] by measured links nearby; infinite if there are too few.

    A sender's own link to a peer near the receiver decides alone. Else the median over at least two peers near the sender
    decides, each with its link to the peer nearest to the receiver.
    """
    apart_NN = delay_NN * (1 - np.eye(len(delay_NN)))
    # [A, N] the bits/s to each sender's receiver nearest to peer N, and their delay
    senders, rates, offs = list[int](), list[Floats](), list[Floats]()
    for sender, receivers, rates_bps in by_sender:
        off_RN = apart_NN[receivers]
        senders.append(sender)
        rates.append(np.array(rates_bps)[off_RN.argmin(axis=0)])
        offs.append(off_RN.min(axis=0))
    senders_A, rate_AN, off_AN = np.array(senders), np.stack(rates), np.stack(offs)
    own_NA = senders_A == np.arange(len(delay_NN))[:, None]
    # the sender itself comes first
    near_NK = np.argsort(apart_NN[:, senders_A] - own_NA, axis=1, kind="stable")[:, :VOICES]
    from_NK1 = np.take_along_axis(apart_NN[:, senders_A], near_NK, axis=1)[:, :, None]
    heard_NKN = from_NK1 + off_AN[near_NK] <= NEAR_SHARE * apart_NN[:, None] + NEAR_S
    ranked_NKN = np.sort(np.where(heard_NKN, rate_AN[near_NK], np.inf), axis=1)
    voices_NN = heard_NKN.sum(axis=1)
    middle_N1N = (voices_NN // 2).clip(max=ranked_NKN.shape[1] - 1)[:, None]
    median_NN = np.take_along_axis(ranked_NKN, middle_N1N, axis=1)[:, 0]
    is_own_NK = np.take_along_axis(own_NA, near_NK, axis=1)
    own_NN = np.where(heard_NKN & is_own_NK[:, :, None], rate_AN[near_NK], np.inf).min(axis=1)
    others_NN = np.where(voices_NN >= LEAST_VOICES, median_NN, np.inf)
    told_NN: Floats = np.where(np.isfinite(own_NN), own_NN, others_NN)
    return told_NN


def _usual(delay_NN: Floats, by_sender: Sequence[MeasuredLinks], at_home_NN: Bools) -> Floats:
    """Return bits/s [N, N] by the median of each sender's measured links out of its home; infinite inside a home.

    A sender without measurements takes the median of the peers nearest to it, at least two. The value is also infinite to
    receivers nearer than the measured ones. Half of a sender's links are no faster, so an unmeasured peer seems near to
    the peers of at most one place, and never to two places that a slow link joins.
    """
    usual_NN = np.full(delay_NN.shape, np.inf)
    own = {
        sender: (statistics.median_low(away_bps), delay_NN[sender, receivers].min())
        for sender, receivers, rates_bps in by_sender
        if (away_bps := list(compress(rates_bps, ~at_home_NN[sender, receivers])))
    }
    for sender, delay_N in enumerate(delay_NN):
        voices = [sender] if sender in own else sorted(own, key=lambda voice: (delay_N[voice], voice))[:VOICES]
        if sender in own or len(voices) >= LEAST_VOICES:
            usual_bps, least_s = (
                statistics.median_low(values) for values in zip(*(own[voice] for voice in voices), strict=True)
            )
            usual_NN[sender, delay_N >= least_s] = usual_bps
    return np.where(at_home_NN, np.inf, usual_NN)


def _by_sender(measured: Sequence[tuple[int, int, float]]) -> Iterator[MeasuredLinks]:
    """Yield the measured links of each sender, from (sender, receiver, bits/s)."""
    for sender, own in groupby(sorted(measured), key=itemgetter(0)):
        _, receivers, rates_bps = zip(*own, strict=True)
        yield sender, list(receivers), list(rates_bps)
