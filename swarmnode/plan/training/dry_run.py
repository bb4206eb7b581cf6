"""A dry run of a step: its microbatches go through stages and lines in virtual time, wired and computed as they will be.

Stages compute one pass at a time, gradients first; lines carry one message after another, those of homes one to each peer in turns;
each microbatch that is back makes room for the next. So what a step takes follows from what its peers and links can do, down to
whom it waits for at the end.
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from enum import IntEnum
from functools import partial

from swarmnode.net.interfaces import PeerId
from swarmnode.plan.training.rehearsal import keep_busy
from swarmnode.plan.training.transfers import Transfers
from swarmnode.plan.training.wiring import Replica, Wire, book, wire

PIECES = 4  # of a message, on a line that others at home use, too
RUN = 128  # microbatches that go through; further ones take what those in the middle take
FORWARD_SHARE = 1 / 3  # of what a unit takes there and back


def dry_run_s(units: int, workers: Mapping[PeerId, Replica], transfers: Transfers, microbatches: int) -> float:
    """Until so many microbatches have gone through the stages and back, as if nothing were booked; infinite where units have
    nobody, or those who have them cannot do it."""
    idle = {peer: replace(worker, booked_units=0, in_flight=0) for peer, worker in workers.items()}
    links = transfers.idle()
    keep_busy(units, idle, links)
    ends_s = _DryRun(units, idle, links, min(microbatches, RUN)).run()
    if len(ends_s) < min(microbatches, RUN):
        return math.inf
    middle_s = (ends_s[3 * RUN // 4 - 1] - ends_s[RUN // 4 - 1]) / (RUN // 2) if microbatches > RUN else 0.0
    return ends_s[-1] + max(0, microbatches - RUN) * middle_s


class _Pass(IntEnum):
    """What is computed of a microbatch, the most urgent first (`compute/executor.py`)."""

    BACKWARD = 0
    FORWARD = 1


class _Stage:
    """One peer: what waits to be computed, the most urgent first."""

    def __init__(self, unit_s: float) -> None:
        self.unit_s = unit_s
        self.jobs: list[tuple[_Pass, int, Sequence[Wire], int]] = []
        self.is_busy = False


class _DryRun:
    """Of so many microbatches through `workers`, which it books."""

    def __init__(self, units: int, workers: Mapping[PeerId, Replica], transfers: Transfers, microbatches: int) -> None:
        self._fixed: Sequence[PeerId | None] = [None] * units
        self._workers, self._transfers = workers, transfers
        self._stages = {peer: _Stage(worker.assumed_unit_s) for peer, worker in workers.items()}
        self._lines = transfers.lines()
        self._queues = defaultdict[tuple[PeerId, PeerId], deque[Callable[[], None]]](deque)  # on lines that are shared
        self._left = microbatches
        self._now_s, self._numbers = 0.0, 0
        self._events: list[tuple[float, int, Callable[..., None], tuple[object, ...]]] = []
        self._ends_s: list[float] = []

    def run(self) -> Sequence[float]:
        """When each was back, one after another."""
        self._lease()
        while self._events:
            self._now_s, _, does, what = heapq.heappop(self._events)
            does(*what)
        return self._ends_s

    def _at(self, time_s: float, does: Callable[..., None], *what: object) -> None:
        self._numbers += 1
        heapq.heappush(self._events, (time_s, self._numbers, does, what))

    def _lease(self) -> None:
        while self._left:
            route = wire(self._workers, self._fixed, self._transfers, left=self._left)
            if route is None:
                return
            self._left -= 1
            book(route, self._workers, self._transfers, 1)
            self._arrived(_Pass.FORWARD, route, 0)

    def _arrived(self, urgency: _Pass, route: Sequence[Wire], hop: int) -> None:
        stage = self._stages[route[hop][0]]
        self._numbers += 1
        heapq.heappush(stage.jobs, (urgency, self._numbers, route, hop))
        if not stage.is_busy:
            self._compute(stage)

    def _compute(self, stage: _Stage) -> None:
        if stage.jobs:
            stage.is_busy = True
            urgency, _, route, hop = heapq.heappop(stage.jobs)
            share = FORWARD_SHARE if urgency is _Pass.FORWARD else 1 - FORWARD_SHARE
            self._at(
                self._now_s + share * route[hop][1].units * stage.unit_s, self._computed, stage, urgency, route, hop
            )

    def _computed(self, stage: _Stage, urgency: _Pass, route: Sequence[Wire], hop: int) -> None:
        stage.is_busy = False
        if urgency is _Pass.FORWARD and hop + 1 == len(route):
            self._arrived(_Pass.BACKWARD, route, hop)
        elif urgency is _Pass.BACKWARD and hop == 0:
            book(route, self._workers, self._transfers, -1)
            self._ends_s.append(self._now_s)
            self._lease()
        else:
            then = hop + 1 if urgency is _Pass.FORWARD else hop - 1
            self._send((route[hop][0], route[then][0]), partial(self._arrived, urgency, route, then))
        if not stage.is_busy:
            self._compute(stage)

    def _send(self, path: tuple[PeerId, PeerId], arrived: Callable[[], None]) -> None:
        """A message: at once, or where lines are shared behind those that go to the same peer."""
        if not self._lines.takes_turns(*path):
            self._at(self._lines.send(self._now_s, *path)[1], arrived)
            return
        self._queues[path].append(arrived)
        if len(self._queues[path]) == 1:
            self._send_piece(path, PIECES)

    def _send_piece(self, path: tuple[PeerId, PeerId], left: int) -> None:
        """Of a path's first message, of which so many are left: the next takes its turn on the line when this one has left it."""
        leaves_s, arrives_s = self._lines.send(self._now_s, *path, 1 / PIECES)
        if left > 1:
            self._at(leaves_s, self._send_piece, path, left - 1)
        else:
            self._at(arrives_s, self._queues[path][0])
            self._at(leaves_s, self._sent, path)

    def _sent(self, path: tuple[PeerId, PeerId]) -> None:
        self._queues[path].popleft()
        if self._queues[path]:
            self._send_piece(path, PIECES)
