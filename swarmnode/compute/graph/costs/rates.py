"""Rates: how fast a machine does each kind of work, and so how long a piece of work takes."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Mapping
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

MEASURING_BYTES = 96 << 20  # that a measurement takes at most at a time, its outputs and torch's own buffers among them
_TRIALS = 5


@dataclass(frozen=True)
class Rates:
    """Amounts per second, by kind of work."""

    per_s: Mapping[str, float]

    def seconds(self, work: ComputeWork) -> float:
        """How long the work takes."""
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
    }
)
"""A middling processor, for decisions that must not depend on the machine that makes them."""


def measure_rates(
    device: torch.device | str = "cpu",
    autocast_dtype: torch.dtype | None = None,
    *,
    clock: Callable[[], float] = time.perf_counter,
) -> Rates:
    """Of this machine, with as many threads as torch has now, where passes are computed in that dtype. Takes about a second."""
    device = torch.device(device)
    per_s: dict[str, float] = {}
    with torch.autocast(device.type, autocast_dtype, enabled=autocast_dtype is not None):
        for kind, trial in _trials(device):
            with WorkCounter() as counter:
                trial()
            other = Rates(per_s).seconds(ComputeWork({done: counter.amounts.get(done, 0.0) for done in per_s}))
            per_s[kind] = counter.amounts[kind] / max(_fastest_s(trial, device, clock) - other, 1e-9)
    return Rates(per_s)


def _trials(device: torch.device) -> Iterator[tuple[str, Callable[[], Any]]]:
    """For each kind something that is mostly of it; earlier kinds are subtracted from later ones."""

    def normal(*shape: int, learns: bool = False) -> Tensor:
        return torch.randn(*shape, device=device, requires_grad=learns)

    def backward(output: Tensor, *inputs: Tensor) -> Any:
        return torch.autograd.grad(output, inputs, output.detach())

    tiny = torch.zeros(1, device=device)
    yield CALLS, lambda: [tiny + tiny for _ in range(1000)]

    block = normal(1 << 18)  # 1 MiB, as activations are
    yield PLAIN, lambda: [block + block for _ in range(50)]
    large = normal(1 << 23)
    yield LARGE, functools.partial(torch.add, large, large)
    del large  # not kept for the trials that follow
    yield SOFT, lambda: [torch.softmax(block.view(-1, 512), 1) for _ in range(20)]
    yield HARD, lambda: [torch.tanh(block) for _ in range(5)]
    yield RANDOM, lambda: [torch.empty_like(block).bernoulli_(0.9) for _ in range(5)]

    images, moments = normal(8, 64, 16, 16, learns=True), torch.ones(64, device=device)

    def batch_norm() -> Tensor:
        return functional.batch_norm(images, moments.clone(), moments.clone(), training=True)

    yield BATCH_NORM, lambda: [backward(batch_norm(), images) for _ in range(5)]

    matrix = normal(512, 512)
    yield MATMUL, lambda: [matrix @ matrix for _ in range(5)]

    kernel = normal(64, 64, 3, 3, learns=True)
    yield CONVOLUTION, lambda: backward(functional.conv2d(images, kernel, padding=1), images, kernel)

    small, filters = normal(2, 256, 4, 4, learns=True), normal(512, 256, 3, 3, learns=True)
    yield FILTERS, lambda: backward(functional.conv2d(small, filters, padding=1), small, filters)

    query = normal(4, 8, 128, 64, learns=True)
    yield ATTENTION, lambda: backward(functional.scaled_dot_product_attention(query, query, query), query)


def _fastest_s(trial: Callable[[], Any], device: torch.device, clock: Callable[[], float]) -> float:
    seconds = []
    for _ in range(_TRIALS):
        start = clock()
        trial()
        synchronize(device)
        seconds.append(clock() - start)
    return min(seconds)
