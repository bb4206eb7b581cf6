"""Runs work of several sessions on one span: group, run, postprocess. Called from one compute thread.

Short steps (one new position, or a few: drafts) go through the model together, and so do chunks of prompts. A prompt that is too
long for one pass goes alone and in chunks. The scheduler decides before which sessions wait for others
(`plan/serving/scheduler.py`).

Counts of the experts that guesses wake in mixtures of experts: a guess may need weights that no other row of its pass needs.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from swarmnode.compute.device import trim_heap
from swarmnode.compute.executor import forget_traceback, is_device_fault
from swarmnode.compute.model.family import switching_position
from swarmnode.compute.model.span import ModelSpan
from swarmnode.compute.serving.cache import CachePool
from swarmnode.compute.serving.captured_decode import CapturedDecode, StepShape
from swarmnode.compute.serving.cohort import LONGEST_SHARED, CachedSession, Cohort, Windows
from swarmnode.compute.serving.device_transfers import CapturedWorks
from swarmnode.compute.serving.expert_counts import ExpertCounts, position_masks
from swarmnode.compute.serving.graphs.graph_passes import SpanGraphs
from swarmnode.compute.serving.states import KEPT_INPUTS
from swarmnode.compute.stopwatch import Throttle
from swarmnode.config import PLAIN
from swarmnode.errors import ErrorCode, ProtocolError
from swarmnode.ledger import MemoryLedger

log = logging.getLogger(__name__)

WANT_NOTHING, WANT_LAST, WANT_ALL = 0, 1, 2
TRIMMED_POSITIONS = 256  # of a prompt; freed activations of one that long go back to the system


@dataclass(frozen=True)
class RunnerConfig:
    """Bounds of a runner: memory for KV caches, and positions (rows x T) that one pass may take from a prompt.

    `windows` replaces the windows of sliding layers. `capture` replays decode steps: as CUDA graphs, or as flat
    programs on the CPU. `kv` is the
    form of the caches: "plain" or "int8".
    """

    cache_bytes: int
    prefill_positions: int = 2048
    windows: Windows | None = None
    capture: bool = True
    kv: str = PLAIN


@dataclass(frozen=True)
class StepInput:
    """The next positions of one session.

    `x` is ids_BT (int64) if the session's range starts with the embedding, else hidden_BTH. `want` says which logits are
    needed if it ends with the head (0 none, 1 the last position's, 2 all); hidden states always come back whole.
    Before the pass, the positions from `truncate_to` on are forgotten, and `reorder`, unless empty, permutes the session's rows.
    Both stay in effect even if the pass fails. `start`, if given, must then be the session's next position. The last `guessed`
    positions hold guesses.
    """

    session_id: Hashable
    x: Tensor
    want: int = WANT_LAST
    reorder: tuple[int, ...] = ()
    start: int | None = None
    truncate_to: int | None = None
    guessed: int = 0

    @property
    def count(self) -> int:
        """Number of new positions."""
        return self.x.shape[1]

    @property
    def head_positions(self) -> int:
        """Number of last positions whose logits are wanted."""
        return {WANT_NOTHING: 0, WANT_LAST: 1, WANT_ALL: self.count}[self.want]


@dataclass(frozen=True)
class StepOutput:
    """Result of a step: hidden_BTH, or logits_BKV of the K positions wanted. `start` is the step's first position.

    `left_BKH` are the states that left the last layer at these K positions, if the span has a reader of them, else None.
    """

    session_id: Hashable
    start: int
    output: Tensor
    left_BKH: Tensor | None = None


@dataclass
class _Opened:
    start: int
    end: int
    cached: CachedSession
    adapter: str


class StageRunner:
    """Runner of inference sessions through the layers that one device holds; it keeps their KV caches."""

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
        self._goes_alone, calls = span.family.computes_again, span.family.calls
        sees_all = calls is not None and not calls.has_own_caches
        self.pool = CachePool(
            span,
            config.cache_bytes,
            ledger,
            windows={} if sees_all else config.windows,  # windows are known by the layers' own numbers
            kv=PLAIN if self._goes_alone else config.kv,
        )
        self._longest_pass = min(
            (window.room for window in self.pool.windows.values()), default=config.prefill_positions
        )
        self._switch = switching_position(span.config)
        self._longest_shared = min(LONGEST_SHARED, self._longest_pass)
        self._sessions: dict[Hashable, _Opened] = {}
        self._adapter_of: dict[CachedSession, str] = {}  # of the sessions that have one
        if ledger is not None:
            span.adapters.ledger = ledger
        # Programs of a step read whole buffers of columns, whose number equal bits of plain products depend on. A step that the CPU
        # computes a part of cannot be recorded on a card.
        is_bound = span.family.keeps_states or span.has_equal_rows or bool(span.split_experts)
        may_record = calls is None and not is_bound
        is_captured = config.capture and may_record and span.device.type in ("cuda", "cpu")
        takes_graphs = may_record and config.kv == PLAIN and (span.has_same_bits or span.has_exact_products)
        self.experts = ExpertCounts(span.stack)
        self.captured = CapturedDecode(span, ledger) if is_captured else None
        self.graphs = SpanGraphs(span, self.pool.windows, ledger) if takes_graphs else None
        self.bits, self.bits_of_graph = b"", False  # class of equal bits, and whether a graph of ggml has it
        self.captured_works = CapturedWorks(ledger) if is_captured and span.device.type == "cuda" else None

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
        adapter: str = "",
    ) -> None:
        """Open a session over layers [start, end) of the span (default: all), with the loaded adapter of this name ("": none).

        Raises OutOfCache if the budget has no room, ProtocolError if the arguments are invalid or the session is open already.
        """
        start = self.span.start if start is None else start
        end = self.span.end if end is None else end
        if not self.span.start <= start < end <= self.span.end:
            raise ProtocolError(f"this node does not hold layers [{start}:{end})", code=ErrorCode.WRONG_SPAN)
        if session_id in self._sessions:
            raise ProtocolError("the session is open already")
        if rows < 1 or max_length < 1 or len(padding) not in (0, rows) or any(p < 0 for p in padding):
            raise ProtocolError("a session needs rows, a length and one padding per row")
        if adapter and adapter not in self.span.adapters:
            raise ProtocolError("the session's adapter is not loaded", code=ErrorCode.INTERNAL)
        layers = self.span.layers_of(start, end)
        cached = self.pool.open(session_id, rows=rows, max_length=max_length, padding=padding, layers=layers)
        self._sessions[session_id] = _Opened(start, end, cached, adapter)
        if adapter:
            self._adapter_of[cached] = adapter

    def extend(self, session_id: Hashable, max_length: int) -> None:
        """Let a session have `max_length` positions, unless it may have more already. Raises OutOfCache, ProtocolError."""
        self._opened(session_id)
        self.pool.extend(session_id, max_length)

    def fork(self, source_id: Hashable, session_id: Hashable, length: int) -> None:
        """Let a newly opened session begin with the first `length` positions of another one over the same layers.

        Raises ProtocolError if the other session does not hold them or differs in layers, rows or padding, OutOfCache.
        """
        source, opened = self._opened(source_id), self._opened(session_id)
        if (source.start, source.end, source.cached.padding) != (opened.start, opened.end, opened.cached.padding):
            raise ProtocolError("a session cannot begin with another one's text if their layers or rows differ")
        self.pool.fork(source_id, session_id, length)

    def close(self, session_id: Hashable) -> None:
        """Free a session; no error if it is unknown."""
        opened = self._sessions.pop(session_id, None)
        if opened is not None:
            self._adapter_of.pop(opened.cached, None)
            self.pool.close(session_id)

    def close_all(self, *, keep_span: bool = False) -> None:
        """Free all sessions, and the span unless `keep_span`. Nothing can run here afterwards."""
        self._sessions.clear()
        self._adapter_of.clear()
        self.pool.close_all()
        if self.captured is not None:
            self.captured.close()
        if self.captured_works is not None:
            self.captured_works.clear()
        if self.graphs is not None:
            self.graphs.close()
        self.span.adapters.clear()
        if not keep_span:
            self.span.close()

    def reservation_bytes(self, rows: int, max_length: int, start: int, end: int) -> int:
        """Return the bytes that a session over layers [start, end) takes of `pool.budget`."""
        return self.pool.bytes_of(self.span.layers_of(start, end), rows, max_length)

    def length(self, session_id: Hashable) -> int:
        """Return the number of positions that a session holds. Raises ProtocolError if it is unknown."""
        return self._opened(session_id).cached.end

    def has_equal_bits(self, session_id: Hashable) -> bool:
        """Return whether all that a session has computed has the bits of the class `bits`; False if it is unknown. Products of
        adapters have no class."""
        opened = self._sessions.get(session_id)
        return (
            opened is not None and bool(self.bits) and not opened.adapter and opened.cached.ways <= {self.bits_of_graph}
        )

    def units(self, session_id: Hashable) -> int:
        """Return the number of layers in a session's range. Raises ProtocolError if it is unknown."""
        opened = self._opened(session_id)
        return opened.end - opened.start

    def truncate(self, session_id: Hashable, length: int) -> None:
        """Forget a session's positions from `length` on. Raises ProtocolError if it is unknown or cannot be cut to that."""
        self._opened(session_id)
        self.pool.truncate(session_id, length)

    def run(self, works: Sequence[StepInput]) -> list[StepOutput]:
        """Run all works, at most one per session. Returns results in the order of the works; raises the first error among them."""
        results = []
        for result in self.run_each(works):
            if isinstance(result, Exception):
                raise result
            results.append(result)
        return results

    @torch.inference_mode()
    def run_each(self, works: Sequence[StepInput]) -> list[StepOutput | Exception]:
        """Run all works, at most one per session. Returns for each its result, or its error, in the order of the works.

        Works are checked first: one that is refused gets a ProtocolError and takes part in no pass. A failed work keeps what it
        asked for before the pass (`truncate_to`, `reorder`). An input may make a whole pass fail in an unforeseen way. The pass's
        works are then tried again in halves, down to each alone, so that only the guilty ones fail: at most twice as many passes
        as there are works.

        Raises ValueError for two works of one session, and the error of a pass that lost the device: all its sessions are lost.
        """
        if len({work.session_id for work in works}) < len(works):
            raise ValueError("two works of one session in one run")
        outcomes: dict[Hashable, StepOutput | Exception] = {}
        ready: list[StepInput] = []
        for work in works:
            try:
                self._check(work)
                # Once, however often the pass is tried.
                if work.truncate_to is not None:
                    self.pool.truncate(work.session_id, work.truncate_to)
                if work.reorder:
                    self.pool.reorder(work.session_id, work.reorder)
                ready.append(self._follow_states(work))
            except ProtocolError as error:
                outcomes[work.session_id] = error
        for together in self._group(ready):
            outcomes.update(self._run_together(together))
        return [self._without_owed(work, outcomes[work.session_id]) for work in works]

    def _follow_states(self, work: StepInput) -> StepInput:
        """Take a snapshot of a session's recurrent states if it is due, and return its work with the owed inputs before it."""
        cached = self._sessions[work.session_id].cached
        history = cached.history
        if history is None:
            return work
        is_due = cached.length - history.base(cached.length) >= history.distance
        if is_due or work.guessed or work.count > self._longest_shared:
            self.pool.take_snapshot(cached, is_guessed=work.guessed > 0)
        if history.owed is None:
            return work
        return replace(work, x=torch.cat([history.owed, work.x.to(history.owed.device)], dim=1))

    def _without_owed(self, work: StepInput, outcome: StepOutput | Exception) -> StepOutput | Exception:
        """Return the outcome of a work without the positions that came before its own."""
        if isinstance(outcome, Exception):
            return outcome
        opened = self._sessions[work.session_id]
        is_hidden = opened.end < self.span.family.units
        more = outcome.output.shape[1] - (work.count if is_hidden else work.head_positions)
        if more <= 0:
            return outcome
        left = outcome.left_BKH
        start = opened.cached.length - work.count
        return StepOutput(work.session_id, start, outcome.output[:, more:], None if left is None else left[:, more:])

    def _group(self, works: Sequence[StepInput]) -> list[list[StepInput]]:
        """Group works that go through the model together.

        A group has the same layers, and only short steps or only chunks. It has one adapter if the model cannot share a pass
        among several.
        """
        alike: dict[tuple[Hashable, ...], list[StepInput]] = {}
        is_shared = self.span.adapters.are_shared
        for work in works:
            opened = self._sessions[work.session_id]
            is_short, is_early = work.count <= self._longest_shared, self._before_switch(opened.cached) > 0
            # A graph computes the model alone, with other bits than torch's way.
            adapter = opened.adapter if not is_shared else "any" if opened.adapter and self.graphs is not None else ""
            # Stand-ins would change recurrent states: steps and chunks of such sessions that share a pass are equally long.
            alone: Hashable = work.session_id if self._goes_alone else None
            if opened.cached.history is not None:
                is_alike = work.count <= KEPT_INPUTS and not self._goes_singly(opened.cached, work.count)
                alone = (work.count, opened.cached.length > 0) if is_alike else work.session_id
            alike.setdefault((opened.start, opened.end, adapter, is_short, is_early, alone), []).append(work)
        groups: list[list[StepInput]] = []
        for some in alike.values():
            # Together go those that can be filled up to the longest one, unless that is too long for one pass.
            longest, rows = max(work.count for work in some), sum(work.x.shape[0] for work in some)
            most = max(self._longest_shared, min(self._longest_pass, self.config.prefill_positions // rows))
            fits = [longest <= most and self._room(work) >= longest for work in some]
            if any(fits):
                groups.append([work for work, is_together in zip(some, fits, strict=True) if is_together])
            groups += [[work] for work, is_together in zip(some, fits, strict=True) if not is_together]
        return groups

    def _goes_singly(self, cached: CachedSession, count: int) -> bool:
        """Return whether `count` new positions go through the layers one by one, as the family's code cannot continue a recurrent
        state with several at once."""
        return self.span.steps_singly and count > 1 and cached.history is not None and cached.length > 0

    def _room(self, work: StepInput) -> int:
        """Return the most positions that a session's step may have after padding in a shared pass.

        Positions beyond the session's reserved length may also be beyond the model's.
        """
        cached = self._sessions[work.session_id].cached
        return min(cached.max_length - cached.length, self._before_switch(cached) or cached.max_length)

    def _before_switch(self, cached: CachedSession) -> int:
        """Return how many more positions the session can take before LongRoPE switches its frequencies: 0 if they have been
        switched, `max_length` if the model does not switch them."""
        if self._switch is None:
            return cached.max_length
        return max(0, self._switch - (cached.length - min(cached.padding)))

    def _run_together(self, works: Sequence[StepInput]) -> dict[Hashable, StepOutput | Exception]:
        """Run new positions of several sessions over the same layers, or any number of positions of one session alone."""
        opened, longest = self._sessions[works[0].session_id], max(work.count for work in works)
        outcomes: dict[Hashable, StepOutput | Exception] = {}
        try:
            with self._throttle.pass_over(opened.end - opened.start, longest):
                is_long = longest > min(self._longest_shared, self._room(works[0]))
                if len(works) == 1 and (is_long or self._goes_singly(opened.cached, longest)):
                    outcomes[works[0].session_id] = self._run_prompt(works[0])
                else:
                    work_of = {self._sessions[work.session_id].cached: work for work in works}
                    # A number of columns that is captured, if all have room for that many.
                    columns = longest if self.captured is None else self.captured.columns_for(longest)
                    if columns > self._longest_shared or any(self._room(work) < columns for work in works):
                        columns = longest
                    for cohort in self.pool.prepare(list(work_of), columns):
                        present = {member: work_of[member] for member in cohort.members if member in cohort.present}
                        for result in self._run_cohort(opened, cohort, present, columns):
                            outcomes[result.session_id] = result
        except Exception as error:
            if is_device_fault(error):
                raise
            log.warning("a pass over %d sessions failed\n%s", len(works), forget_traceback(error))
            # A work that was alone, or whose cache is lost, gets the error. Else each half runs again, or each adapter's works.
            failed = [work for work in works if work.session_id not in outcomes]
            opened_of = [self._sessions[work.session_id] for work in failed]
            if len(failed) == 1 or any(opened.cached.lost for opened in opened_of):
                return outcomes | {work.session_id: error for work in failed}
            groups: Sequence[Sequence[StepInput]] = failed[: len(failed) // 2], failed[len(failed) // 2 :]
            if not self.span.adapters.are_shared and len({opened.adapter for opened in opened_of}) > 1:
                self.pool.dissolve()  # a layer has just turned out not to tell the rows of different adapters apart
                groups = self._group(failed)
            for group in groups:
                outcomes |= self._run_together(group)
        return outcomes

    def _run_cohort(
        self, opened: _Opened, cohort: Cohort, works: Mapping[CachedSession, StepInput], columns: int
    ) -> Iterator[StepOutput]:
        """Run one pass. Steps are filled up at their end to `columns`, so the wanted outputs of a shorter one are not in the last
        columns."""
        is_hidden = opened.end < self.span.family.units
        with_head = [work for work in works.values() if work.want and not is_hidden]
        keep_last = max((columns - work.count + work.head_positions for work in with_head), default=0)
        inputs = {member: work.x for member, work in works.items()}
        shape = StepShape(opened.start, opened.end, columns, keep_last, self._adapters_of(cohort))
        with self._look_at_experts(cohort, works, columns):
            output = self._forward(cohort, inputs, shape)
        for member, work in works.items():
            y = output[member.row_slice]
            end = max(0, y.shape[1] - (columns - work.count))
            wanted = work.count if is_hidden else work.head_positions
            yield self._outcome(opened, work.session_id, member.length - work.count, y[:, end - wanted : end])

    @contextlib.contextmanager
    def _look_at_experts(
        self, cohort: Cohort, works: Mapping[CachedSession, StepInput], columns: int
    ) -> Iterator[None]:
        """Count the experts of a pass with guesses, if it is due. Such a pass is not replayed; a graph tells its choices."""
        if not any(work.guessed for work in works.values()) or not self.experts.is_due():
            yield
            return
        sizes = ((work.count, work.guessed) if (work := works.get(member)) else (0, 0) for member in cohort.members)
        parts = [
            position_masks(member.rows, *size, columns) for member, size in zip(cohort.members, sizes, strict=True)
        ]
        sure_N, guessed_N = (torch.cat(some) for some in zip(*parts, strict=True))
        captured, self.captured = self.captured, None
        try:
            passes = 0 if self.graphs is None else self.graphs.passes
            with self.experts.looking(sure_N, guessed_N):
                yield
                if self.graphs is not None and self.graphs.passes > passes:
                    self.experts.note(self.graphs.chosen)
        finally:
            self.captured = captured

    def _run_prompt(self, work: StepInput) -> StepOutput:
        """Run many new positions of one session in chunks. If a chunk fails, none of the positions is kept."""
        opened = self._sessions[work.session_id]
        start = opened.cached.length
        rows, length = work.x.shape[:2]
        chunk = max(min(self.config.prefill_positions // rows, self._longest_pass), 1)
        outputs = []
        try:
            end = 0
            while end < length:
                begin, end = end, min(length, end + min(chunk, self._before_switch(opened.cached) or chunk))
                if self._goes_singly(opened.cached, end - begin):
                    end = begin + 1
                elif opened.cached.history is not None:
                    if end == length and end - begin > KEPT_INPUTS:
                        end -= 1  # other answers to this prompt begin before its last position, at the snapshot there
                    if begin:
                        self.pool.take_snapshot(opened.cached)
                x = work.x[:, begin:end]
                is_last = end == length
                keep_last = -1 if work.want == WANT_ALL else int(work.want == WANT_LAST and is_last)
                for cohort in self.pool.prepare([opened.cached], x.shape[1]):
                    shape = StepShape(opened.start, opened.end, x.shape[1], keep_last, self._adapters_of(cohort))
                    output = self._forward(cohort, {opened.cached: x}, shape)
                    outputs.append(output[opened.cached.row_slice])
        except Exception:
            self.pool.truncate(work.session_id, start)
            raise
        if rows * length >= TRIMMED_POSITIONS and self.span.device.type == "cpu":
            trim_heap()
        return self._outcome(opened, work.session_id, start, torch.cat(outputs, dim=1))

    def _outcome(self, opened: _Opened, session_id: Hashable, start: int, y: Tensor) -> StepOutput:
        """Return a step's result; logits are parted from the hidden states that may follow them."""
        if self.span.reader is None or opened.end < self.span.family.units:
            return StepOutput(session_id, start, y)
        vocabulary = self.span.vocab_size
        return StepOutput(session_id, start, y[..., :vocabulary], y[..., vocabulary:])

    def _forward(self, cohort: Cohort, inputs: Mapping[CachedSession, Tensor], shape: StepShape) -> Tensor:
        """Run one pass over new positions of all sessions of a cohort (sessions computed together), and count them as cached."""
        x = _gather(cohort, inputs, shape.columns).to(self.span.device, non_blocking=self.span.device.type == "cuda")

        def ordinary() -> Tensor:
            return self.span.forward(
                x,
                cache=cohort,
                attention_mask=cohort.attention_mask(shape.columns),
                position_ids=cohort.position_ids(shape.columns),
                keep_last=shape.keep_last,
                start=shape.start,
                end=shape.end,
                adapters=shape.adapters,
            )

        output: Tensor | None = None
        if self.graphs is not None and not any(self._adapter_of.get(member) for member in inputs):
            output = self.graphs.run(cohort, x, shape.start, shape.end, shape.keep_last)
        is_graph = output is not None
        if output is None:
            is_empty = shape.end == self.span.family.units and not shape.keep_last
            captured = None if is_empty or shape.columns > self._longest_shared else self.captured
            output = ordinary() if captured is None else captured.step(cohort, x, shape, ordinary)
        cohort.advance({member: x.shape[1] for member, x in inputs.items()})
        for member, x in inputs.items():
            member.ways.add(is_graph)
            if member.history is not None:
                member.history.settle()
                member.history.record_inputs(x, member.length)
        return output

    def _adapters_of(self, cohort: Cohort) -> tuple[str, ...]:
        """Return the adapter of each row of a cohort (sessions computed together), also of rows that only stand in."""
        return tuple(self._adapter_of.get(member, "") for member in cohort.members for _ in range(member.rows))

    def _check(self, work: StepInput) -> None:
        opened = self._opened(work.session_id)
        cached, shape = opened.cached, work.x.shape
        if cached.lost:
            raise ProtocolError("the session's KV cache was dropped, as memory ran out", code=ErrorCode.INTERNAL)
        if opened.start == 0:
            if len(shape) != 2 or work.x.is_floating_point():
                raise ProtocolError(f"token ids of shape (rows, T) are needed, not {work.x.dtype} {tuple(shape)}")
        elif len(shape) != 3 or shape[2] != self.span.width or not work.x.is_floating_point():
            raise ProtocolError(f"hidden states of shape (rows, T, {self.span.width}) are needed, not {tuple(shape)}")
        elif not self.span.names_tokens(work.x):
            raise ProtocolError(f"the hidden states' digits must name tokens in [0, {self.span.vocab_size})")
        if shape[0] != cached.rows or shape[1] < 1:
            raise ProtocolError(f"the session has {cached.rows} rows, the input is {tuple(shape)}")
        start = cached.end if work.truncate_to is None else work.truncate_to
        if not 0 <= start <= cached.end or work.start not in (None, start):
            told = start if work.start is None else work.start
            raise ProtocolError(f"the session has {cached.end} positions: a step at {told} does not follow them")
        if start + shape[1] > cached.max_length:
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


def _gather(cohort: Cohort, inputs: Mapping[CachedSession, Tensor], columns: int) -> Tensor:
    """Return the inputs of all rows of a cohort, each filled up to `columns`. Absent members' rows repeat another's input."""
    stand_in = next(iter(inputs.values()))[:1, -1:]
    rows = []
    for member in cohort.members:
        x = inputs[member] if member in inputs else stand_in.repeat_interleave(member.rows, dim=0)
        if x.shape[1] < columns:
            x = torch.cat([x, x[:, -1:].repeat_interleave(columns - x.shape[1], dim=1)], dim=1)
        rows.append(x)
    return rows[0] if len(rows) == 1 else torch.cat(rows)
