"""Small scenarios and models, made of numbers that can be worked out by hand."""

from __future__ import annotations

import numpy as np

from swarmnode.plan.offline.planner_files import Scenario
from swarmnode.simulate.environment.model import Model
from swarmnode.simulate.results.measures import Measures
from swarmnode.simulate.results.report import summary
from swarmnode.simulate.settings import Settings
from swarmnode.simulate.simulation import Simulation, SimulationResult

MB = 10**6


def scenario(
    speeds: list[float | None],
    *,
    delay_s: float = 0.01,
    bandwidth_bps: float = 1e8,
    memory_bytes: int = 1000 * MB,
    regions: list[str | None] | None = None,
    gpus: list[str | None] | None = None,
) -> Scenario:
    """Devices of these units/s, equally far from one another."""
    count = len(speeds)
    return Scenario(
        name="test",
        regions=tuple(regions or [None] * count),
        delay_s=np.full((count, count), delay_s) - delay_s * np.eye(count),
        bandwidth_bps=np.full((count, count), bandwidth_bps),
        gpus=tuple(gpus or [None] * count),
        peak_flops=(None,) * count,
        memory_bytes=(memory_bytes,) * count,
        decode_units_per_s=tuple(speeds),
    )


def model(units: int = 8, *, parameters: int = 10 * MB, hidden: int = 1000, shared: int = 0) -> Model:
    """Units that are all alike."""
    return Model("even", (parameters,) * units, (parameters,) * units, (2 * hidden,) * units, hidden, shared)


def run(network: Scenario, shape: Model, settings: Settings, **more: object) -> SimulationResult:
    return Simulation(network, shape, settings, **more).run()  # type: ignore[arg-type]


def figures(result: SimulationResult) -> dict[str, object]:
    """The summary without what this machine's clock measured."""
    return {name: value for name, value in summary(result).items() if name != "decisions"}


def total(measures: Measures, name: str) -> float:
    return measures.totals.get(name, 0.0)
