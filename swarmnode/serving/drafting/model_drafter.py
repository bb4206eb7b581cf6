"""Drafter that a small language model computes ahead for.

    push, propose -> text and wanted guesses -> the model continues it, in the background -> wake -> propose

`propose` returns guesses that are ready. The model goes on in the background, a few tokens at a time, and the session is woken when
there are more. Pure state on the event loop; the model computes elsewhere.

Draft model of a node: its greedy continuations of texts are guesses.

It computes on the executor of the device, at the lowest urgency: steps of sessions go first, and a busy device guesses nothing.
Each drafting session has a KV cache of its own, which is cut back behind wrong guesses.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch

from swarmnode.compute.executor import CLOSE_TIMEOUT_S, Executor, Urgency
from swarmnode.compute.serving.cohort import LONGEST_SHARED
from swarmnode.compute.serving.loading import load_span
from swarmnode.compute.serving.runner import RunnerConfig, StageRunner, StepInput
from swarmnode.counting import common_beginning
from swarmnode.errors import LocalError
from swarmnode.ledger import Account, Reservation
from swarmnode.measuring.draft_part import DraftPart
from swarmnode.measuring.hardware import LentDevice

STRIDE = 4  # guesses that are computed together
TEXT_BYTES = 40  # of memory for each token of a text: an entry of a list, and an int

log = logging.getLogger(__name__)


class Continued(NamedTuple):
    """Result of continuing a text.

    Args:
        cached: Number of first positions that the model's cache holds now.
        ids: Most likely tokens after the text, one after another; none while the model still reads the text.
        seconds: Time that it took; 0 if the model read a part of the prompt before.
    """

    cached: int
    ids: tuple[int, ...]
    seconds: float


GoOn = Callable[[int, Sequence[int], int], "asyncio.Future[Continued]"]
"""Function of (start, ids, count) that continues a text by at most `count` tokens. The model's cache holds the positions before
`start`, and `ids` are the tokens from there on, at least one"""


class ModelDrafter:
    """Drafter of one session that guesses what a model would write.

    Args:
        go_on: Continues the text in the background.
        end: Frees what the model keeps for the session.
        limit: Positions that the model can have in this session.
        took: Function of the number of guesses and the seconds that computing them took; called after each computation.
    """

    name = "model"

    def __init__(self, go_on: GoOn, end: Callable[[], None], limit: int, took: Callable[[int, float], None]) -> None:
        self._go_on = go_on
        self._end = end
        self._limit = limit
        self._took = took
        self._wake: Callable[[], None] = lambda: None
        self._ids: list[int] = []  # accepted tokens, and then the model's guesses or those in flight
        self._accepted = 0
        self._foreign_end = 0  # length of `_ids` up to the last guess in flight that is of another drafter
        self._cached = 0  # first positions of `_ids` that the model's cache holds
        self._unchanged = 0  # first positions of `_ids` that are as they were when the present computation began
        self._wanted = 0  # length of `_ids` that the model shall reach
        self._running: asyncio.Future[Continued] | None = None
        self._over = False

    def listen(self, wake: Callable[[], None]) -> None:
        """Call `wake` on the loop whenever more guesses are ready."""
        self._wake = wake

    def close(self) -> None:
        """Guess nothing any more, and free the model's cache. Calling it again changes nothing."""
        if not self._over:
            self._over = True
            self._end()

    def push(self, ids: Sequence[int]) -> None:
        """Append accepted tokens to the text; the prompt comes first."""
        self._put(ids)
        self._accepted += len(ids)

    def cut(self, length: int) -> None:
        """Forget all but the first `length` accepted tokens."""
        self._accepted = min(self._accepted, length)
        self._cut(length)

    def propose(self, guessed: Sequence[int], count: int) -> list[int]:
        """Return at most `count` tokens that may follow the accepted tokens and then `guessed`: those that are ready.

        The model computes them and a few more in the background. Returns an empty list if none is ready.
        """
        begin = self._accepted + len(guessed)
        if begin < self._foreign_end:  # guesses left the flight without a verdict: a new epoch began
            self._cut(begin)
        if self._put(guessed):
            self._foreign_end = begin
        self._wanted = begin + count + STRIDE
        self._start()
        return self._ids[begin : begin + count]

    def _put(self, ids: Sequence[int]) -> bool:
        """Set the tokens behind the accepted ones. Returns whether any of them is not as guessed before; else the guesses behind
        them stay."""
        at = self._accepted
        same = common_beginning(self._ids[at : at + len(ids)], ids)
        if same < len(ids):
            self._cut(at + same)
            self._ids.extend(ids[same:])
        return same < len(ids)

    def _cut(self, length: int) -> None:
        del self._ids[length:]
        self._foreign_end = min(self._foreign_end, length)
        self._cached = min(self._cached, length)
        self._unchanged = min(self._unchanged, length)

    def _start(self) -> None:
        """Have the model go on, unless it does so already, or has reached the wanted length."""
        length = len(self._ids)
        count = min(self._wanted - length, self._limit - length, STRIDE)
        if self._over or self._running is not None or count <= 0 or not length:
            return
        self._unchanged = length
        start = min(self._cached, length - 1)
        self._running = self._go_on(start, self._ids[start:], count)
        self._running.add_done_callback(partial(self._computed, length))

    def _computed(self, length: int, future: asyncio.Future[Continued]) -> None:
        """Take the continuation of the first `length` tokens, as far as these are still the text."""
        self._running = None
        if self._over:
            return
        if future.cancelled() or (error := future.exception()) is not None:
            log.info("the draft model guesses no more for a session: %s", None if future.cancelled() else error)
            self.close()
            return
        done = future.result()
        before = len(self._ids)
        if self._unchanged < length:
            self._cached = min(done.cached, self._unchanged)
        else:
            came = self._ids[length:]  # accepted meanwhile, or guessed by others
            same = common_beginning(came, done.ids)
            if same == len(came):
                self._cached = done.cached
                self._ids.extend(done.ids[same:])
            else:
                self._cached = min(done.cached, length + same)
        if done.seconds:
            self._took(len(done.ids), done.seconds)
        self._start()
        if len(self._ids) > before:
            self._wake()


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
