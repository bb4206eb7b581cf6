"""The machines of a network as pictures show them: what each does, what goes between them, and which are near one another."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from swarmnode.plan.cost import transfer_s
from swarmnode.plan.offline.grid import TINY_S, Dendrogram, dendrogram
from swarmnode.plan.offline.scenario import Scenario
from swarmnode.plan.spans.flow import Floats

MOST = 128  # machines that a picture shows
APART = 2.0  # links between clusters take at least so many times as long as those inside
MESSAGE_BYTES = 1e6  # by which near and far are told
IDLE = -1  # the role of who does nothing


@dataclass(frozen=True, eq=False)
class Machines:
    """N of them. `roles`: of each, which of the `role_names` it has, or IDLE; `traffic`: what goes from one to another, by
    number, in any measure."""

    names: tuple[str, ...]
    regions: tuple[str | None, ...]
    delay_s: Floats  # [N, N], from row to column, one way
    bandwidth_bps: Floats  # [N, N]
    roles: tuple[int, ...]
    role_names: tuple[str, ...]
    traffic: Mapping[tuple[int, int], float]

    def __repr__(self) -> str:
        return f"<Machines: {len(self.names)} in {len(self.role_names)} roles>"

    def only(self, chosen: Sequence[int]) -> Machines:
        """These, in this order."""
        pairs, number = np.ix_(chosen, chosen), {machine: at for at, machine in enumerate(chosen)}
        return replace(
            self,
            names=tuple(self.names[machine] for machine in chosen),
            regions=tuple(self.regions[machine] for machine in chosen),
            delay_s=self.delay_s[pairs],
            bandwidth_bps=self.bandwidth_bps[pairs],
            roles=tuple(self.roles[machine] for machine in chosen),
            traffic={
                (number[here], number[there]): amount
                for (here, there), amount in self.traffic.items()
                if here in number and there in number
            },
        )

    def shown(self) -> Machines:
        """At most MOST of them, those that do something before all others, with clusters side by side."""
        by_role = sorted(range(len(self.names)), key=lambda machine: (self.roles[machine] == IDLE, machine))
        busy = by_role[: len(by_role) - self.roles.count(IDLE)] or by_role
        kept = by_role[:MOST] if len(busy) <= MOST else busy[:: -(-len(busy) // MOST)]
        some = self.only(sorted(kept))
        return some.only(dendrogram(some.apart_s()).order)

    def apart_s(self) -> Floats:
        """[N, N]: what a message takes between each two, in the slower direction."""
        one_way_s = transfer_s(MESSAGE_BYTES, self.delay_s, self.bandwidth_bps)
        both_s: Floats = np.maximum(one_way_s, one_way_s.T)
        return both_s

    def clusters(self) -> list[list[int]]:
        """Machines that are near one another, cut where links become slower by the most; one cluster if none stands apart."""
        tree = dendrogram(self.apart_s())
        return tree.clusters(_within(tree))

    def place(self, cluster: Sequence[int]) -> str:
        """What to call a cluster: the region that all of it is in, or its machines' names."""
        regions = {self.regions[machine] for machine in cluster}
        first, *others = cluster
        if not others:
            return self.names[first]
        return (len(regions) == 1 and self.regions[first]) or f"{self.names[first]} and {len(others)} more"


def planned_machines(
    network: Scenario, stages: Sequence[Sequence[int]], stage_names: Sequence[str], pipelines: Sequence[Sequence[int]]
) -> Machines:
    """The devices of a network in the stages of a plan; what pipelines hand on, each hop once, is the traffic."""
    role_of = {device: stage for stage, members in enumerate(stages) for device in members}
    return Machines(
        tuple(network.label(device) for device in range(network.devices)),
        network.regions,
        network.delay_s,
        network.bandwidth_bps,
        tuple(role_of.get(device, IDLE) for device in range(network.devices)),
        tuple(stage_names),
        dict.fromkeys(_hops(pipelines), 1.0),
    )


def _hops(pipelines: Sequence[Sequence[int]]) -> Iterator[tuple[int, int]]:
    for pipeline in pipelines:
        yield from pairwise(pipeline)


def _within(tree: Dendrogram) -> float:
    """The cost below the largest relative step of all joinings; infinite where that is no step to speak of."""
    values = np.unique(tree.gaps)
    steps = values[1:] / np.maximum(values[:-1], TINY_S)
    if not len(steps) or steps.max() < APART:
        return float("inf")
    return float(values[int(steps.argmax())])
