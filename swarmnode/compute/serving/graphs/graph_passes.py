"""Passes of a span by graphs of ggml: which passes they take, the graphs that are kept, and a trial of each new kind.

ggml ends the process at a failed assertion. So what a span computes is tried in a child process first: graphs of a few sizes, whose
results must be those of torch's way up to the rounding of activations, with the same bits for a position in each. A span that
fails, crashes or takes too long stays on torch's way, and a line in the log says why.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import select
import signal
import sys
import time
import warnings
from collections import OrderedDict
from collections.abc import Callable, Hashable

import torch
from torch import Tensor

from swarmnode.compute.executor import forget_traceback
from swarmnode.compute.model.span import ModelSpan
from swarmnode.compute.packing.ggml_graph import CannotBeLowered
from swarmnode.compute.packing.ggml_matrix import FEW_ROWS
from swarmnode.compute.serving.cohort import CachedSession, Cohort, Windows
from swarmnode.compute.serving.graphs.operations import SpanTrace
from swarmnode.compute.serving.graphs.span_graph import SpanGraph
from swarmnode.compute.serving.graphs.span_trace import trace_span
from swarmnode.ledger import Account, Full, MemoryLedger, Reservation
from swarmnode.metrics.machine import cpu_seconds, running_threads

log = logging.getLogger(__name__)

GRAPHS, LARGE_GRAPHS, LARGE = 24, 1, 64  # graphs that are kept; of those with more rows than LARGE only the last one
TRIAL_S, TRIAL_CPU_S = 180.0, 120  # at most, of the clock and of CPU: a busy machine may take long
TRIED = ((1, 4, 4), (1, 1, 1), (2, 1, 1), (2, 2, 1))  # (rows, positions, with logits) of the graphs that are tried
TRIED_PASSES = 2  # at most, of each
FAR, FAR_EXACT = 0.5, 1e-3  # of a result's spread: fast products round to 8 bits, and a rounding that differs spreads
ASKED_EVERY_S = 1.0
TOLD = 400  # bytes of a reason


class SpareCores:
    """Number of cores that other programs leave to this one, asked every `ASKED_EVERY_S` at most.

    Each operation of a graph waits for all threads. So two threads beside a busy core are slower than one. A program that has used
    a core since the last time, and does not run at the moment, does not count: it may have ended.
    """

    def __init__(
        self,
        used_s: Callable[[], tuple[float, float, float]] | None = None,
        running: Callable[[], int | None] = running_threads,
    ) -> None:
        self._used_s, self._running = used_s or used_seconds, running
        self._last = self._used_s()
        self._count = self.cores = os.cpu_count() or 1

    def __repr__(self) -> str:
        return f"SpareCores({self._count} of {self.cores})"

    def count(self) -> int:
        """Return the number of cores, 1 at least."""
        now_s, busy_s, own_s = self._used_s()
        last_s, last_busy_s, last_own_s = self._last
        if now_s - last_s >= ASKED_EVERY_S:
            others = round(((busy_s - last_busy_s) - (own_s - last_own_s)) / (now_s - last_s))
            if others and (running := self._running()) is not None:
                others = min(others, running - 1)  # besides the thread that asks
            self._count = max(1, min(self.cores, self.cores - others))
            self._last = now_s, busy_s, own_s
        return self._count


def used_seconds() -> tuple[float, float, float]:
    """Return the clock, and the CPU seconds that the machine and this process have used."""
    return time.monotonic(), cpu_seconds()[1], time.process_time()


class SpanGraphs:
    """Graphs of one span's passes. Used from the compute thread only."""

    def __init__(self, span: ModelSpan, windows: Windows, ledger: MemoryLedger | None = None) -> None:
        self.span = span
        self.refusals: dict[Hashable, str] = {}
        self.passes = 0
        self.chosen: list[Tensor] = []
        """Experts (N, K) that the rows of the last pass chose, by layer; empty for passes of many rows"""
        self._windows = windows
        self._ledger = ledger or MemoryLedger()
        self._spare_cores = SpareCores()
        self._graphs: OrderedDict[Hashable, tuple[SpanGraph, Reservation]] = OrderedDict()

    def __repr__(self) -> str:
        return f"SpanGraphs({len(self._graphs)} graphs, {self.passes} passes)"

    def prepare(self) -> None:
        """Find out whether passes of the whole span are graphs, which takes as long as some passes."""
        self._trace(self.span.start, self.span.end)

    def run(self, cohort: Cohort, x: Tensor, start: int, end: int, keep_last: int) -> Tensor | None:
        """Return the output of a pass over units [start, end), as `ModelSpan.forward`; None if no graph computes it.

        Raises RuntimeError if ggml fails.
        """
        if not self.span.has_same_bits and x.shape[0] * x.shape[1] > FEW_ROWS:
            return None  # torch multiplies more rows exactly in less time
        has_head = end == self.span.family.units
        is_empty = has_head and keep_last == 0
        trace = self._trace(start, end)
        if trace is None:
            return None
        rows, count = x.shape[:2]
        kept = (count if keep_last < 0 else keep_last) if has_head and not is_empty else 1
        graph = self._graph(trace, (start, end, is_empty, rows, count, kept))
        if graph is None:
            return None
        self.passes += 1
        self.chosen = []
        output = graph.run(cohort, x, self._spare_cores.count() if torch.get_num_threads() > 1 else None)
        self.chosen = graph.chosen()
        return self.span.empty_logits(rows) if output is None else output

    def close(self) -> None:
        """Forget all graphs."""
        for _, memory in self._graphs.values():
            memory.release()
        self._graphs.clear()

    def _trace(self, start: int, end: int) -> SpanTrace | None:
        """Return what units [start, end) compute; None if no graph does."""
        key = start, end, self.span.reader is None, tuple(self._windows.items())
        known = self.span.lowered
        if key not in known:
            try:
                trace = trace_span(self.span, start, end, self._windows)
                why = try_in_child(self.span, trace, start, end, self._windows)
                known[key] = why or trace
            except Exception as error:  # a family's code may raise anything
                known[key] = f"{error}" or type(error).__name__
                forget_traceback(error)
            if isinstance(known[key], str):
                log.info("%r computes layer by layer, not as one graph: %s", self.span, known[key])
        found: SpanTrace | str = known[key]
        if isinstance(found, str):
            self.refusals[start, end] = found
            return None
        return found

    def _graph(self, trace: SpanTrace, key: tuple[int, int, bool, int, int, int]) -> SpanGraph | None:
        """Return the graph of a kind of passes, made if it is new; None if memory has no room for it."""
        if key in self._graphs:
            self._graphs.move_to_end(key)
            return self._graphs[key][0]
        is_empty, rows, count, kept = key[2:]
        large = [other for other in self._graphs if other[3] * other[4] > LARGE]  # type: ignore[index]
        self._drop(large[: len(large) - LARGE_GRAPHS + (rows * count > LARGE)])
        self._drop(list(self._graphs)[: max(0, len(self._graphs) - GRAPHS + 1)])
        memory = None
        try:
            size_bytes = self.span.pass_bytes(rows * count, rows * kept)
            memory = self._ledger.reserve(Account.ACTIVATIONS, size_bytes)
            graph = SpanGraph(trace.without_result() if is_empty else trace, rows, count, kept, self.span.dtype)
            memory.resize(graph.nbytes)
        except BaseException as error:
            if memory is not None:
                memory.release()
            if not isinstance(error, Full | MemoryError | CannotBeLowered):
                raise
            log.warning("a pass of %d x %d positions is computed layer by layer: %s", rows, count, error)
            return None
        self._graphs[key] = graph, memory
        return graph

    def _drop(self, keys: list[Hashable]) -> None:
        for key in keys:
            self._graphs.pop(key)[1].release()


@torch.inference_mode()
def try_in_child(span: ModelSpan, trace: SpanTrace, start: int, end: int, windows: Windows) -> str:
    """Compute graphs of some sizes in a child process. Returns why the span cannot be computed so; empty if it can."""
    if sys.platform == "win32":
        return "it cannot be tried in a child process on Windows"
    import resource

    count = max(rows * count for rows, count, _ in TRIED)
    random = torch.Generator().manual_seed(0)
    if start == 0:
        x_BT = torch.randint(0, span.vocab_size, (1, count), generator=random)
    else:
        x_BT = torch.randn(1, count, span.width, generator=random).to(span.dtype)
    expected = span.forward(
        x_BT,
        cache=_cohort(span, start, end, 1, count, windows),
        position_ids=torch.arange(count)[None],
        keep_last=count,
        start=start,
        end=end,
    ).float()
    reads, writes = os.pipe()
    with warnings.catch_warnings():  # of threads: the child calls nothing that takes their locks
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        why = "a trial failed"
        try:
            faulthandler.disable()  # the node's record of crashes would count this one
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            resource.setrlimit(resource.RLIMIT_CPU, (TRIAL_CPU_S, TRIAL_CPU_S))
            os.environ["GGML_NO_BACKTRACE"] = "1"
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            why = _try(span, trace, x_BT, expected, start, end, windows)
        except BaseException as error:  # nothing may run on in a second process of the node
            why = f"{type(error).__name__}: {error}"
        finally:
            try:
                os.write(writes, (why or " ").encode()[:TOLD])
            finally:
                os._exit(0)
    os.close(writes)
    try:
        if not select.select([reads], [], [], TRIAL_S)[0]:
            os.kill(child, signal.SIGKILL)
            return f"a trial took more than {TRIAL_S:g} s"
        told = os.read(reads, TOLD).decode("utf-8", "replace")
    finally:
        os.close(reads)
        status = os.waitpid(child, 0)[1]
    if not told:
        return f"a trial was ended by {signal.Signals(os.WTERMSIG(status)).name}"
    return told.strip()


@torch.inference_mode()
def _try(span: ModelSpan, trace: SpanTrace, x: Tensor, expected: Tensor, start: int, end: int, windows: Windows) -> str:
    """Compute the first positions by graphs of all sizes that are tried. Returns the fault, empty if there is none."""
    torch.set_num_threads(1)
    total = x.shape[1]
    known: Tensor | None = None
    for rows, count, kept in TRIED:
        cohort = _cohort(span, start, end, rows, total, windows)
        graph, results = SpanGraph(trace, rows, count, kept, span.dtype), []
        places: list[int] = []  # of the results
        for first in range(0, total - count + 1, count)[:TRIED_PASSES]:
            part = x[:, first : first + count].expand(rows, *x[:, first : first + count].shape[1:])
            y = graph.run(cohort, part.contiguous(), is_checked=True)
            cohort.advance(dict.fromkeys(cohort.members, count))
            assert y is not None  # a trial has logits
            results.append(y)
            places += range(first + count - y.shape[1], first + count)
        got = torch.cat(results, dim=1).float()
        known = got[:1] if known is None else known
        if not torch.equal(got, known[:, places].expand(rows, -1, -1)):
            return "a position's bits depend on its company"
    if known is not None:
        far = (known - expected[:, : known.shape[1]]).abs().mean(-1) / expected.std()
        if not bool((far < (FAR_EXACT if trace.is_exact else FAR)).all()):
            return "a trial gave other numbers than torch"
    return ""


def _cohort(span: ModelSpan, start: int, end: int, rows: int, columns: int, windows: Windows) -> Cohort:
    """Return an empty cohort of one session."""
    session = CachedSession(rows, columns, [0] * rows, span.layers_of(start, end))
    cohort = Cohort([session], columns, span.device, windows)
    session.cohort = cohort
    cohort.refresh_rows()
    return cohort
