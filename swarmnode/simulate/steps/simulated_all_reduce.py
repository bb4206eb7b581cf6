"""Simulated all-reduce of the gradients at the end of a step, in the same groups as on nodes (`plan/training/averaging.py`).

Every contributor owns a share of the group's vector: it receives the values of that share from all contributors and sends the
sums to all members. Between clusters, one gatherer of each cluster sends and receives for its cluster
(`training/averaging/attempt.py`).
"""

from __future__ import annotations

import heapq
import itertools
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np
from msgspec.structs import replace

from swarmnode.codec.training_messages import Group, How
from swarmnode.net.interfaces import PeerId
from swarmnode.plan.training.averaging import AveragingNetwork, averaged_bytes, gathering
from swarmnode.simulate.environment.links import Links
from swarmnode.simulate.environment.model import Model
from swarmnode.swarm.records.run import Averaging

Came = Callable[[int, float], None]
"""Function called with the receiver of a message and its arrival time in seconds."""


def reduction_ends_s(
    now_s: float, groups: Sequence[Group], indexes: Mapping[PeerId, int], links: Links, model: Model, how: Averaging
) -> float:
    """Return the time at which the last member of the last group has all sums; `now_s` if no group has anything to exchange.
    `indexes` gives the members' indexes in `links`."""
    exchanges = [
        _Exchange(group, indexes, _bytes_by_member(group, model, how))
        for group in groups
        if len(group.members) > 1 and group.how != How.APART and any(member.count for member in group.members)
    ]
    sends = _Sends(links)
    for exchange in exchanges:
        exchange.begin(now_s, sends)
    sends.run()
    return max((exchange.ends_s for exchange in exchanges), default=now_s)


def averaging_network(group: Group, indexes: Mapping[PeerId, int], links: Links) -> AveragingNetwork:
    """Return the network between the members of `group`: bandwidth and delay of each pair in the worse direction, and uplinks."""
    members = [indexes[member.peer] for member in group.members]
    delay_NN, path_bps_NN = links.between(members)
    slower_NN = np.minimum(path_bps_NN, path_bps_NN.T)
    lines_bps = np.array([links.uplink_bps(member) for member in members])
    return AveragingNetwork(slower_NN, lines_bps, np.maximum(delay_NN, delay_NN.T))


def vector_bytes(group: Group, model: Model, how: Averaging) -> float:
    """Return the bytes of the vector that `group` averages, as sent."""
    return averaged_bytes(sum(model.block_parameters(block) for block in group.blocks), model.matrix_width, how)


def _bytes_by_member(group: Group, model: Model, how: Averaging) -> dict[PeerId, float]:
    """Return the bytes of the whole vector in the encoding of each contributor; members without a count are left out."""
    usual_bytes = vector_bytes(group, model, how)
    return {
        member.peer: vector_bytes(group, model, replace(how, codec=member.form.codec, keep=member.form.keep))
        if how.by_line
        else usual_bytes
        for member in group.members
        if member.count
    }


class _Sends:
    """Queue of the messages of all groups, ordered by the time at which they are ready, so that no group holds up another."""

    def __init__(self, links: Links) -> None:
        self._links = links
        self._waiting: list[tuple[float, int, int, Mapping[int, float], Came]] = []
        self._numbers = itertools.count()

    def add(self, at_s: float, sender: int, sizes_bytes: Mapping[int, float], came: Came) -> None:
        """Queue messages from `sender`, ready at `at_s`, that are sent together; `came` is called for each arrival."""
        heapq.heappush(self._waiting, (at_s, next(self._numbers), sender, sizes_bytes, came))

    def run(self) -> None:
        """Send until the queue is empty; arrivals may add more messages."""
        while self._waiting:
            at_s, _, sender, sizes_bytes, came = heapq.heappop(self._waiting)
            for receiver, came_s in self._links.send_together(at_s, sender, sizes_bytes).items():
                came(receiver, came_s)


class _Exchange:
    """All-reduce of one group: members with a count contribute, all members receive the sum."""

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
        self._gathers = {  # share of the vector that each contributor gathers
            gatherer: sum(share for (one, _), share in self._gathered.items() if one == gatherer)
            for gatherer in self._contributors
        }
        self._arrived_s = defaultdict[int, list[float]](list)  # by gatherer: arrival times of the contributors' values
        self._summed_s = defaultdict[int, list[float]](list)  # by owner: arrival times of the clusters' sums

    def begin(self, now_s: float, sends: _Sends) -> None:
        """Let every contributor send its values to the gatherers of its cluster at `now_s`."""
        self._sends, self.ends_s = sends, now_s
        for giver in self._contributors:
            near = [one for one in self._contributors if self._are_near(giver, one)]
            sizes_bytes = {one: self._size_bytes[giver] * self._gathers[one] for one in near}
            sends.add(now_s, giver, sizes_bytes, self._record_arrival)

    def _record_arrival(self, gatherer: int, came_s: float) -> None:
        """Note an arrival at `gatherer`; with the values of its whole cluster it sends the sums to the owners."""
        given_s = self._arrived_s[gatherer]
        given_s.append(came_s)
        if len(given_s) == sum(self._are_near(gatherer, one) for one in self._contributors):
            sizes_bytes = {
                owner: share * self._size_bytes[gatherer]
                for (by, owner), share in self._gathered.items()
                if by == gatherer
            }
            self._sends.add(max(given_s), gatherer, sizes_bytes, self._summed)

    def _summed(self, owner: int, came_s: float) -> None:
        """Note an arrival at `owner`; with the sums of all clusters it sends them back to the gatherers, which pass them on."""
        summed_s = self._summed_s[owner]
        summed_s.append(came_s)
        sizes_bytes = {
            by: share * self._size_bytes[owner] for (by, one), share in self._gathered.items() if one == owner
        }
        if len(summed_s) == len(sizes_bytes):
            back = partial(self._handed_back, sizes_bytes)
            self._sends.add(max(summed_s), owner, sizes_bytes, back)

    def _handed_back(self, sizes_bytes: Mapping[int, float], gatherer: int, came_s: float) -> None:
        near = [member for member in self._cluster_of if self._are_near(member, gatherer)]
        self._sends.add(came_s, gatherer, dict.fromkeys(near, sizes_bytes[gatherer]), self._come)

    def _come(self, _member: int, came_s: float) -> None:
        self.ends_s = max(self.ends_s, came_s)

    def _are_near(self, first: int, other: int) -> bool:
        return self._cluster_of[first] == self._cluster_of[other]
