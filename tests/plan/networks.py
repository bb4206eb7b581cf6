"""Networks to plan on, made up in code."""

from __future__ import annotations

import numpy as np

from swarmnode.plan.offline.grid import MicrobatchTraffic, Problem
from swarmnode.plan.offline.planner_files import Scenario
from swarmnode.plan.spans.flow import Floats

GPT3_XL = MicrobatchTraffic(activation_bytes=0.471249e9, gradient_bytes=0.65e9)  # as in arXiv 2206.01288


def network(delay_s: Floats, bandwidth_bps: Floats, regions: list[str] | None = None) -> Scenario:
    """A scenario of which nothing but its links is known."""
    devices = len(delay_s)
    unknown = (None,) * devices
    return Scenario(
        name="made up",
        regions=tuple(regions or unknown),
        delay_s=delay_s,
        bandwidth_bps=bandwidth_bps,
        gpus=unknown,
        peak_flops=unknown,
        memory_bytes=unknown,
    )


def instances(sizes: list[int], inside_gbps: float, between_gbps: float, between_ms: float = 0.0) -> Scenario:
    """Machines of several devices each, with fast links inside and slow ones between."""
    of = np.repeat(np.arange(len(sizes)), sizes)
    together = of[:, None] == of
    return network(
        np.where(together, 0.0, between_ms / 1e3),
        np.where(together, inside_gbps, between_gbps) * 1e9,
        [f"instance {number}" for number in of],
    )


def noisy_regions(devices: int, regions: int, seed: int, noise: float = 0.3) -> Scenario:
    """Regions at random places, slower the farther apart, and no two links quite the same."""
    random = np.random.default_rng(seed)
    place = random.random((regions, 2))[np.sort(random.integers(0, regions, devices))]
    distance = np.linalg.norm(place[:, None] - place, axis=-1)
    factor = np.exp(noise * np.triu(random.standard_normal((devices, devices)), 1))
    factor *= factor.T
    bandwidth_gbps = np.where(distance == 0, 5.0, 1.2 / (1 + 4 * distance)) * factor
    return network((0.003 + 0.1 * distance) * factor, bandwidth_gbps * 1e9)


def random_problem(stages: int, replicas: int, devices: int, seed: int) -> Problem:
    """Costs without any structure."""
    random = np.random.default_rng(seed)

    def symmetric() -> Floats:
        values = np.triu(random.random((devices, devices)), 1)
        return values + values.T

    return Problem(stages, replicas, symmetric(), symmetric())
