"""Runs all sessions' waiting work on one span: schedule, run, postprocess. Called from one compute thread.

Decode steps (one new position) of all sessions go through the model together (continuous batching, as in Orca, OSDI 2022);
prompts go one session at a time and in chunks, so that a long one bounds neither memory nor the others' wait.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from swarmnode.compute.model.span import ModelSpan
from swarmnode.compute.serving.cache import CachePool
from swarmnode.compute.serving.cohort import CachedSession, Cohort
from swarmnode.compute.serving.window import Windows
from swarmnode.compute.throttle import Throttle
from swarmnode.errors import ErrorCode, ProtocolError
from swarmnode.ledger import MemoryLedger

WANT_NOTHING, WANT_LAST, WANT_ALL = 0, 1, 2


@dataclass(frozen=True)
class RunnerConfig:
    """Bounds of a runner: memory for KV caches, and positions (rows x T) that one pass may take from a prompt.

    `windows` replaces what sliding layers keep.
    """

    cache_bytes: int
    prefill_positions: int = 2048
    windows: Windows | None = None


@dataclass(frozen=True)
class StepInput:
    """The next positions of one session.

    `x` is ids_BT (int64) where the session's range starts with the embedding, else hidden_BTH. `want` says which logits are
    needed where it ends with the head (0 none, 1 the last position's, 2 all); hidden states always come back whole.
    `reorder`, where not empty, permutes the session's rows first.
    """

    session_id: Hashable
    x: Tensor
    want: int = WANT_LAST
    reorder: tuple[int, ...] = ()


@dataclass(frozen=True)
class StepOutput:
    """`output` is hidden_BTH, or logits_BKV of the K positions wanted. `start` is the position of the work's first input."""

    session_id: Hashable
    start: int
    output: Tensor


@dataclass
class _Opened:
    start: int
    end: int
    cached: CachedSession


class StageRunner:
    """The sessions of one span and their passes through it."""

    def __init__(
        self,
        span: ModelSpan,
        config: RunnerConfig,
        throttle: Throttle | None = None,
        ledger: MemoryLedger | None = None,
    ) -> None:
        self.span = span
        self.config = config
        self._throttle = throttle or Throttle()
        self.pool = CachePool(span, config.cache_bytes, ledger, windows=config.windows)
        self._longest_pass = min(
            (window.room for window in self.pool.windows.values()), default=config.prefill_positions
        )
        self._sessions: dict[Hashable, _Opened] = {}

    def __repr__(self) -> str:
        return f"StageRunner({self.span!r}, {len(self._sessions)} sessions, {self.pool!r})"

    def __contains__(self, session_id: Hashable) -> bool:
        return session_id in self._sessions

    def open(
        self,
        session_id: Hashable,
        *,
        rows: int,
        max_length: int,
        padding: Sequence[int] = (),
        start: int | None = None,
        end: int | None = None,
    ) -> None:
        """Open a session over units [start, end) of the span (default: all). Raises OutOfCache, ProtocolError."""
        start = self.span.start if start is None else start
        end = self.span.end if end is None else end
        if not self.span.start <= start < end <= self.span.end:
            raise ProtocolError(f"units [{start}:{end}) are not held here", code=ErrorCode.WRONG_SPAN)
        if session_id in self._sessions:
            raise ProtocolError("the session is open already")
        if rows < 1 or max_length < 1 or len(padding) not in (0, rows) or any(p < 0 for p in padding):
            raise ProtocolError("a session needs rows, a length and one padding per row")
        layers = self.span.layers_of(start, end)
        cached = self.pool.open(session_id, rows=rows, max_length=max_length, padding=padding, layers=layers)
        self._sessions[session_id] = _Opened(start, end, cached)

    def close(self, session_id: Hashable) -> None:
        """Free a session. An unknown one is no error."""
        if self._sessions.pop(session_id, None) is not None:
            self.pool.close(session_id)

    def reservation_bytes(self, rows: int, max_length: int, start: int, end: int) -> int:
        """What a session over units [start, end) takes of `pool.budget`."""
        return self.pool.bytes_of(self.span.layers_of(start, end), rows, max_length)

    def length(self, session_id: Hashable) -> int:
        """Positions held."""
        return self._opened(session_id).cached.length

    def units(self, session_id: Hashable) -> int:
        """How many units its positions pass."""
        opened = self._opened(session_id)
        return opened.end - opened.start

    def truncate(self, session_id: Hashable, length: int) -> None:
        """Forget the positions from `length` on."""
        self._opened(session_id)
        self.pool.truncate(session_id, length)

    @torch.inference_mode()
    def run(self, works: Sequence[StepInput]) -> list[StepOutput]:
        """Run all works, at most one per session; results in the order of the works. Raises ProtocolError on a bad one."""
        for work in works:
            self._check(work)
        if len({work.session_id for work in works}) < len(works):
            raise ValueError("two works of one session in one run")
        results: dict[Hashable, StepOutput] = {}
        for batch in self._schedule(works):
            opened, positions = self._sessions[batch[0].session_id], batch[0].x.shape[1]
            with self._throttle.pass_over(opened.end - opened.start, positions):
                results.update(self._run_batch(batch) if positions == 1 else self._run_prompt(batch[0]))
        return [results[work.session_id] for work in works]

    def _schedule(self, works: Sequence[StepInput]) -> list[list[StepInput]]:
        """Works that go through the model together: decode steps over the same units; each longer one alone."""
        together: dict[tuple[int, int], list[StepInput]] = {}
        alone: list[list[StepInput]] = []
        for work in works:
            if work.reorder:
                self.pool.reorder(work.session_id, work.reorder)
            opened = self._sessions[work.session_id]
            if work.x.shape[1] == 1:
                together.setdefault((opened.start, opened.end), []).append(work)
            else:
                alone.append([work])
        return [*together.values(), *alone]

    def _run_batch(self, works: Sequence[StepInput]) -> dict[Hashable, StepOutput]:
        """One new position of each session."""
        opened = self._sessions[works[0].session_id]
        work_of = {self._sessions[work.session_id].cached: work for work in works}
        results: dict[Hashable, StepOutput] = {}
        for cohort in self.pool.prepare(list(work_of), 1):
            wants_logits = any(work_of[member].want for member in cohort.present)
            output = self._forward(opened, cohort, _gather(cohort, work_of), keep_last=int(wants_logits))
            for member in cohort.present:
                session_id = work_of[member].session_id
                results[session_id] = StepOutput(session_id, member.length - 1, output[member.row_slice])
        return results

    def _run_prompt(self, work: StepInput) -> dict[Hashable, StepOutput]:
        """Many new positions of one session, in chunks."""
        opened = self._sessions[work.session_id]
        start = opened.cached.length
        rows, length = work.x.shape[:2]
        chunk = max(min(self.config.prefill_positions // rows, self._longest_pass), 1)
        outputs = []
        for begin in range(0, length, chunk):
            x = work.x[:, begin : begin + chunk]
            is_last = begin + chunk >= length
            keep_last = -1 if work.want == WANT_ALL else int(work.want == WANT_LAST and is_last)
            for cohort in self.pool.prepare([opened.cached], x.shape[1]):
                outputs.append(self._forward(opened, cohort, x, keep_last=keep_last))
        return {work.session_id: StepOutput(work.session_id, start, torch.cat(outputs, dim=1))}

    def _forward(self, opened: _Opened, cohort: Cohort, x: Tensor, *, keep_last: int) -> Tensor:
        """One pass of a cohort, which advances it."""
        count = x.shape[1]
        output = self.span.forward(
            x.to(self.span.device),
            cache=cohort,
            attention_mask=cohort.attention_mask(count),
            position_ids=cohort.position_ids(count),
            keep_last=keep_last,
            start=opened.start,
            end=opened.end,
        )
        cohort.advance(count)
        return output

    def _check(self, work: StepInput) -> None:
        opened = self._opened(work.session_id)
        cached, shape = opened.cached, work.x.shape
        if opened.start == 0:
            if len(shape) != 2 or work.x.is_floating_point():
                raise ProtocolError(f"token ids of shape (rows, T) are needed, not {work.x.dtype} {tuple(shape)}")
        elif len(shape) != 3 or shape[2] != self.span.hidden_size or not work.x.is_floating_point():
            raise ProtocolError(
                f"hidden states of shape (rows, T, {self.span.hidden_size}) are needed, not {tuple(shape)}"
            )
        if shape[0] != cached.rows or shape[1] < 1:
            raise ProtocolError(f"the session has {cached.rows} rows, the input is {tuple(shape)}")
        if cached.length + shape[1] > cached.max_length:
            raise ProtocolError(f"the session ends at position {cached.max_length}", code=ErrorCode.TOO_LARGE)
        if opened.start == 0 and not bool(((work.x >= 0) & (work.x < self.span.vocab_size)).all()):
            raise ProtocolError(f"token ids must lie in [0, {self.span.vocab_size})")
        if work.reorder and (len(work.reorder) != cached.rows or not all(0 <= r < cached.rows for r in work.reorder)):
            raise ProtocolError(f"{work.reorder} does not permute {cached.rows} rows")

    def _opened(self, session_id: Hashable) -> _Opened:
        try:
            return self._sessions[session_id]
        except KeyError:
            raise ProtocolError("no such session", code=ErrorCode.NO_SESSION) from None


def _gather(cohort: Cohort, work_of: Mapping[CachedSession, StepInput]) -> Tensor:
    """The inputs of all rows of a cohort; rows of absent members repeat another's."""
    if len(cohort.members) == 1:
        return work_of[cohort.members[0]].x
    stand_in = next(iter(work_of.values())).x[:1]
    return torch.cat(
        [
            work_of[member].x if member in cohort.present else stand_in.repeat_interleave(member.rows, dim=0)
            for member in cohort.members
        ]
    )


def is_finite(tensor: Tensor) -> bool:
    """Whether no element is NaN or infinite. One sum finds it: both survive additions, and no mask is made."""
    total = tensor.sum(dtype=torch.float32)
    return bool(torch.isfinite(total)) or bool(torch.isfinite(tensor).all())
