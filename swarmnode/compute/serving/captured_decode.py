"""Decode steps that are recorded once and replayed: as CUDA graphs, one launch for all layers, and on the CPU as flat programs.

A recorded step reads and writes the same memory at every replay. So its inputs lie in permanent buffers, and it sees the caches
of its cohort as `StaticColumns`. It is made for one cohort, whose buffers it knows, and forgotten with it.

Which families can be captured is not known by name. After some steady steps one step is tried, captured and replayed. Then the
ordinary pass runs, which overwrites what the replay wrote, and results and times of the two are compared. If attention goes by
position, as with fast packed weights, both must have the same bits. A replay reads all columns of the buffers, masked, so with
many rows and long caches it may cost more than it saves. If the family's code cannot be captured, all passes stay ordinary; if
numbers differ or the replay is slower, those of this cohort and shape. Packed models are computed by graphs of ggml instead
(`graphs/graph_passes.py`), unless something keeps them from it, as adapters and caches in 8 bits do.

Steps with guesses have several positions. On a card they are filled up to one of a few numbers of columns, since a graph has a
fixed number and more columns cost a card next to nothing. On the CPU each number of positions has its own program.
"""

from __future__ import annotations

import logging
import time
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, MutableMapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from swarmnode.compute.executor import card_answers, forget_traceback
from swarmnode.compute.model.span import ModelSpan
from swarmnode.compute.packing.ggml import library
from swarmnode.compute.packing.ggml_matrix import threads
from swarmnode.compute.serving.cohort import LONGEST_SHARED, AttentionCache, Cohort
from swarmnode.compute.serving.graphs.span_trace import REFUSED
from swarmnode.compute.stopwatch import Stopwatch, synchronize
from swarmnode.ledger import Account, Full, MemoryLedger, Reservation

log = logging.getLogger(__name__)

STEADY_STEPS = 8  # steps of a cohort and shape between attempts to capture one
STEADY_STEPS_CPU = 4  # recording takes some three steps there, and memory that is freed at once if it fails
LEAST_COLUMNS = 16  # room that the buffers must still have: capturing costs as much as some steps
MASK_BYTES = 16  # per column and row, while masks are made
CARD_COLUMNS = (1, 2, 4, LONGEST_SHARED)  # of steps on a card
MOST_SHAPES = 8  # captured shapes of a cohort
TOLERANCES = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.05}  # of a row's deviation
Call = Callable[[], object]
SHORT: dict[str, Any] = {
    "silu": torch._C._nn.silu,
    **{
        name: getattr(torch, name) for name in ("mul", "add", "sub", "neg", "rsqrt", "pow", "cat", "mean", "cos", "sin")
    },
    **{name: getattr(Tensor, name) for name in ("index_copy_", "copy_", "mul_", "add_")},
}
"""torch's own functions for common operators, whose calls take half the time of the dispatcher's"""
COPYING = ("contiguous", "clone", "_to_copy", "to")  # operators that give their first argument's values


class _Place(Tensor):
    """Number of a column on the device that differs from every number on the host. transformers compares the place of several
    queries with 0, to leave a mask out, and would wait for the device."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:  # type: ignore[override]
        return self is other

    __hash__ = Tensor.__hash__


class StaticColumns(AttentionCache):
    """Buffers of a cohort at fixed places. If a regrouped cohort gives its buffers up, they are gone here too.

    `column` (a scalar, int64) is where the next step of `count` columns begins to write. It is valid as long as the cohort's
    windows have not moved.
    """

    def __init__(self, cohort: Cohort, count: int = 1) -> None:
        super().__init__(cohort.windows, cohort.capacity)  # not the cohort: it ends with its last session
        self.count = count
        self._steps_T = torch.arange(count, device=cohort.device)
        self.column = torch.tensor(cohort.end, device=cohort.device)
        self._place = self.column.as_subclass(_Place)
        self._buffers = cohort.buffers
        self._store = cohort.store
        self.first_kept = first_kept(cohort)
        self._places: dict[int, Tensor] = {}

    def __repr__(self) -> str:
        return f"StaticColumns({len(self._buffers)} layers of up to {self.get_max_length()} columns)"

    def begin(self, cohort: Cohort) -> None:
        """Prepare for the cohort's next step, which writes behind its end.

        Columns further behind get a weight of zero, so they must be finite.
        """
        cohort.zero_from(cohort.end + self.count)
        self.column.fill_(cohort.end)

    def restart(self) -> None:
        """Forget what the last pass computed of `column`: a pass that is recorded computes it itself."""
        self._places = {}

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write keys and values (rows, heads, T, dim) and return all columns of the layer. Called by attention."""
        first = self.first_kept.get(layer_idx, 0)
        if first not in self._places:
            self._places[first] = self.column - first + self._steps_T
        return self._store.write_at(self._buffers[layer_idx], key_states, value_states, self._places[first])

    def get_seq_length(self, layer_idx: int = 0) -> Tensor:  # type: ignore[override]
        """Return the number of columns in use, on the device, as transformers' own static cache does."""
        return self._place

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Return the number of columns in a layer's buffers, and the first column that they hold. A family may ask for a layer that
        another hop has."""
        return self.columns_in(layer_idx), self.first_kept.get(layer_idx, 0)

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """Return the largest number of columns in any layer's buffers."""
        return max(map(self.columns_in, self._buffers))

    is_compileable = True  # transformers then makes a mask without reading values of the cache
    is_initialized = True  # the buffers hold positions


def first_kept(cohort: Cohort) -> dict[int, int]:
    """Return the first column of the buffers of each sliding layer."""
    return {layer: cohort.first_kept(layer) for layer in cohort.windows}


@dataclass(frozen=True)
class StepShape:
    """Parameters that a captured step cannot change.

    Args:
        start: First layer.
        end: End of the layers.
        columns: Number of positions.
        keep_last: Number of last positions with logits.
        adapters: Name of each row's adapter, "" for none; () for the model alone.
    """

    start: int
    end: int
    columns: int
    keep_last: int
    adapters: tuple[str, ...] = ()


class CapturedDecode:
    """Decode steps of one span's cohorts, by replay once captured. Used from the compute thread only."""

    def __init__(self, span: ModelSpan, ledger: MemoryLedger | None = None, stopwatch: Stopwatch | None = None) -> None:
        self.span = span
        # One thread's own time says how long it computed, whatever else the machine does.
        is_alone = span.device.type == "cpu" and torch.get_num_threads() == 1
        clock = time.thread_time if is_alone else time.perf_counter
        self.stopwatch = stopwatch or Stopwatch(span.device, clock=clock)
        self._tolerance = 0.0 if span.has_same_bits else TOLERANCES.get(span.dtype, 0.0)
        self.refusals: dict[int, str] = {}  # by number of columns: why this model's steps are not captured
        self.replays = 0
        self._ledger = ledger or MemoryLedger()
        self._pool: Any = None  # graphs that run one after another share memory for intermediate results
        self._steady: MutableMapping[Cohort, Counter[StepShape]] = weakref.WeakKeyDictionary()
        self._captured: MutableMapping[Cohort, dict[StepShape, _CapturedStep | None]] = weakref.WeakKeyDictionary()

    @property
    def refusal(self) -> str:
        """Why this model's steps, or some of them, are not captured; empty if all may be."""
        return next(iter(self.refusals.values()), "")

    def _refuses(self, columns: int) -> bool:
        """Return whether steps of `columns` columns are not captured: because of their number, or because none are."""
        return not self.refusals.keys().isdisjoint((1, columns))

    def step(self, cohort: Cohort, x: Tensor, shape: StepShape, ordinary: Callable[[], Tensor]) -> Tensor:
        """Return the output of a cohort's next step, which writes T columns: that of the `ordinary` pass.

        A captured step is replayed if there is one, else `ordinary` is called. `x` is ids_BT or hidden_BTH of T = `shape.columns`.
        Raises the errors of the ordinary pass, and any error if the card is lost.
        """
        shapes = self._captured.setdefault(cohort, {})
        if cohort.windows:  # steps whose windows have moved since are forgotten
            now = first_kept(cohort)
            for moved, step in list(shapes.items()):
                if step is not None and step.columns.first_kept != now:
                    del shapes[moved]
                    cohort.when_given_up.remove(step.close)
                    step.close()
        captured = shapes.get(shape)
        if captured is not None:
            self.replays += 1
            return captured.replay(cohort, x).clone()
        if not self._is_due(cohort, shape):
            return ordinary()
        candidate = self._capture(cohort, x, shape)
        if candidate is None:
            return ordinary()
        return self._compare(cohort, candidate, x, ordinary)

    def close(self) -> None:
        """Forget all captured steps, and the memory that they hold."""
        for captured in (step for shapes in self._captured.values() for step in shapes.values()):
            if captured is not None:
                captured.close()
        self._captured.clear()

    def columns_for(self, longest: int) -> int:
        """Return the number of columns of a step whose longest work has `longest` positions: on a card a few more, so that few
        numbers have to be captured."""
        columns = next((columns for columns in CARD_COLUMNS if columns >= longest), longest)
        return longest if self._is_on_cpu or self._refuses(columns) else columns

    def _compare(self, cohort: Cohort, candidate: _CapturedStep, x: Tensor, ordinary: Callable[[], Tensor]) -> Tensor:
        """Return the ordinary pass's output. Keep the candidate if it gave the same in no more time."""
        if not self._is_on_cpu:
            candidate.replay(cohort, x)  # the first replay of a graph also brings it to the card
        replayed, replay_s = self._timed(lambda: candidate.replay(cohort, x).clone())
        output, ordinary_s = self._timed(ordinary)
        is_kept = self._agree(replayed, output) and replay_s <= ordinary_s
        self._captured[cohort][candidate.shape] = candidate if is_kept else None
        if is_kept:
            cohort.when_given_up.append(candidate.close)
        else:
            candidate.close()
        log.info("a captured step of %r takes %.1e s, an ordinary one %.1e s", cohort, replay_s, ordinary_s)
        return output

    def _timed(self, work: Callable[[], Tensor]) -> tuple[Tensor, float]:
        """Return the work's result on an otherwise idle card, and its seconds."""
        took_s: list[float] = []
        synchronize(self.span.device)
        with self.stopwatch.timing(took_s.append):
            output = work()
        synchronize(self.span.device)
        self.stopwatch.read()
        return output, took_s[0]

    def _is_due(self, cohort: Cohort, shape: StepShape) -> bool:
        """Count a steady step of the cohort. Returns whether passes of its shape should be captured now.

        That is so after every few steps of this shape, if the cohort has room for some more, few captured steps, and neither a
        captured step of this shape nor a refusal.
        """
        counts, shapes = self._steady.setdefault(cohort, Counter()), self._captured[cohort]
        if len(shapes) >= MOST_SHAPES or shape in shapes:
            return False
        counts[shape] += 1
        steps = counts[shape]
        is_wanted = not self._refuses(shape.columns) and not any(map(len, self.span.packings))
        period = STEADY_STEPS_CPU if self._is_on_cpu else STEADY_STEPS
        return is_wanted and steps % period == 0 and cohort.capacity - cohort.end >= LEAST_COLUMNS

    def _capture(self, cohort: Cohort, x: Tensor, shape: StepShape) -> _CapturedStep | None:
        try:
            # Memory for the values that a program or a graph keeps between its kernels.
            positions = cohort.rows * shape.columns
            size_bytes = self.span.pass_bytes(positions, positions) + positions * cohort.capacity * MASK_BYTES
            memory = self._ledger.reserve(Account.ACTIVATIONS, size_bytes)
            step = _CapturedStep(self.span, cohort, x, shape, memory)
            if self._is_on_cpu:
                step.record()
            else:
                self._pool = self._pool or torch.cuda.graph_pool_handle()
                step.capture(self._pool)
        except (Full, torch.OutOfMemoryError) as error:
            log.info("no memory to capture steps of %r: %s", cohort, error)
            forget_traceback(error)
            return None
        except Exception as error:  # a family's code may raise anything
            if not self._is_on_cpu and not card_answers():
                raise
            refusal = self.refusals[shape.columns] = f"{type(error).__name__}: {error}"
            log.info("decode steps of %r with %d columns are not captured: %s", self.span, shape.columns, refusal)
            forget_traceback(error)
            return None
        return step

    @property
    def _is_on_cpu(self) -> bool:
        return self.span.device.type == "cpu"

    def _agree(self, replayed_BTX: Tensor, ordinary_BTX: Tensor) -> bool:
        """Return whether all rows are equal up to rounding. Rows that are not finite in the ordinary pass are ignored."""
        sound_B = ordinary_BTX.isfinite().flatten(1).all(1)
        far_B = (replayed_BTX - ordinary_BTX).float().abs().flatten(1).amax(1)
        deviation_B = ordinary_BTX.float().flatten(1).std(1)
        close_B = far_B <= self._tolerance * deviation_B
        agree = bool((close_B | ~sound_B).all())
        if not agree:
            log.warning(
                "a captured step of %r gave different numbers: steps of this cohort are not captured", self.span
            )
        return agree


class _CapturedStep:
    """Captured step of one cohort, with the buffers that it reads and writes."""

    def __init__(self, span: ModelSpan, cohort: Cohort, x: Tensor, shape: StepShape, memory: Reservation) -> None:
        self.shape = shape
        self._memory = memory
        weakref.finalize(self, memory.release)
        self.columns = StaticColumns(cohort, shape.columns)
        self._span = span
        self._shared = span.adapters.choose(shape.adapters, shape.columns)  # its matrices, which the replays read
        self._x = x.clone()
        self._columns_C = torch.arange(cohort.capacity, device=cohort.device)
        self._steps_T = torch.arange(shape.columns, device=cohort.device)
        self._first_R1 = torch.zeros(cohort.rows, 1, dtype=torch.int64, device=cohort.device)
        self._rows: list[int] | None = None
        self._run: Callable[[], None] | None = None
        self._output: Tensor | None = None
        self._prepare(cohort, x)

    def close(self) -> None:
        """Free the memory of the step, which cannot be replayed afterwards."""
        self._run = self._output = self._shared = None
        self._memory.release()

    def record(self) -> None:
        """Compute the step, and record it as a flat program. Raises any error of the family's code, or Full."""
        with Recorder() as recorder:
            self._output = self._forward()
        program = recorder.program()
        self._memory.resize(program.nbytes)
        self._run = program.run

    def capture(self, pool: Any) -> None:
        """Record the step without computing it. Raises any error of the family's code.

        Waiting for a stream during a capture may leave the whole context in a bad state. So the step is tried first.
        """
        before = torch.cuda.get_sync_debug_mode()
        try:  # operators that the host would wait for raise RuntimeError, on all threads
            with warnings.catch_warnings():  # torch warns of this mode once, after setting it
                warnings.simplefilter("ignore")
                torch.cuda.set_sync_debug_mode("error")
            self._forward()
        finally:
            torch.cuda.set_sync_debug_mode(before)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            self._output = self._forward()
        self._run = graph.replay

    def replay(self, cohort: Cohort, x: Tensor) -> Tensor:
        """Run the captured step on `x`. Returns its output, which the next replay overwrites."""
        self._prepare(cohort, x)
        assert self._run is not None and self._output is not None
        self._run()
        return self._output

    def _prepare(self, cohort: Cohort, x: Tensor) -> None:
        self._x.copy_(x)
        self.columns.begin(cohort)
        if self._rows is not cohort.first_columns:
            self._rows = cohort.first_columns
            self._first_R1.copy_(torch.tensor(self._rows)[:, None], non_blocking=True)

    def _forward(self) -> Tensor:
        self.columns.restart()
        column = self.columns.column
        mask_RC = (self._columns_C >= self._first_R1) & (self._columns_C < column + self.shape.columns)
        return self._span.forward(
            self._x,
            cache=self.columns,
            attention_mask=mask_RC.to(torch.int64),
            position_ids=(column + self._steps_T - self._first_R1).clamp(min=0),
            keep_last=self.shape.keep_last,
            start=self.shape.start,
            end=self.shape.end,
            adapters=self.shape.adapters,
        )


# -- flat programs


class CannotBeRecorded(Exception):
    """The pass needs values of tensors on the host, or random numbers: another pass may go another way."""


class FlatProgram:
    """Recorded pass. It reads and writes the memory of the pass that was recorded."""

    def __init__(self, calls: Sequence[Call], kept: Sequence[Tensor]) -> None:
        self._calls = list(calls)
        self._kept = list(kept)
        storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in kept}
        self.nbytes = sum(storages.values())

    def __repr__(self) -> str:
        return f"FlatProgram({len(self._calls)} calls, {self.nbytes / 1e6:.1f} MB)"

    def run(self) -> None:
        """Compute the pass again. Raises RuntimeError if an operator fails."""
        for call in self._calls:
            call()


class Recorder(TorchDispatchMode):
    """Recorder of one pass: `with Recorder() as recorder: …`, then `program()`."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._calls: list[Call] = []
        self._kept: list[Tensor] = []
        self._is_paused = False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: torch would import its compiler, which takes 100 MB and two seconds."""
        return False

    def __enter__(self) -> Recorder:
        if library() is not None:
            threads().recorder = self
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        if library() is not None:
            threads().recorder = None

    def __torch_dispatch__(
        self, function: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        result = function(*args, **given)
        if not self._is_paused:
            self._record(function, args, given, result)
        return result

    def _record(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        inputs, results = _tensors((*args, *kwargs.values())), _tensors([result])
        if _is_suspicious(function) and not _is_harmless(function, args, kwargs, inputs):
            raise CannotBeRecorded(f"{function} depends on values, or on random numbers")
        name = function._schema.name.split("::")[1]
        if function._schema.is_mutable:
            self.record_call(partial(SHORT.get(name, function._op), *args, **kwargs))
            return
        known = {_storage(each) for each in inputs}
        fresh = [tensor for tensor in results if _storage(tensor) not in known]
        self._kept += fresh
        if fresh and not name.startswith("empty") and not name.startswith("new_empty"):
            self.record_call(_again(function, name, args, kwargs, results))

    def record_call(self, call: Call) -> None:
        """Take a call, made in the recorded pass, into the program."""
        self._calls.append(call)

    def calling(self, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """Return function(x), and take its call as a whole into the program."""
        self._is_paused, threads().recorder = True, None
        try:
            y = function(x)
        finally:
            self._is_paused, threads().recorder = False, self
        self._kept += [x, y]
        self.record_call(lambda: y.copy_(function(x)))
        return y

    def program(self) -> FlatProgram:
        """Return the program of the recorded calls."""
        return FlatProgram(self._calls, self._kept)


def _tensors(values: Iterable[Any]) -> list[Tensor]:
    """Return the tensors among arguments or results, also those in lists."""
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += [each for each in value if isinstance(each, Tensor)]
    return found


@lru_cache(maxsize=1024)
def _is_suspicious(function: Any) -> bool:
    return any(tag in function.tags for tag in REFUSED)


def _is_harmless(function: Any, args: Sequence[Any], kwargs: dict[str, Any], inputs: Sequence[Tensor]) -> bool:
    """Return whether an operator that may depend on values does not: a look-up by numbers, or attention without dropout."""
    if "index" in function.name():
        return all(tensor.dtype is not torch.bool for tensor in inputs[1:])
    given = _by_name(function, args, kwargs)
    if "dot_product" in function.name():
        return not given.get("dropout_p")
    return "dropout" in function.name() and not (given.get("p") and given.get("train"))


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _by_name(function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return an operator's arguments by their names in its schema."""
    return dict(zip((argument.name for argument in function._schema.arguments), args, strict=False)) | kwargs


def _again(function: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], results: list[Tensor]) -> Call:
    """Return a call that computes an operator again, into the results that it gave."""
    if name in COPYING and len(results) == 1:
        return partial(results[0].copy_, args[0])
    into = _with_out(function)
    if into is not None and len(results) == len(into[1]):
        return partial(SHORT.get(name, into[0]), *args, **kwargs, **dict(zip(into[1], results, strict=True)))

    def compute() -> None:
        for result, new in zip(results, _tensors([function._op(*args, **kwargs)]), strict=True):
            result.copy_(new)

    return compute


@lru_cache(maxsize=1024)
def _with_out(function: Any) -> tuple[Any, tuple[str, ...]] | None:
    """Return the form of an operator that writes into given tensors, and the names of these arguments; None if it has none."""
    wanted = [(argument.name, str(argument.type)) for argument in function._schema.arguments]
    packet = function.overloadpacket
    for name in packet.overloads():
        other = getattr(packet, name)
        outs = [argument.name for argument in other._schema.arguments if argument.is_out]
        rest = [(argument.name, str(argument.type)) for argument in other._schema.arguments if not argument.is_out]
        if outs and rest == wanted:
            return other._op, tuple(outs)
    return None
