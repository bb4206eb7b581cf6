"""What a grid of S stages x R pipelines costs on a network: DT-FM's model (arXiv 2206.01288, section 3).

A grid puts a device at every (stage, pipeline). The devices of one stage hold the same layers and average their gradients;
the devices of one pipeline hand activations on from stage to stage, and gradients back. Nothing but traffic counts.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from swarmnode.errors import UsageError
from swarmnode.plan.cost import transfer_s
from swarmnode.plan.offline.scenario import FloatArray, Scenario

Grid = npt.NDArray[np.intp]  # [S, R]: the device at each stage of each pipeline; no device twice
Members = npt.NDArray[np.intp]  # [R]: the devices of one stage


@dataclass(frozen=True)
class MicrobatchTraffic:
    """Bytes of one microbatch's activations between two stages, and of the gradients of one stage."""

    activation_bytes: float
    gradient_bytes: float


@dataclass(frozen=True)
class Cost:
    """Seconds of one training step spent on traffic."""

    data_parallel_s: float  # the slowest stage averages its gradients
    pipeline_s: float  # activations forward and gradients back, each hop as slow as its slowest link

    @property
    def total_s(self) -> float:
        """One after the other."""
        return self.data_parallel_s + self.pipeline_s


@dataclass(frozen=True, eq=False)
class Problem:
    """S stages x R pipelines to be laid on D >= S R devices. What is sent both ways takes as long as the slower direction."""

    stages: int
    replicas: int
    averaging_s: FloatArray  # [D, D]: what a device pays for a mate of its stage
    hop_s: FloatArray  # [D, D]: one hop, one way
    kinds: FloatArray | None = None  # [D]: only devices of one kind may take each other's places

    def __repr__(self) -> str:
        return f"Problem({self.stages} stages x {self.replicas} pipelines on {self.devices} devices)"

    @property
    def devices(self) -> int:
        """D; those beyond S R stay unused."""
        return len(self.hop_s)

    @classmethod
    def on(cls, scenario: Scenario, *, stages: int, replicas: int, traffic: MicrobatchTraffic) -> Problem:
        """The problem of this network and traffic. Raises UsageError where the grid is empty or larger than the network."""
        if stages < 1 or replicas < 1:
            raise UsageError(f"{stages} stages x {replicas} pipelines: there must be at least one of each")
        if stages * replicas > scenario.devices:
            raise UsageError(
                f"{stages} stages x {replicas} pipelines need {stages * replicas} devices; "
                f"{scenario.name} has {scenario.devices}"
            )
        everybody = np.arange(scenario.devices)
        return cls(
            stages,
            replicas,
            averaging_s=2 * slower_way_s(scenario, everybody, traffic.gradient_bytes / replicas),
            hop_s=slower_way_s(scenario, everybody, traffic.activation_bytes),
        )

    def cost(self, grid: Grid) -> Cost:
        """What this grid costs."""
        return Cost(max(map(self.stage_averaging_s, grid)), self.pipeline_s(grid))

    def stage_averaging_s(self, members: Members) -> float:
        """What the slowest of the devices in a stage pays for all its mates together."""
        return float(self.averaging_s[members[:, None], members].sum(axis=1).max())

    def pipeline_s(self, grid: Grid) -> float:
        """All hops of a pipeline, each as slow as its slowest link, there and back."""
        return 2 * float(self.hop_s[grid[:-1], grid[1:]].max(axis=1).sum())


def slower_way_s(scenario: Scenario, members: Members, size_bytes: float) -> FloatArray:
    """[M, M]: sending so many bytes from one member to another, at the pace of the slower direction; nothing to oneself."""
    part = np.ix_(members, members)
    seconds = transfer_s(size_bytes, scenario.delay_s[part], scenario.bandwidth_bps[part])
    slower: FloatArray = np.maximum(seconds, seconds.T)
    np.fill_diagonal(slower, 0.0)
    return slower
