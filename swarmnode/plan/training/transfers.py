"""Transfers: the cost of handing microbatches on, booked for transfers under way as computing is.

A path takes one message after another, and so does the line of the sender: what a peer sends to different ones leaves it at
the pace of its fastest path; and what peers of one home send to others leaves the home's line at that of the fastest of their paths
out of it. Every hop carries activations there and gradients of the same size back.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import numpy as np

from swarmnode.net.interfaces import PeerId
from swarmnode.net.limits.fair_share import Recent
from swarmnode.plan.spans.flow import Floats
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

    def __repr__(self) -> str:
        return f"<Transfers between {len(self._number)} peers, {self._booked.total()} messages booked>"

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

    def keep_apart(self, one: PeerId, other: PeerId) -> bool:
        """Let two peers hand nothing to each other as long as there is another route. Returns whether this is new. Of more than
        MAX_APART pairs the first one is forgotten."""
        pair = min(one, other), max(one, other)
        if pair in self._apart:
            return False
        self._apart[pair] = None
        self._part(*pair)
        return True

    def let_meet(self) -> None:
        """End the separation of all pairs."""
        self._apart.clear()
        self._apart_NN[:] = 0.0

    def _part(self, one: PeerId, other: PeerId) -> None:
        if self._number.keys() >= {one, other}:
            self._apart_NN[self._at(one), self._at(other)] = self._apart_NN[self._at(other), self._at(one)] = APART_S

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
        """Return the seconds of booked transfers on the line of `peer`, its busiest path or its home's line, whichever takes
        longest."""
        return float(self._busy_s_N()[self._at(peer)])

    def clear(self) -> None:
        """Forget all booked transfers."""
        self._booked.clear()
        self._booked_NN[:] = 0.0

    def there_and_back_s(self, peers: Sequence[PeerId]) -> Floats:
        """Return [N, N]: the seconds for one more microbatch between two of `peers` and its gradient back, after all
        bookings."""
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
