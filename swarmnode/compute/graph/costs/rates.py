"""Rates: how fast a machine does each kind of work, and so how long a piece of work takes."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
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
        for kind, trial in _trials(device).items():
            with WorkCounter() as counter:
                trial()
            other = Rates(per_s).seconds(ComputeWork({done: counter.amounts.get(done, 0.0) for done in per_s}))
            per_s[kind] = counter.amounts[kind] / max(_fastest_s(trial, device, clock) - other, 1e-9)
    return Rates(per_s)


def _trials(device: torch.device) -> dict[str, Callable[[], Any]]:
    """For each kind something that is mostly of it; earlier kinds are subtracted from later ones."""
    tiny = torch.zeros(1, device=device)
    matrix = torch.randn(512, 512, device=device)
    block = torch.randn(1 << 18, device=device)  # 1 MiB, as activations are
    large = torch.randn(1 << 24, device=device)  # 64 MiB
    images = torch.randn(8, 64, 16, 16, device=device, requires_grad=True)
    moments = torch.ones(64, device=device)
    kernel = torch.randn(64, 64, 3, 3, device=device, requires_grad=True)
    small = torch.randn(2, 256, 4, 4, device=device, requires_grad=True)
    filters = torch.randn(512, 256, 3, 3, device=device, requires_grad=True)
    query = torch.randn(4, 8, 128, 64, device=device, requires_grad=True)

    def backward(output: Tensor, *inputs: Tensor) -> Any:
        return torch.autograd.grad(output, inputs, output.detach())

    def batch_norm() -> Tensor:
        return functional.batch_norm(images, moments.clone(), moments.clone(), training=True)

    return {
        CALLS: lambda: [tiny + tiny for _ in range(1000)],
        PLAIN: lambda: [block + block for _ in range(50)],
        LARGE: lambda: large + large,
        SOFT: lambda: [torch.softmax(block.view(-1, 512), 1) for _ in range(20)],
        HARD: lambda: [torch.tanh(block) for _ in range(5)],
        RANDOM: lambda: [torch.empty_like(block).bernoulli_(0.9) for _ in range(5)],
        BATCH_NORM: lambda: [backward(batch_norm(), images) for _ in range(5)],
        MATMUL: lambda: [matrix @ matrix for _ in range(5)],
        CONVOLUTION: lambda: backward(functional.conv2d(images, kernel, padding=1), images, kernel),
        FILTERS: lambda: backward(functional.conv2d(small, filters, padding=1), small, filters),
        ATTENTION: lambda: backward(functional.scaled_dot_product_attention(query, query, query), query),
    }


def _fastest_s(trial: Callable[[], Any], device: torch.device, clock: Callable[[], float]) -> float:
    seconds = []
    for _ in range(_TRIALS):
        start = clock()
        trial()
        synchronize(device)
        seconds.append(clock() - start)
    return min(seconds)
