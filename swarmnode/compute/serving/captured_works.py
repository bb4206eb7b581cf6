"""Work on the results of passes as CUDA graphs: encoding and examining them repeats from step to step, and is one launch then.

A graph belongs to one kind of work on so many tensors of one shape. It is captured after some uses, so that its kernels are
compiled, and has memory of its own: graphs of a pass have their results at the same time. Its results are valid until its next
replay.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from swarmnode.compute.device_fault import card_answers, forget_traceback
from swarmnode.ledger import Account, Full, MemoryLedger, Reservation

log = logging.getLogger(__name__)

Work = Callable[[Sequence[Tensor]], Sequence[Tensor]]
"""Function for tensors of one shape: its results have a row (S, …) for each. It waits for no device"""

USES = 8  # before a capture
MOST_KINDS = 64  # whose uses are counted
INPUT_BYTES = 1 << 19  # most of a graph's input: steps of decoding; with more, launches do not matter
HELD = 12  # times the input: it, its copies in float32 and float64, and results
SMALL_SEGMENT, LARGE_SEGMENT, SMALL_BYTES = (
    2 << 20,
    20 << 20,
    1 << 20,
)  # of torch's allocator: a graph has segments of its own
HELD_BYTES = 64 << 20  # most of all graphs; those used least recently are dropped


def held_bytes(input_bytes: int) -> int:
    """Return the memory that a graph with this input may take."""
    inner = HELD * input_bytes
    return inner + SMALL_SEGMENT + (LARGE_SEGMENT if inner > SMALL_BYTES else 0)


class CapturedWorks:
    """Graphs of repeated work on one card. Used from its compute thread only."""

    def __init__(self, ledger: MemoryLedger | None = None) -> None:
        self._ledger = ledger or MemoryLedger()
        self._uses: OrderedDict[Hashable, int] = OrderedDict()
        self._graphs: OrderedDict[Hashable, _CapturedWork] = OrderedDict()
        self.refusal = ""  # why nothing is captured

    def __repr__(self) -> str:
        return f"<CapturedWorks: {self.refusal or f'{len(self._graphs)} graphs'}>"

    def __len__(self) -> int:
        return len(self._graphs)

    def run(self, work: Work, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return `work(tensors)`, for tensors of one shape, dtype and card: by its graph, if it has one. Raises the errors of the
        work."""
        first = tensors[0]
        key = work, first.shape, first.dtype, first.device, len(tensors)
        if (captured := self._graphs.get(key)) is not None:
            self._graphs.move_to_end(key)
            return captured.replay(tensors)
        results = work(tensors)
        if not self.refusal and first.nbytes * len(tensors) <= INPUT_BYTES and self._is_due(key):
            self._capture(key, work, tensors)
        return results

    def _is_due(self, key: Hashable) -> bool:
        """Count a use. Returns whether the work should be captured now."""
        self._uses[key] = uses = self._uses.pop(key, 0) + 1
        if len(self._uses) > MOST_KINDS:
            self._uses.popitem(last=False)
        return uses % USES == 0

    def _capture(self, key: Hashable, work: Work, tensors: Sequence[Tensor]) -> None:
        size_bytes = held_bytes(tensors[0].nbytes * len(tensors))
        while self._graphs and size_bytes + sum(graph.size_bytes for graph in self._graphs.values()) > HELD_BYTES:
            self._graphs.popitem(last=False)[1].release()
        try:
            memory = self._ledger.reserve(Account.ACTIVATIONS, size_bytes)
            try:
                self._graphs[key] = _CapturedWork(work, tensors, size_bytes, memory)
            except Exception:
                memory.release()
                raise
        except (Full, torch.OutOfMemoryError) as error:
            log.info("no memory to capture %s: %s", work, error)
            forget_traceback(error)
        except Exception as error:  # a driver may refuse
            if not card_answers():
                raise
            self.refusal = f"{type(error).__name__}: {error}"
            log.info("work on results is not captured: %s", self.refusal)
            forget_traceback(error)

    def clear(self) -> None:
        """Drop all graphs, and give their memory back."""
        for captured in self._graphs.values():
            captured.release()
        self._graphs.clear()
        self._uses.clear()


class _CapturedWork:
    """Captured work, with the memory that it reads and writes."""

    def __init__(self, work: Work, tensors: Sequence[Tensor], size_bytes: int, memory: Reservation) -> None:
        self.size_bytes, self._memory = size_bytes, memory
        self._input = torch.stack(list(tensors))
        self._graph: Any = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
            self._results = work(self._input.unbind())

    def replay(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """Run the captured work on `tensors`. Returns its results, which the next replay overwrites."""
        torch.stack(list(tensors), out=self._input)
        self._graph.replay()
        return self._results

    def release(self) -> None:
        """Give the reserved memory back."""
        self._memory.release()
