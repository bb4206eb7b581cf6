"""Models of the papers that are reproduced here, as the simulator sees them, and networks out of a few numbers."""

from __future__ import annotations

import itertools

import numpy as np

from swarmnode.plan.offline.planner_files import Scenario
from swarmnode.plan.view import Span
from swarmnode.simulate.environment.model import Model


def transformer(name: str, layers: int, hidden: int, vocabulary: int = 0) -> Model:
    """Return a GPT-like model: 12 hidden² parameters a layer; with a vocabulary also an embedding and a head that are not
    tied."""
    ends = [vocabulary * hidden] if vocabulary else []
    parameters = (*ends, *[12 * hidden**2] * layers, *ends)
    cache = (*[0 for _ in ends], *[4 * hidden] * layers, *[0 for _ in ends])
    return Model(name, parameters, parameters, cache, hidden)


def even_network(gpu: str, devices: int, *, delay_s: float, bandwidth_bps: float) -> Scenario:
    """Return a network of equal cards at equal distances from one another."""
    apart = 1 - np.eye(devices)
    return Scenario(
        name=f"{devices} x {gpu}",
        regions=("here",) * devices,
        delay_s=delay_s * apart,
        bandwidth_bps=np.full((devices, devices), bandwidth_bps),
        gpus=(gpu,) * devices,
        peak_flops=(None,) * devices,
        memory_bytes=(None,) * devices,
    )


def cut(shares: list[float], units: int) -> list[Span]:
    """Return contiguous spans over all units, in proportion to the shares, at least one unit each."""
    bounds = np.cumsum([0.0, *shares]) / sum(shares) * units
    edges = [round(float(bound)) for bound in bounds]
    for index in range(1, len(edges)):  # every part at least one unit, from the left, then from the right
        edges[index] = max(edges[index], edges[index - 1] + 1)
    edges[-1] = units
    for index in range(len(edges) - 2, -1, -1):
        edges[index] = min(edges[index], edges[index + 1] - 1)
    return [Span(start, end) for start, end in itertools.pairwise(edges)]
