"""The end of a step: replicas agree on gradients. Who with whom is decided as live (`plan/training/groups.py`).

Every member owns a share of what a group agrees on: all send it their values of that, and it sends the sums to all; over clusters,
one of each does so for all there (`roles/training/averaging/attempt.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from msgspec.structs import replace

from swarmnode.codec.averaging_messages import Group, How
from swarmnode.net.interfaces import PeerId
from swarmnode.plan.training.averaging_forecast import AveragingNetwork, averaged_bytes, gathering
from swarmnode.simulate.environment.links import Links
from swarmnode.simulate.environment.model import Model
from swarmnode.swarm.records.run import Averaging


def reduction_ends_s(
    now_s: float, groups: Sequence[Group], indexes: Mapping[PeerId, int], links: Links, model: Model, how: Averaging
) -> float:
    """When the last member of the last group has everything. `indexes`: of the members in the links."""
    exchanges = [
        _Exchange(group, indexes, _bytes_by_member(group, model, how))
        for group in groups
        if len(group.members) > 1 and group.how != How.APART and any(member.count for member in group.members)
    ]
    settled = [exchange.gather(now_s, links) for exchange in exchanges]  # all offers leave before the first sum
    return max((exchange.spread(at_s, links) for exchange, at_s in zip(exchanges, settled, strict=True)), default=now_s)


def averaging_network(group: Group, indexes: Mapping[PeerId, int], links: Links) -> AveragingNetwork:
    """Between a group's members, as they have measured it."""
    members = [indexes[member.peer] for member in group.members]
    delay_NN, path_bps_NN = links.between(members)
    slower_NN = np.minimum(path_bps_NN, path_bps_NN.T)
    lines_bps = np.array([links.uplink_bps(member) for member in members])
    return AveragingNetwork(slower_NN, lines_bps, np.maximum(delay_NN, delay_NN.T))


def vector_bytes(group: Group, model: Model, how: Averaging) -> float:
    """Of what a group averages, as it travels."""
    return averaged_bytes(sum(model.block_parameters(block) for block in group.blocks), model.matrix_width, how)


def _bytes_by_member(group: Group, model: Model, how: Averaging) -> dict[PeerId, float]:
    """Of the whole vector as each contributor sends it."""
    usual_bytes = vector_bytes(group, model, how)
    return {
        member.peer: vector_bytes(group, model, replace(how, codec=member.form.codec, keep=member.form.keep))
        if how.by_line
        else usual_bytes
        for member in group.members
        if member.count
    }


class _Exchange:
    """One group: those who have counted something contribute, all members are to have the sum."""

    def __init__(self, group: Group, indexes: Mapping[PeerId, int], sizes_bytes: Mapping[PeerId, float]) -> None:
        self._cluster_of = {indexes[member.peer]: member.cluster for member in group.members}
        contributors = [member for member in group.members if member.count]
        self._contributors = [indexes[member.peer] for member in contributors]
        self._size_bytes = {indexes[peer]: size_bytes for peer, size_bytes in sizes_bytes.items()}
        shares, clusters = ([getattr(one, field) for one in contributors] for field in ("share", "cluster"))
        gathered_NN = gathering(shares, clusters)
        self._gathered = {
            (gatherer, owner): float(gathered_NN[row, column])
            for row, gatherer in enumerate(self._contributors)
            for column, owner in enumerate(self._contributors)
            if gathered_NN[row, column]
        }
        self._gathers = {  # the share of the vector, by who gathers it
            gatherer: sum(share for (one, _), share in self._gathered.items() if one == gatherer)
            for gatherer in self._contributors
        }

    def __repr__(self) -> str:
        return f"<_Exchange of {len(self._cluster_of)} members, {len(self._contributors)} contribute>"

    def gather(self, now_s: float, links: Links) -> dict[int, float]:
        """When each owner has all values of its share: first each cluster's, and then the clusters' sums."""
        inside_s = dict.fromkeys(self._contributors, now_s)
        for giver in self._contributors:
            near = {
                one: self._size_bytes[giver] * self._gathers[one]
                for one in self._contributors
                if self._are_near(giver, one)
            }
            for gatherer, came_s in links.send_together(now_s, giver, near).items():
                inside_s[gatherer] = max(inside_s[gatherer], came_s)
        ends_s = dict(inside_s)
        for gatherer in self._contributors:
            sums = {
                one: share * self._size_bytes[gatherer] for (by, one), share in self._gathered.items() if by == gatherer
            }
            for owner, came_s in links.send_together(inside_s[gatherer], gatherer, sums).items():
                ends_s[owner] = max(ends_s[owner], came_s)
        return ends_s

    def spread(self, settled_s: Mapping[int, float], links: Links) -> float:
        """When everybody has the sums of all parts: lines carry first what is there first."""
        sizes_bytes = {part: share * self._size_bytes[part[1]] for part, share in self._gathered.items()}
        come_s = dict[tuple[int, int], float]()
        for owner in self._contributors:
            back = {gatherer: sizes_bytes[gatherer, one] for gatherer, one in self._gathered if one == owner}
            for gatherer, came_s in links.send_together(settled_s[owner], owner, back).items():
                come_s[gatherer, owner] = came_s
        return max(
            came_s
            for part in sorted(come_s, key=lambda part: (come_s[part], part))
            for near in [[member for member in self._cluster_of if self._are_near(member, part[0])]]
            for came_s in links.send_together(come_s[part], part[0], dict.fromkeys(near, sizes_bytes[part])).values()
        )

    def _are_near(self, one: int, other: int) -> bool:
        return self._cluster_of[one] == self._cluster_of[other]
