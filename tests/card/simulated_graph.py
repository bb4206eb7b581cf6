"""CUDA graphs on a simulated card: operators are recorded with the tensors that they met, and replayed over the same memory.

As on a real one nothing has been computed when a capture is over, numbers of the host are as they were then, and whoever waits for
the card meanwhile loses it.
"""

from __future__ import annotations

import contextlib
import itertools
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from enum import IntEnum
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

Recorded = tuple[Any, tuple[Any, ...], dict[str, Any], list[Tensor]]


class Waiting(IntEnum):
    """What becomes of who waits for a card."""

    GOES = 0
    RAISES = 1
    LOSES_THE_CARD = 2


class SimulatedGraph:
    """What was recorded; the tensors between its operators stay. A replay is one launch."""

    counted: ClassVar[Callable[[], AbstractContextManager[None]]] = contextlib.nullcontext

    def __init__(self) -> None:
        self.recorded: list[Recorded] = []

    def __repr__(self) -> str:
        return f"<SimulatedGraph of {len(self.recorded)} operators>"

    def forget_results(self) -> None:
        """A capture computes nothing."""
        for *_, results in self.recorded:
            for result in results:
                if result.is_floating_point():
                    result.fill_(float("nan"))

    @torch.inference_mode()
    def replay(self) -> None:
        """Compute everything again, each result to where it was."""
        with type(self).counted():
            for operator, args, options, results in self.recorded:
                again = operator(*args, **options)
                for result, new in zip(results, tree_leaves(again), strict=True) if results else ():
                    result.copy_(new)


class _Recorder(TorchDispatchMode):
    def __init__(self, graph: SimulatedGraph) -> None:
        super().__init__()
        self._graph = graph

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        options = dict(kwargs or {})
        if not torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CUDA"):
            with self:  # inference mode tells of compound operators only
                made_of = func.decompose(*args, **options)
            if made_of is not NotImplemented:
                return made_of
        outcome = func(*args, **options)
        tensors = [leaf for leaf in tree_leaves((args, options, outcome)) if isinstance(leaf, Tensor)]
        if any(tensor.is_cuda for tensor in tensors) and not func.is_view:
            is_written = any(alias.alias_info is not None for alias in func._schema.arguments)
            results = [] if is_written else [leaf for leaf in tree_leaves(outcome) if isinstance(leaf, Tensor)]
            self._graph.recorded.append((func, args, options, results))
        return outcome


def graph_answers(on_waiting: Callable[[Waiting], None]) -> dict[str, Any]:
    """What `torch.cuda` has of graphs."""
    capturing: list[SimulatedGraph] = []
    pools = itertools.count()

    @contextlib.contextmanager
    def graph(recorded: SimulatedGraph, pool: Any = None, capture_error_mode: str = "global") -> Iterator[None]:
        capturing.append(recorded)
        on_waiting(Waiting.LOSES_THE_CARD)
        try:
            with _Recorder(recorded):
                yield
        finally:
            on_waiting(Waiting.GOES)
            capturing.pop()
        with torch.inference_mode():
            recorded.forget_results()

    modes = [0]

    def set_mode(mode: str | int) -> None:
        """As torch does: it warns once, and has set the mode by then."""
        on_waiting(Waiting.RAISES if mode == "error" else Waiting.GOES)
        modes.append(2 if mode == "error" else 0)
        if len(modes) == 2:
            warnings.warn("Synchronization debug mode is a prototype feature (simulated)", stacklevel=1)

    return {
        "CUDAGraph": SimulatedGraph,
        "graph": graph,
        "graph_pool_handle": lambda: (0, next(pools)),
        "get_sync_debug_mode": lambda: modes[-1],
        "set_sync_debug_mode": set_mode,
        "is_current_stream_capturing": lambda: bool(capturing),
    }
