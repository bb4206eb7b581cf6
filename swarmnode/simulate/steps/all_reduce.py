"""The end of a step: replicas agree on gradients. Who with whom is decided as live (`plan/training/groups.py`).

Every member owns a share of what a group agrees on: all send it their values of that, and it sends the sums to all
(`roles/training/averaging/all_reduce.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from swarmnode.codec.averaging_messages import Group, How
from swarmnode.codec.tensors import SPARSE_CODECS, Codec, DType, TensorInfo, payload_bytes
from swarmnode.net.interfaces import PeerId
from swarmnode.plan.compression import encoded_bytes
from swarmnode.simulate.environment.links import Links
from swarmnode.simulate.environment.model import Model
from swarmnode.swarm.records.run import Averaging

WIDENING = 4  # of the matrices of a layer, in widths of the model


def reduction_ends_s(
    now_s: float, groups: Sequence[Group], indexes: Mapping[PeerId, int], links: Links, model: Model, how: Averaging
) -> float:
    """When the last member of the last group has everything. `indexes`: of the members in the links."""
    exchanges = [
        _Exchange(
            members=[indexes[member.peer] for member in group.members],
            shares={indexes[member.peer]: member.share for member in group.members if member.count},
            size_bytes=averaged_bytes(
                sum(model.block_parameters(block) for block in group.blocks), model.matrix_width, how
            ),
        )
        for group in groups
        if len(group.members) > 1 and group.how != How.APART
    ]
    settled = [exchange.gather(now_s, links) for exchange in exchanges]  # all offers leave before the first sum
    return max((exchange.spread(at_s, links) for exchange, at_s in zip(exchanges, settled, strict=True)), default=now_s)


@dataclass(frozen=True)
class _Exchange:
    """One group: those with `shares` have counted something, all `members` are to have the sum."""

    members: Sequence[int]
    shares: Mapping[int, int]
    size_bytes: float

    def owned_bytes(self, owner: int) -> float:
        """Of what it adds up."""
        return self.size_bytes * self.shares[owner] / sum(self.shares.values())

    def gather(self, now_s: float, links: Links) -> list[float]:
        """When each owner has all values of its share."""
        return [
            max(links.send(now_s, giver, owner, self.owned_bytes(owner)) for giver in self.shares)
            for owner in self.shares
        ]

    def spread(self, settled_s: Sequence[float], links: Links) -> float:
        """When everybody has the sums of all parts."""
        return max(
            links.send(at_s, owner, member, self.owned_bytes(owner))
            for owner, at_s in zip(self.shares, settled_s, strict=True)
            for member in self.members
        )


def averaged_bytes(parameters: int, width: int, how: Averaging) -> float:
    """Of the gradients of so many parameters, as the run's codec or rank sends them."""
    if how.rank:  # two factors for each matrix, taken to be of `width` x 4 `width`
        return 4.0 * min(parameters, how.rank * parameters * (1 + WIDENING) / (WIDENING * width))
    if how.codec in SPARSE_CODECS:
        return payload_bytes(TensorInfo(how.codec, DType.FLOAT32, (parameters,), int(parameters * how.keep)))
    return encoded_bytes([TensorInfo(Codec.NONE, DType.FLOAT32, (parameters,))], Codec(how.codec))
