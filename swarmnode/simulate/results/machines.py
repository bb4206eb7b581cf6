"""Machines of a network as pictures show them: roles, traffic, and clusters of machines near one another."""

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
APART = 2.0  # least ratio of the time of links between clusters to that of links inside
MESSAGE_BYTES = 1e6  # size of the message whose transfer time is the distance of two machines
IDLE = -1  # role of a machine that does nothing


@dataclass(frozen=True, eq=False)
class Machines:
    """N machines of a network. `roles`: per machine an index into `role_names`, or IDLE. `traffic`: amount sent from one
    machine to another, by their indexes, in any layer."""

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
        """Return the `chosen` machines alone, in the order of `chosen`."""
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
        """Return at most `MOST` machines, busy ones first choice, ordered so that clusters are side by side."""
        by_role = sorted(range(len(self.names)), key=lambda machine: (self.roles[machine] == IDLE, machine))
        busy = by_role[: len(by_role) - self.roles.count(IDLE)] or by_role
        kept = by_role[:MOST] if len(busy) <= MOST else busy[:: -(-len(busy) // MOST)]
        some = self.only(sorted(kept))
        return some.only(dendrogram(some.apart_s()).order)

    def apart_s(self) -> Floats:
        """Return [N, N] seconds that a message of `MESSAGE_BYTES` takes between each two machines, in the slower direction."""
        one_way_s = transfer_s(MESSAGE_BYTES, self.delay_s, self.bandwidth_bps)
        both_s: Floats = np.maximum(one_way_s, one_way_s.T)
        return both_s

    def clusters(self) -> list[list[int]]:
        """Return clusters of machines near one another, by index, cut at the largest relative step in link times; one cluster
        if no step is large enough."""
        tree = dendrogram(self.apart_s())
        return tree.clusters(_within(tree))

    def place(self, cluster: Sequence[int]) -> str:
        """Return a name for `cluster`: its only machine, the region that all its machines are in, or its first machine and "n
        more"."""
        regions = {self.regions[machine] for machine in cluster}
        first, *others = cluster
        if not others:
            return self.names[first]
        return (len(regions) == 1 and self.regions[first]) or f"{self.names[first]} and {len(others)} more"


def planned_machines(
    network: Scenario, stages: Sequence[Sequence[int]], stage_names: Sequence[str], pipelines: Sequence[Sequence[int]]
) -> Machines:
    """Return the devices of `network` with their stages of a plan as roles. The traffic is 1 for each hop of the `pipelines`."""
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
    """Return the gap below the largest relative step between gaps of the tree; infinity if that step is below a factor of
    `APART`."""
    values = np.unique(tree.gaps)
    steps = values[1:] / np.maximum(values[:-1], TINY_S)
    if not len(steps) or steps.max() < APART:
        return float("inf")
    return float(values[int(steps.argmax())])
