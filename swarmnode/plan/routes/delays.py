"""What a planner believes of links: delays as measured, else by network coordinates, else the median; bandwidths as measured,
else by lines and by what peers nearby measured; and how long a position takes."""

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
from swarmnode.plan.spans.flow import Bools, Floats, Indexes
from swarmnode.plan.view import PeerView, View

# delays from those who measured to those between whom it is to be told: at most so much, and of the delay between these
NEAR_S, NEAR_SHARE = 0.002, 0.25
VOICES, LEAST_VOICES = 5, 2  # that are heard, and without which nothing is said

HELD_S = 300.0  # how fast a path was

MeasuredLinks = tuple[int, list[int], list[float]]
"""A sender, its receivers, and the bits/s to each"""


def shared_homes(homes: Sequence[str]) -> tuple[int, ...]:
    """Numbers that those have in common who are in the same home; nothing where each is in one of its own."""
    return tuple(map(homes.index, homes)) if len(set(homes)) < len(homes) else ()


def crowded(homes: Sequence[int], peers: int) -> Bools:
    """[N]: who is at home with others, by `shared_homes`."""
    home_N = np.array(homes or range(peers))
    crowded_N: Bools = (home_N[:, None] == home_N).sum(axis=1) > 1
    return crowded_N


def sharing_lines(homes: Sequence[int], peers: int) -> Bools:
    """[N, N]: paths that share the line of a home with others, by `shared_homes`: while all are used each gets a part of it."""
    home_N = np.array(homes or range(peers))
    crowded_N = crowded(homes, peers)
    sharing_NN: Bools = (home_N[:, None] != home_N) & (crowded_N[:, None] | crowded_N)
    return sharing_NN


class HomeLines:
    """How fast paths out of shared homes were at best, lately: while several are used at once each gets a part of the line, and the
    line is as fast as it was. `clock`: seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._best: dict[tuple[PeerId, PeerId], tuple[float, float]] = {}  # bits/s, and until when they count

    def __repr__(self) -> str:
        return f"<HomeLines of {len(self._best)} paths>"

    def held(self, view: View, peers: Sequence[PeerView]) -> View:
        """The same view with these paths, where they were measured, as fast as they were."""
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
    """delay_s [N, N] between peers that are named once each; None stands for somebody of whom nothing is known."""
    index = {peer: number for number, peer in enumerate(peers) if peer is not None}
    rtt_s = _by_coordinates(view, peers)
    for (one, other), measured_s in view.rtt_s.items():
        a, b = index.get(one), index.get(other)
        if a is not None and b is not None:  # what one end calls near is as far as the other end says
            rtt_s[a, b] = rtt_s[b, a] = max(measured_s, view.rtt_s.get((other, one), 0.0))
    return rtt_s / 2


def likely_delays(view: View, peers: Sequence[PeerId | None]) -> Floats:
    """delay_s [N, N], where what one end alone tells is believed as far as the triangle inequality allows: nobody is near to two
    peers that are far from each other, as both of them tell."""
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
    """Seconds [N, N] that one position takes from one peer to another."""
    return transfer_s(view.position_bytes, one_way_delays(view, peers), bandwidths(view, peers))


def bandwidths(view: View, peers: Sequence[PeerId | None]) -> Floats:
    """Bits/s [N, N]: as the sender measured it, else the sender's uplink or the receiver's downlink, whichever is narrower, and no
    more than peers near the one have to peers near the other, or than is usual of the sender's links out of its home; infinite if
    nothing was measured."""
    bps_NN = _by_lines(view, peers)
    index = {peer: number for number, peer in enumerate(peers) if peer is not None}
    measured = [
        (index[one], index[other], bps) for (one, other), bps in view.path_bps.items() if {one, other} <= index.keys()
    ]
    if measured:
        delay_NN = likely_delays(view, peers)
        by_sender = list(_by_sender(measured))
        told_NN = _by_neighbours(delay_NN, by_sender)
        usual_NN = _usual(delay_NN, by_sender, _at_home(view, peers))
        bps_NN = np.minimum(bps_NN, np.where(np.isfinite(told_NN), told_NN, usual_NN))
        senders, receivers, rates_bps = zip(*measured, strict=True)
        bps_NN[senders, receivers] = rates_bps
    return bps_NN


def _by_neighbours(delay_NN: Floats, by_sender: Sequence[MeasuredLinks]) -> Floats:
    """Bits/s [N, N], infinite where nobody nearby measured enough. The sender's own word of peers near the receiver counts by
    itself; else it is the median of those near the sender who measured, each with one voice, and of two at least."""
    apart_NN = delay_NN * (1 - np.eye(len(delay_NN)))
    senders_A, rate_AN, off_AN = _nearest_receivers(apart_NN, by_sender)
    own_NA = senders_A == np.arange(len(delay_NN))[:, None]
    near_NK = np.argsort(apart_NN[:, senders_A] - own_NA, axis=1, kind="stable")[
        :, :VOICES
    ]  # the sender itself comes first
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


def _at_home(view: View, peers: Sequence[PeerId | None]) -> Bools:
    """[N, N]: who is in the same home as whom; that links there are fast says nothing of links out of it."""
    home_of = {peer.peer: peer.home for peer in view.peers if peer.home}
    homes = [home_of.get(peer or "") for peer in peers]
    return np.array([[one is not None and one == other for other in homes] for one in homes])


def _usual(delay_NN: Floats, by_sender: Sequence[MeasuredLinks], at_home_NN: Bools) -> Floats:
    """Bits/s [N, N]: the median of what each sender measured out of its home, or of those nearest to it where it measured nothing,
    two at least; infinite at home, and to who is nearer than all whom these measured. Half of its links are no faster, so that a
    stranger seems to be beside the peers of one place at most, and never of two that a slow link joins."""
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
    """All who measured."""
    for sender, own in groupby(sorted(measured), key=itemgetter(0)):
        _, receivers, rates_bps = zip(*own, strict=True)
        yield sender, list(receivers), list(rates_bps)


def _nearest_receivers(apart_NN: Floats, by_sender: Sequence[MeasuredLinks]) -> tuple[Indexes, Floats, Floats]:
    """All who measured, [A, N] what each has to the one of its receivers that is nearest to each peer, and how far that is."""
    senders, rates, offs = list[int](), list[Floats](), list[Floats]()
    for sender, receivers, rates_bps in by_sender:
        off_RN = apart_NN[receivers]
        senders.append(sender)
        rates.append(np.array(rates_bps)[off_RN.argmin(axis=0)])
        offs.append(off_RN.min(axis=0))
    return np.array(senders), np.stack(rates), np.stack(offs)


def _by_lines(view: View, peers: Sequence[PeerId | None]) -> Floats:
    """Bits/s [N, N], infinite if neither line was measured."""
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
