"""Wiring: the route of a microbatch, through the replicas that will finish it first.

Peers and links are booked for microbatches sent and not yet back (virtual finish times, as SWARM does, 2301.11913
section 3.2, with measured seconds per layer; links added); a route is the cheapest chain of spans, mid-span entry included. So a
peer with half the speed gets half the work, and a slow link is crossed where waiting for a fast one would take longer. Of
what costs the same a lot decides that no name favours. A slow peer gets no more microbatches if the others would
finish the rest of the step sooner. By Little's law (1961) a stage needs as many microbatches at once,
in order not to wait for any, as it does while one is on its way through all stages.

Transfers: the cost of handing microbatches on, booked for transfers under way as computing is.

A path takes one message after another, and so does the line of the sender: what a peer sends to different ones leaves it at
the pace of its fastest path; and what peers of one home send to others leaves the home's line at that of the fastest of their paths
out of it. Every hop carries activations there and gradients of the same size back.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict, deque
from collections.abc import Collection, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from swarmnode.net.fair_share import Recent
from swarmnode.net.interfaces import PeerId
from swarmnode.plan.spans.flow import Bools, Floats, Indexes
from swarmnode.plan.view import Span, draw
from swarmnode.plan.virtual_clock import Action, VirtualClock

APART_S = 3600.0  # between peers that are kept apart: any other route is shorter
MAX_APART = 4096
PIECES = 4  # of a message, on a line that others at home use, too
Path = tuple[int, int]


class Transfers:
    """Transfers between the stages of one training. Sending from or to an unknown peer costs nothing."""

    def __init__(self) -> None:
        self._booked: Counter[tuple[PeerId, PeerId]] = Counter()  # messages that a path is yet to carry
        self._apart: Recent[tuple[PeerId, PeerId], None] = Recent(MAX_APART)
        self.know((), np.zeros((0, 0)), np.zeros((0, 0)))

    def know(self, peers: Sequence[PeerId], delay_NN: Floats, sending_NN: Floats, homes: Sequence[int] = ()) -> None:
        """Set the seconds [from, to] between peers: the delay of a message, and the sending time of a microbatch's values.
        `homes`: the home number of each peer; peers of one home share a line. Bookings stay."""
        self._number = {peer: number for number, peer in enumerate(peers)}
        unknown = (0, 1)  # one more entry, for unknown peers
        self._delay_NN = np.pad(delay_NN, unknown)
        self._sending_NN = np.pad(sending_NN, unknown)
        apart_NN = np.where(np.eye(len(peers), dtype=bool), np.inf, sending_NN)
        self._uplink_N = np.pad(apart_NN.min(axis=1, initial=np.inf), unknown)  # its fastest path
        self._uplink_N[np.isinf(self._uplink_N)] = 0.0
        self._homes = SharedLines(homes, sending_NN) if homes else None
        self._booked_NN = np.zeros_like(self._sending_NN)
        for (sender, receiver), count in self._booked.items():
            self._booked_NN[self._at(sender), self._at(receiver)] += count
        self._apart_NN = np.zeros_like(self._sending_NN)
        for one, other in self._apart:
            self._part(one, other)

    def separate(self, peer: PeerId, other: PeerId) -> bool:
        """Let two peers hand nothing to each other as long as there is another route. Returns whether this is new. Of more than
        MAX_APART pairs the first one is forgotten."""
        pair = min(peer, other), max(peer, other)
        if pair in self._apart:
            return False
        self._apart[pair] = None
        self._part(*pair)
        return True

    def forget_separations(self) -> None:
        """End the separation of all pairs."""
        self._apart.clear()
        self._apart_NN[:] = 0.0

    def _part(self, peer: PeerId, other: PeerId) -> None:
        if self._number.keys() >= {peer, other}:
            self._apart_NN[self._at(peer), self._at(other)] = self._apart_NN[self._at(other), self._at(peer)] = APART_S

    def book(self, route: Sequence[PeerId], change: int) -> None:
        """Book (`change` 1) or release (-1) a microbatch on the paths along `route`, in both directions."""
        for here, there in pairwise(route):
            for path in ((here, there), (there, here)):
                self._booked[path] += change
                if not self._booked[path]:
                    del self._booked[path]
                self._booked_NN[self._at(path[0]), self._at(path[1])] += change

    def idle(self) -> Transfers:
        """Return a copy with the same links and no bookings."""
        other = copy(self)
        other._booked, other._booked_NN = Counter(), np.zeros_like(self._booked_NN)
        return other

    def lines(self, clock: VirtualClock) -> VirtualLines:
        """Return the same links for a simulation in the time of `clock`, with no transfer in progress."""
        return VirtualLines(clock, list(self._number), self._delay_NN, self._sending_NN, self._uplink_N, self._homes)

    def busy_s(self, peer: PeerId) -> float:
        """Return the seconds of booked transfers on the line of `peer`: its busiest path, or its home's line if longer."""
        return float(self._busy_s_N()[self._at(peer)])

    def clear(self) -> None:
        """Forget all booked transfers."""
        self._booked.clear()
        self._booked_NN[:] = 0.0

    def there_and_back_s(self, peers: Sequence[PeerId]) -> Floats:
        """Return [N, N]: seconds for one more microbatch between two of `peers` and its gradient back, after bookings."""
        at_N = np.array([self._at(peer) for peer in peers], dtype=np.intp)
        pairs = np.ix_(at_N, at_N)
        path_NN = (self._booked_NN[pairs] + 1) * self._sending_NN[pairs]
        line_N = (self._booked_NN.sum(axis=1) + 1)[at_N] * self._uplink_N[at_N]
        one_way_NN = np.maximum(path_NN, line_N[:, None])
        if self._homes is not None:
            one_way_NN = np.maximum(one_way_NN, self._homes.one_more_s(self._booked_NN)[pairs])
        one_way_NN = one_way_NN + self._delay_NN[pairs]
        both_NN: Floats = one_way_NN + one_way_NN.T + self._apart_NN[pairs]
        return both_NN

    def _busy_s_N(self) -> Floats:
        lines_N = self._booked_NN.sum(axis=1) * self._uplink_N
        busy_N: Floats = np.maximum((self._booked_NN * self._sending_NN).max(axis=1), lines_N)
        return busy_N if self._homes is None else np.maximum(busy_N, self._homes.busy_s(self._booked_NN))

    def _at(self, peer: PeerId) -> int:
        return self._number.get(peer, len(self._number))


@dataclass(eq=False)
class VirtualLines:
    """Paths and lines between peers in virtual time; each message follows the one before. Messages that leave a home take
    turns on its line, a piece of one message for each receiver. `uplink_N`: the seconds that a microbatch occupies its
    sender's line."""

    clock: VirtualClock
    peers: Sequence[PeerId]
    delay_NN: Floats
    sending_NN: Floats
    uplink_N: Floats
    homes: SharedLines | None

    def __post_init__(self) -> None:
        self._number = {peer: number for number, peer in enumerate(self.peers)}
        self._delay_s: list[list[float]] = self.delay_NN.tolist()
        self._sending_s: list[list[float]] = self.sending_NN.tolist()
        self._uplink_s: list[float] = self.uplink_N.tolist()
        self._free_s = defaultdict[object, float](float)  # senders, paths, and homes
        self._queues = defaultdict[Path, deque[Action]](deque)  # out of homes

    def send(self, sender: PeerId, receiver: PeerId, arrived: Action) -> None:
        """Hand over a microbatch's values now, and call `arrived` when they are there."""
        path = self._number.get(sender, len(self._number)), self._number.get(receiver, len(self._number))
        if self.homes is None or not self.homes.parts(*path):
            self.clock.at(self._carry(path, 1.0) + self._delay_s[path[0]][path[1]], arrived)
            return
        self._queues[path].append(arrived)  # paths out of a home share its line piece by piece
        if len(self._queues[path]) == 1:
            self._send_piece(path, PIECES)

    def _send_piece(self, path: Path, left: int) -> None:
        """Send one of the `left` pieces of a path's first message: the next takes its turn when this one has left the line."""
        leaves_s = self._carry(path, 1 / PIECES)
        if left > 1:
            self.clock.at(leaves_s, partial(self._send_piece, path, left - 1))
        else:
            self.clock.at(leaves_s + self._delay_s[path[0]][path[1]], self._queues[path][0])
            self.clock.at(leaves_s, partial(self._sent, path))

    def _sent(self, path: Path) -> None:
        self._queues[path].popleft()
        if self._queues[path]:
            self._send_piece(path, PIECES)

    def _carry(self, path: Path, share: float) -> float:
        """Send `share` of a microbatch's values along `path` (from, to), from now on or when its lines are free. Returns the time
        in seconds when all have been sent."""
        here, there = path
        begins_s = max(self.clock.now_s, self._free_s[here])
        if self.homes is not None and self.homes.parts(here, there):
            home = "home", self.homes.home_of(here)
            begins_s = max(begins_s, self._free_s[home])
            self._free_s[home] = begins_s + share * self.homes.line_s(here)
        self._free_s[here] = begins_s + share * self._uplink_s[here]
        self._free_s[path] = max(begins_s, self._free_s[path]) + share * self._sending_s[here][there]
        return self._free_s[path]


class SharedLines:
    """Lines of homes, shared by their peers. Unknown peers form one home of their own, with a line that costs nothing.
    `sending_NN`: the seconds [from, to] that a message takes alone."""

    def __init__(self, homes: Sequence[int], sending_NN: Floats) -> None:
        self._home_N = np.array([*homes, -1])
        self._together_NN = self._home_N[:, None] == self._home_N
        self._out_NN = ~self._together_NN
        fastest_N = np.where(self._out_NN[:-1, :-1], sending_NN, np.inf).min(axis=1)
        line_s_N = np.where(self._together_NN[:-1, :-1], fastest_N, np.inf).min(axis=1)
        self._line_s_N = np.pad(np.where(np.isfinite(line_s_N), line_s_N, 0.0), (0, 1))

    def parts(self, sender: int, receiver: int) -> bool:
        """Return whether a message from `sender` to `receiver` leaves a home."""
        return bool(self._out_NN[sender, receiver])

    def home_of(self, peer: int) -> int:
        """Return the home number of a peer; -1 for an unknown peer."""
        return int(self._home_N[peer])

    def line_s(self, peer: int) -> float:
        """Return the seconds that a message of this peer occupies the line of its home."""
        return float(self._line_s_N[peer])

    def busy_s(self, booked_NN: Floats) -> Floats:
        """Return [N]: the seconds of booked transfers on the line of each peer's home."""
        busy_s_N: Floats = (self._together_NN @ (booked_NN * self._out_NN).sum(axis=1)) * self._line_s_N
        return busy_s_N

    def one_more_s(self, booked_NN: Floats) -> Floats:
        """Return [N, N]: the seconds until the sender's home line has carried one more message; 0 inside a home."""
        one_more_NN: Floats = (self.busy_s(booked_NN) + self._line_s_N)[:, None] * self._out_NN
        return one_more_NN


UNMEASURED_UNIT_S = 0.01
SLOW = 2.0  # times the median seconds per unit: only a slower peer can be left out as late
ENDLESS = 1 << 30
SAME = 1e-9  # relative: what sums of the same may differ by
NOBODY, ABSENT = -1, -2  # a unit is not fixed, or is fixed to a peer that takes no microbatch
TRIED = 32  # microbatches that are wired to see which ways they go; more of them go the same ones
QUEUES = 1.5  # times the unhindered travel time, between stages of unequal speeds
BELIEVED = 4.0  # times the median speed: the most that counts for the number of microbatches at once


@dataclass
class Replica:
    """Peer that may take microbatches.

    `unit_s` are seconds for one microbatch through one layer, and `booked_units` the layers of microbatches that are sent and not
    back. `at_once` is the number of microbatches that keep the peer busy, and `window` the number that it has room for; 0 if
    unknown.
    """

    span: Span
    unit_s: float = 0.0
    booked_units: int = 0
    in_flight: int = 0
    at_once: int = 0
    window: int = 0

    @property
    def is_free(self) -> bool:
        """Whether the peer has room for one more microbatch now."""
        return self.in_flight < min(self.at_once or ENDLESS, self.window or ENDLESS)

    @property
    def assumed_unit_s(self) -> float:
        """Measured seconds per layer, or `UNMEASURED_UNIT_S` if there is no measurement."""
        return self.unit_s or UNMEASURED_UNIT_S

    def finish_s(self, units: int) -> float:
        """Return the seconds until the peer would finish its booked layers and `units` more."""
        return (self.booked_units + units) * self.assumed_unit_s


Wire = tuple[PeerId, Span]


def book(route: Sequence[Wire], workers: Mapping[PeerId, Replica], transfers: Transfers, change: int) -> None:
    """Book (`change` 1) or release (-1) a microbatch along `route`, on its transfers and on its peers in `workers`."""
    transfers.book([peer for peer, _ in route], change)
    for peer, span in route:
        worker = workers.get(peer)
        if worker is not None:
            worker.booked_units += change * span.units
            worker.in_flight += change


def set_at_once(units: int, workers: Mapping[PeerId, Replica], transfers: Transfers) -> None:
    """Set `at_once` of each worker: `QUEUES` times the microbatches that it computes while one goes through all stages and back,
    plus one. Nothing changes if some layer has no holder."""
    idle = {peer: replace(worker, booked_units=0, in_flight=0, at_once=0, window=0) for peer, worker in workers.items()}
    links, routes = transfers.idle(), Counter[tuple[Wire, ...]]()
    for _ in range(TRIED):
        route = wire(idle, [None] * units, links)
        if route is None:
            return
        routes[tuple(route)] += 1
        book(route, idle, links, 1)
    unused = transfers.idle()
    way_s = sum(count * _way_s(route, idle, unused) for route, count in routes.items()) / TRIED
    usual_s = statistics.median(worker.assumed_unit_s for worker in idle.values())
    for peer, worker in idle.items():
        compute_s = worker.span.units * max(worker.assumed_unit_s, usual_s / BELIEVED)
        pace_s = max(compute_s, links.busy_s(peer) / max(1, worker.in_flight))
        workers[peer].at_once = 1 + math.ceil(min(QUEUES * way_s / pace_s, ENDLESS))


def _way_s(route: Sequence[Wire], workers: Mapping[PeerId, Replica], links: Transfers) -> float:
    """Return the seconds of one microbatch that travels `route` alone, forward and back."""
    hops_PP = links.there_and_back_s([peer for peer, _ in route])
    return float(hops_PP.diagonal(1).sum()) + sum(span.units * workers[peer].assumed_unit_s for peer, span in route)


def wire(
    workers: Mapping[PeerId, Replica], fixed: Sequence[PeerId | None], transfers: Transfers, *, left: int = ENDLESS
) -> list[Wire] | None:
    """Return the route of one microbatch; None if no chain of free peers covers all layers. Peers that would take longer than
    the others need for all `left` microbatches are not used.

    `fixed` names, for each layer, the peer that the microbatch must pass there, or None.
    """
    late = _late(workers, left) - set(fixed)
    free = sorted((peer for peer, worker in workers.items() if worker.is_free and peer not in late), key=_lot)
    if not _cover(frozenset(workers[peer].span for peer in free), len(fixed)):
        return None
    numbers = {peer: number for number, peer in enumerate(free)}
    fixed_U = tuple(NOBODY if peer is None else numbers.get(peer, ABSENT) for peer in fixed)
    cuts = _cuts(tuple(workers[peer].span for peer in free), fixed_U)
    route = _cheapest(cuts, [workers[peer] for peer in free], transfers.there_and_back_s(free))
    return [(free[number], span) for number, span in route] if route else None


@lru_cache(maxsize=1024)
def _cover(spans: Collection[Span], units: int) -> bool:
    """Return whether every one of `units` layers is in at least one of `spans`."""
    return len(set().union(*(range(*span) for span in spans))) >= units


def _late(workers: Mapping[PeerId, Replica], left: int) -> set[PeerId]:
    """Return the slow peers that would finish one more microbatch only after the others have done all that are `left`. Only
    peers much slower than the median can be late; the others count as no faster than the median. A late peer does not count
    among the others."""
    if left >= ENDLESS:
        return set()
    unit_s_P = np.array([worker.assumed_unit_s for worker in workers.values()])
    usual_s = float(np.median(unit_s_P)) if len(workers) else 0.0
    slow = [(number, peer) for number, peer in enumerate(workers) if unit_s_P[number] > SLOW * usual_s]
    if not slow:
        return set()
    rate_PU = np.zeros((len(workers), max(worker.span.end for worker in workers.values())))
    for number, worker in enumerate(workers.values()):
        rate_PU[number, slice(*worker.span)] = 1 / (worker.span.units * max(usual_s, unit_s_P[number]))
    late, rate_U = set(), rate_PU.sum(axis=0)
    for number, peer in sorted(slow, key=lambda one: (-_done_s(workers[one[1]]), _lot(one[1]))):
        span = workers[peer].span
        others_per_s = float((rate_U - rate_PU[number])[slice(*span)].min())
        rest_s = left / others_per_s if others_per_s > SAME * rate_PU[number].max() else np.inf
        if _done_s(workers[peer]) > rest_s + span.units * usual_s:
            late.add(peer)
            rate_U -= rate_PU[number]
    return late


def _done_s(worker: Replica) -> float:
    """Return the seconds until the worker would finish one more microbatch."""
    return worker.finish_s(worker.span.units)


@lru_cache(maxsize=4096)
def _lot(peer: PeerId) -> int:
    return draw("wiring", peer)


class _Cuts(NamedTuple):
    """Numbers of the C layers where a microbatch may change peers, and the layer that each peer can reach from each of them but
    the last; the cut itself if none."""

    unit_C: Indexes
    reach_PC: Indexes


@lru_cache(maxsize=1024)
def _cuts(spans: Sequence[Span], fixed: Sequence[int]) -> _Cuts:
    """Return the layers where peers with `spans` can hand on microbatches, and how far each peer can compute from there. `fixed`
    gives by number the peer that must take each layer."""
    # [P, U]: whether a peer holds a layer, and no other peer must take it
    starts_P, ends_P = np.array(spans).T
    fixed_U, units_U = np.array(fixed), np.arange(len(fixed))
    held_PU = (starts_P[:, None] <= units_U) & (units_U < ends_P[:, None])
    able_PU: Bools = held_PU & ((fixed_U == NOBODY) | (fixed_U == np.arange(len(spans))[:, None]))
    # [P, U]: the end of the layers that a peer may compute for a microbatch that enters at a layer; the layer itself if it may not
    ends_PU = np.where(able_PU, len(fixed), units_U)
    reach_PU: Indexes = np.minimum.accumulate(ends_PU[:, ::-1], axis=1)[:, ::-1]
    unit_C = np.concatenate([[0], 1 + np.flatnonzero((able_PU[:, 1:] != able_PU[:, :-1]).any(axis=0)), [len(fixed)]])
    return _Cuts(unit_C, reach_PU[:, unit_C[:-1]])


def _cheapest(cuts: _Cuts, workers: Sequence[Replica], there_and_back_PP: Floats) -> list[tuple[int, Span]]:
    """Return the cheapest chain of peers through all layers, by number with their spans; empty if there is no chain."""
    cuts_C, reach_PC = cuts
    peers = len(workers)
    unit_s_P = np.array([worker.assumed_unit_s for worker in workers])
    booked_P = np.array([worker.booked_units for worker in workers])
    hand_on_PP = there_and_back_PP + np.where(np.eye(peers, dtype=bool), np.inf, 0.0)  # to others
    entered_PC, left_PC = np.full((2, peers, len(cuts_C)), np.inf)
    left_PC[:, -1] = 0.0
    stop_PC, next_PC = np.zeros((2, peers, len(cuts_C)), np.intp)
    # From the end of the model backwards, for each cut: the least cost of entering each peer there, the later cut where a
    # microbatch best leaves it, and the best peer to hand on to.
    for cut in range(len(cuts_C) - 2, -1, -1):
        stops = cuts_C[cut + 1 :]
        compute_PS = (booked_P[:, None] + stops - cuts_C[cut]) * unit_s_P[:, None]
        cost_PS = np.where(stops <= reach_PC[:, cut, None], compute_PS + left_PC[:, cut + 1 :], np.inf)
        stop_PC[:, cut] = cut + 1 + cost_PS.argmin(axis=1)
        entered_PC[:, cut] = cost_PS.min(axis=1)
        if cut:  # no peer hands on to the holder of the first unit
            onward_PP = hand_on_PP + entered_PC[:, cut]
            next_PC[:, cut], left_PC[:, cut] = onward_PP.argmin(axis=1), onward_PP.min(axis=1)
    peer, cut, route = int(entered_PC[:, 0].argmin()), 0, list[tuple[int, Span]]()
    if not np.isfinite(entered_PC[peer, 0]):
        return route
    while cut < len(cuts_C) - 1:
        stop = int(stop_PC[peer, cut])
        route.append((peer, Span(int(cuts_C[cut]), int(cuts_C[stop]))))
        peer, cut = int(next_PC[peer, stop]), stop
    return route
