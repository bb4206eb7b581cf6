"""Draft model of a node: its greedy continuations of texts are guesses.

It computes on the executor of the device, at the lowest urgency: steps of sessions go first, and a busy device guesses nothing.
Each drafting session has a KV cache of its own, which is cut back behind wrong guesses.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Callable, Sequence
from functools import partial

import torch

from swarmnode.compute.executor import CLOSE_TIMEOUT_S, Executor, Urgency
from swarmnode.compute.serving.loading import load_span
from swarmnode.compute.serving.runner import RunnerConfig, StageRunner, StepInput
from swarmnode.compute.serving.window import LONGEST_SHARED
from swarmnode.errors import LocalError
from swarmnode.ledger import Account, Reservation
from swarmnode.measuring.draft_part import DraftPart
from swarmnode.measuring.hardware import LentDevice
from swarmnode.serving.drafting.model_drafter import Continued, ModelDrafter

MAX_SESSIONS = 16  # that guess at the same time; more guess without the model
CHUNK = 128  # positions of one pass: a prompt must not hold up the steps of others for long


class DraftModel:
    """Small language model that writes guesses for several sessions. Made by `load`, ended by `close`. Used on the loop. `name` is
    announced."""

    def __init__(self, name: str, runner: StageRunner, executor: Executor, memory: Sequence[Reservation] = ()) -> None:
        self.name = name
        self._runner = runner
        self._executor = executor
        self._memory = memory
        self._keys = itertools.count()
        self._limits: dict[int, int] = {}  # by session: its most positions; only the loop changes it

    def __repr__(self) -> str:
        return f"<DraftModel {self.name} {self._runner.span!r}, {len(self._limits)} sessions>"

    @classmethod
    async def load(cls, part: DraftPart, lent: LentDevice, executor: Executor, *, kv: str, capture: bool) -> DraftModel:
        """Load the model onto a device, and count its memory there. Raises CheckpointError, LocalError."""
        async with contextlib.AsyncExitStack() as undo:  # a pause may cancel this in the middle
            weights = lent.ledger.count(Account.WEIGHTS, part.weight_bytes)
            undo.callback(weights.release)
            device, units = lent.device.torch_device, part.checkpoint.units
            load = partial(
                load_span, part.checkpoint, 0, units, device=device, dtype=part.dtype, products=part.products
            )
            span = await asyncio.to_thread(load)
            undo.callback(span.close)
            weights.count(span.weight_bytes)
            await asyncio.to_thread(span.packings.at_once.run)
            passes = lent.ledger.count(Account.ACTIVATIONS, span.pass_bytes(CHUNK, 1))
            bounds = RunnerConfig(part.cache_bytes, prefill_positions=CHUNK, capture=capture, kv=kv)
            runner = StageRunner(span, bounds, lent.throttle, lent.ledger)
            model = cls(part.name, runner, executor, (weights, passes))
            undo.pop_all()
        return model

    def open(self, max_length: int, took: Callable[[int, float], None]) -> ModelDrafter | None:
        """Return the drafter of a new session of at most `max_length` positions; None if too many sessions guess already.

        The drafter calls `took` with the number of guesses and the seconds that computing them took.
        """
        if len(self._limits) >= MAX_SESSIONS:
            return None
        key, limit = next(self._keys), min(max_length, self._runner.span.position_limit or max_length)
        self._limits[key] = limit
        return ModelDrafter(partial(self._go_on, key), partial(self._drop, key), limit, took)

    def _go_on(self, key: int, start: int, ids: Sequence[int], count: int) -> asyncio.Future[Continued]:
        """Continue a text whose tokens from `start` on are `ids`; see `GoOn`."""
        work = partial(self._compute, key, start, ids, count)
        return self._executor.call(Urgency.IDLE, work, kind="draft", owner=f"draft {key}", size=len(ids))

    def _drop(self, key: int) -> None:
        """Free the cache of a session."""
        if self._limits.pop(key, None) is not None:
            self._executor.call(Urgency.CONTROL, partial(self._runner.close, key), kind="end a draft")

    def _compute(self, key: int, start: int, ids: Sequence[int], count: int) -> Continued:
        """Run on the compute thread: one pass over at most CHUNK positions, and if these are the last ones a pass for each more
        guess, as long as no other work has come. Raises LocalError if the session was dropped, Busy if no cache is free."""
        limit = self._limits.get(key)
        if limit is None:
            raise LocalError("the session has ended, and its draft with it")
        began_s, runner = self._executor.clock(), self._runner
        if key not in runner:
            runner.open(key, rows=1, max_length=limit)
        end = start + min(len(ids), CHUNK)
        new = [self._next(key, start, ids[:CHUNK])]
        if end < start + len(ids):
            return Continued(end, (), 0.0)
        while len(new) < count and not self._executor.queued:
            new.append(self._next(key, end, new[-1:]))
            end += 1
        took_s = self._executor.clock() - began_s if len(ids) <= LONGEST_SHARED else 0.0
        return Continued(end, tuple(new), took_s)

    def _next(self, key: int, start: int, ids: Sequence[int]) -> int:
        """Return the most likely token after `ids`, which stand at position `start`."""
        work = StepInput(key, torch.tensor([ids]), start=start, truncate_to=start)
        (result,) = self._runner.run([work])
        return int(result.output[0, -1].argmax())

    async def close(self) -> None:
        """Stop guessing, and free all memory."""
        self._limits.clear()
        passed = self._executor.call(Urgency.CONTROL, lambda: None, kind="end drafts")  # behind what runs
        await asyncio.wait({passed}, timeout=CLOSE_TIMEOUT_S)
        self._runner.close_all()
        for reservation in self._memory:
            reservation.release()
