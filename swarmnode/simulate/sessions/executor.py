"""Simulated worker of a peer: one pass at a time, in the order of the nodes' scheduler (`plan/serving/scheduler.py`)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from swarmnode.compute.serving.window import LONGEST_SHARED
from swarmnode.config import ServerConfig
from swarmnode.plan.serving.scheduler import PassScheduler
from swarmnode.plan.view import Span
from swarmnode.plan.virtual_clock import VirtualClock
from swarmnode.simulate.environment.model import Model
from swarmnode.simulate.environment.peers import Peer


@dataclass(slots=True)
class SimulatedJob:
    """Job of a worker: `tokens` positions of `session` through `span`. `stages_after` hops follow; `done` is called at the end."""

    session: int
    span: Span
    tokens: int
    done: Callable[[], None]
    stages_after: int = 0


class SimulatedExecutor:
    """Simulated worker of a peer: it computes the waiting jobs of sessions in passes, from the peer's start until it stops."""

    def __init__(self, clock: VirtualClock, peer: Peer, model: Model) -> None:
        self._clock = clock
        self._peer = peer
        self._model = model
        self._scheduler = PassScheduler(longest_step=LONGEST_SHARED, longest_chunk=ServerConfig.longest_chunk_tokens)
        self._waiting: dict[int, deque[SimulatedJob]] = {}  # by session
        self._busy = False
        self._stopped = False

    def __repr__(self) -> str:
        return f"<SimulatedExecutor {self._peer.peer}: {self._scheduler!r}>"

    def submit(self, job: SimulatedJob) -> None:
        """Queue `job`; its `done` is called when all its positions have passed, unless the worker is stopped before."""
        self._waiting.setdefault(job.session, deque()).append(job)
        self._scheduler.add(job.session, job.tokens, stages_after=job.stages_after)
        if not self._busy:
            self._next()

    def stop(self) -> None:
        """Drop all jobs; their `done` is never called."""
        self._stopped = True

    def _next(self) -> None:
        counts = self._scheduler.next()
        if not counts:
            return
        self._scheduler.took(counts)
        takes_s = self._pass_s(counts)
        self._busy = True
        self._peer.busy_s += takes_s
        self._clock.after(takes_s, lambda: self._finish(counts, takes_s))

    def _finish(self, counts: dict[int, int], took_s: float) -> None:
        if self._stopped:
            return
        self._scheduler.ran(len(counts) * max(counts.values()), took_s)
        for session, count in counts.items():
            self._advance(session, count)  # jobs submitted meanwhile are computed together
        self._busy = False
        self._next()

    def _advance(self, session: int, count: int) -> None:
        jobs = self._waiting[session]
        while count and jobs:
            job = jobs[0]
            passed = min(count, job.tokens)
            job.tokens -= passed
            count -= passed
            if not job.tokens:
                jobs.popleft()
                job.done()
        if not jobs:
            self._waiting.pop(session, None)

    def _pass_s(self, counts: dict[int, int]) -> float:
        """Return the seconds of a pass with `counts` positions by session. Sessions over the same layers are computed together."""
        device, together = self._peer.device, dict[Span, list[int]]()
        for session, count in counts.items():
            together.setdefault(self._waiting[session][0].span, []).append(count)
        return sum(
            device.decode_s(layers, len(group)) if max(group) == 1 else device.prompt_s(layers, sum(group))
            for layers, group in ((device.layers(self._model, span), group) for span, group in together.items())
        )
