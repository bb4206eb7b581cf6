"""Rates: the speed of a machine at each kind of work, and the time that a piece of work takes."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from swarmnode.compute.graph.costs.work import (
    ATTENTION,
    BATCH_NORM,
    CALLS,
    CONVOLUTION,
    FILTERS,
    FRESH,
    HARD,
    LARGE,
    MATMUL,
    PLAIN,
    RANDOM,
    SOFT,
    ComputeWork,
    WorkCounter,
)
from swarmnode.compute.stopwatch import synchronize
from swarmnode.compute.training.randomness import CounterDropout

MEASURING_BYTES = 96 << 20  # most memory of a measurement at a time, with its outputs and torch's own buffers
_TRIALS = 5
_FRESH_BLOCKS = 72  # of 1 MiB: more than the 64 that glibc keeps of freed memory


@dataclass(frozen=True)
class Rates:
    """Speeds of a device: amounts of work per second, by kind of work."""

    per_s: Mapping[str, float]

    def seconds(self, work: ComputeWork) -> float:
        """Return the seconds that the work takes."""
        return sum(amount / self.per_s[kind] for kind, amount in work.amounts.items())


REFERENCE = Rates(
    {
        CALLS: 3e5,
        PLAIN: 3e10,
        LARGE: 1e10,
        SOFT: 1e10,
        HARD: 5e9,
        RANDOM: 2e9,
        BATCH_NORM: 5e9,
        MATMUL: 1e11,
        CONVOLUTION: 1e11,
        FILTERS: 2e9,
        ATTENTION: 5e10,
        FRESH: 5e9,
    }
)
"""Rates of a middling processor, for decisions that must not depend on the machine that makes them"""


def measure_rates(
    device: torch.device | str = "cpu",
    autocast_dtype: torch.dtype | None = None,
    *,
    clock: Callable[[], float] = time.perf_counter,
) -> Rates:
    """Measure this machine's rates under its present load, with torch's present number of threads. Takes about a second.

    `autocast_dtype` is the dtype of autocast; None for no autocast.
    """
    device = torch.device(device)
    per_s: dict[str, float] = {}
    with torch.autocast(device.type, autocast_dtype, enabled=autocast_dtype is not None):
        for kind, trial, stands_for in _trials(device):
            work = _counted(trial) if stands_for is None else stands_for
            other = Rates(per_s).seconds(ComputeWork({done: work.amounts.get(done, 0.0) for done in per_s}))
            took_s = _usual_s(trial, device, clock)
            per_s[kind] = work.amounts[kind] / max(took_s - other, took_s / 100, 1e-9)
    return Rates(per_s)


def _trials(device: torch.device) -> Iterator[tuple[str, Callable[[], Any], ComputeWork | None]]:
    """Yield for each kind of work a trial that is mostly of that kind, and the work that it counts as.

    The work is None if the dispatched operators are to be counted. Later kinds' times exclude the parts of earlier kinds.
    """

    def normal(*shape: int, learns: bool = False) -> Tensor:
        return torch.randn(*shape, device=device, requires_grad=learns)

    def backward(output: Tensor, *inputs: Tensor) -> Any:
        return torch.autograd.grad(output, inputs, output.detach())

    tiny = torch.zeros(1, device=device)
    yield CALLS, lambda: [tiny + tiny for _ in range(1000)], None

    block = normal(1 << 18)  # 1 MiB, as activations are

    ring = [torch.empty_like(block) for _ in range(32)]  # more than caches hold, and no new memory is allocated
    yield PLAIN, functools.partial(_add_along, ring, block), None
    del ring
    fresh = ComputeWork({FRESH: _FRESH_BLOCKS * block.nbytes, PLAIN: 3 * _FRESH_BLOCKS * block.nbytes})
    yield FRESH, lambda: [block + block for _ in range(_FRESH_BLOCKS)], fresh
    large = normal(1 << 23)
    yield LARGE, functools.partial(torch.add, large, large), None
    del large  # not kept for the following trials
    yield SOFT, lambda: [torch.softmax(block.view(-1, 512), 1) for _ in range(20)], None
    yield HARD, lambda: [torch.tanh(block) for _ in range(5)], None

    def drop() -> list[Tensor]:
        with CounterDropout() as dropout:
            return [dropout.dropout(block) for _ in range(5)]

    yield RANDOM, drop, ComputeWork({RANDOM: 5 * (2 * block.nbytes + block.numel())})  # reads, writes and a mask

    images, moments = normal(8, 64, 16, 16, learns=True), torch.ones(64, device=device)

    def batch_norm() -> Tensor:
        return functional.batch_norm(images, moments.clone(), moments.clone(), training=True)

    yield BATCH_NORM, lambda: [backward(batch_norm(), images) for _ in range(5)], None

    matrix = normal(512, 512)
    yield MATMUL, lambda: [matrix @ matrix for _ in range(5)], None

    kernel = normal(64, 64, 3, 3, learns=True)
    yield CONVOLUTION, lambda: backward(functional.conv2d(images, kernel, padding=1), images, kernel), None

    small, filters = normal(2, 256, 4, 4, learns=True), normal(512, 256, 3, 3, learns=True)
    yield FILTERS, lambda: backward(functional.conv2d(small, filters, padding=1), small, filters), None

    query = normal(4, 8, 128, 64, learns=True)
    yield ATTENTION, lambda: backward(functional.scaled_dot_product_attention(query, query, query), query), None


def _add_along(ring: Sequence[Tensor], block: Tensor) -> None:
    for at, output in enumerate(ring):
        torch.add(ring[at - 1], block, out=output)


def _counted(trial: Callable[[], Any]) -> ComputeWork:
    counter = WorkCounter()
    with counter:
        trial()
    return counter.work


def _usual_s(trial: Callable[[], Any], device: torch.device, clock: Callable[[], float]) -> float:
    seconds = []
    for _ in range(_TRIALS):
        start = clock()
        trial()
        synchronize(device)
        seconds.append(clock() - start)
    return statistics.median(seconds)
