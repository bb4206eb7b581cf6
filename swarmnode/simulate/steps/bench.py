"""The bench of a training stage: one pass at a time, gradients before new microbatches (`compute/executor.py`)."""

from __future__ import annotations

import heapq
import itertools

from swarmnode.compute.executor import Urgency
from swarmnode.simulate.clock import Action, SimulatedClock
from swarmnode.simulate.environment.peers import Peer


class SimulatedBench:
    """Of one life of a peer: `stop` when it is gone."""

    def __init__(self, clock: SimulatedClock, peer: Peer) -> None:
        self._clock = clock
        self._peer = peer
        self._jobs: list[tuple[Urgency, int, float, Action]] = []
        self._numbers = itertools.count()
        self._busy = False
        self._stopped = False

    def __repr__(self) -> str:
        return f"<SimulatedBench of {self._peer.peer}: {len(self._jobs)} jobs wait>"

    def submit(self, urgency: Urgency, takes_s: float, done: Action) -> None:
        """Compute for so long, then `done`."""
        heapq.heappush(self._jobs, (urgency, next(self._numbers), takes_s, done))
        if not self._busy:
            self._next()

    def stop(self) -> None:
        """Drop everything."""
        self._stopped = True
        self._jobs.clear()

    def _next(self) -> None:
        if not self._jobs:
            return
        _, _, takes_s, done = heapq.heappop(self._jobs)
        self._busy = True
        self._peer.busy_s += takes_s
        self._clock.after(takes_s, lambda: self._finish(done))

    def _finish(self, done: Action) -> None:
        if self._stopped:
            return
        self._busy = False
        done()
        if not self._busy:
            self._next()
