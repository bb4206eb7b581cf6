"""The worker of a peer: one pass at a time, in the order in which live nodes compute.

Either all waiting decode steps together, those over the same units in one pass, or one prompt chunk; in turn where both wait
(`roles/serving/worker.py`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from swarmnode.plan.view import Span
from swarmnode.simulate.clock import SimulatedClock
from swarmnode.simulate.environment.model import Model
from swarmnode.simulate.environment.peers import Peer


@dataclass(slots=True)
class SimulatedJob:
    """`tokens` positions of one session through `span`; `done` when they are through."""

    span: Span
    tokens: int
    done: Callable[[], None]


class SimulatedExecutor:
    """Of one life of a peer: `stop` when it is gone, and nothing that waits is ever done."""

    def __init__(self, clock: SimulatedClock, peer: Peer, model: Model) -> None:
        self._clock = clock
        self._peer = peer
        self._model = model
        self._steps: list[SimulatedJob] = []
        self._prompts: deque[SimulatedJob] = deque()
        self._prompt_next = False
        self._busy = False
        self._stopped = False

    def __repr__(self) -> str:
        return f"<SimulatedExecutor {self._peer.peer}: {len(self._steps)} steps and {len(self._prompts)} prompts wait>"

    def submit(self, job: SimulatedJob) -> None:
        """Hand over a job."""
        if job.tokens == 1:
            self._steps.append(job)
        else:
            self._prompts.append(job)
        if not self._busy:
            self._next()

    def stop(self) -> None:
        """Drop everything."""
        self._stopped = True
        self._steps.clear()
        self._prompts.clear()

    def _next(self) -> None:
        if self._prompts and (self._prompt_next or not self._steps):
            self._prompt_next = False
            batch = [self._prompts.popleft()]
            takes_s = self._prompt_s(batch[0])
        elif self._steps:
            self._prompt_next = True
            batch, self._steps = self._steps, []
            takes_s = self._steps_s(batch)
        else:
            return
        self._busy = True
        self._peer.busy_s += takes_s
        self._clock.after(takes_s, lambda: self._finish(batch))

    def _finish(self, batch: list[SimulatedJob]) -> None:
        if self._stopped:
            return
        for job in batch:
            job.done()  # what they hand over meanwhile is computed together
        self._busy = False
        self._next()

    def _prompt_s(self, job: SimulatedJob) -> float:
        device = self._peer.device
        return device.prompt_s(device.layers(self._model, job.span), job.tokens)

    def _steps_s(self, batch: list[SimulatedJob]) -> float:
        device = self._peer.device
        together: dict[Span, int] = {}
        for job in batch:
            together[job.span] = together.get(job.span, 0) + 1
        return sum(device.decode_s(device.layers(self._model, span), count) for span, count in together.items())
