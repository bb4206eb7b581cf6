"""The end of a step: replicas agree on gradients. Who with whom is decided as live (`plan/groups.py`).

Every member owns a part of what a group agrees on: all send it their values of the part, and it sends the sum to all
(`roles/training/reducer.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from swarmnode.codec.tensors import Codec, DType, TensorInfo
from swarmnode.codec.training_messages import Group, How
from swarmnode.net.interfaces import PeerId
from swarmnode.plan.compression import encoded_bytes
from swarmnode.simulate.links import Links
from swarmnode.simulate.model import Model
from swarmnode.swarm.run import Averaging


def reduction_ends_s(
    now_s: float, groups: Sequence[Group], indexes: Mapping[PeerId, int], links: Links, model: Model, how: Averaging
) -> float:
    """When the last member of the last group has everything. `indexes`: of the members in the links."""
    return max((_ends_s(now_s, group, indexes, links, model, how) for group in groups), default=now_s)


def _ends_s(
    now_s: float, group: Group, indexes: Mapping[PeerId, int], links: Links, model: Model, how: Averaging
) -> float:
    members = [indexes[member.peer] for member in group.members]
    givers = [indexes[member.peer] for member in group.members if member.count]
    if len(members) < 2 or group.how == How.APART:
        return now_s
    part_bytes = _size_bytes(sum(model.block_parameters(block) for block in group.blocks), how) / len(givers)
    ends_s = now_s
    for owner in givers:
        settled_s = max(links.send(now_s, giver, owner, part_bytes) for giver in givers)
        ends_s = max(ends_s, *(links.send(settled_s, owner, member, part_bytes) for member in members))
    return ends_s


def _size_bytes(parameters: int, how: Averaging) -> float:
    """Of the gradients of so many parameters, as the run's codec sends them."""
    kept = int(parameters * how.keep) if how.codec == Codec.TOPK else 0
    if kept:
        return kept * 4.0  # a 16-bit value and a 16-bit index
    return encoded_bytes([TensorInfo(Codec.NONE, DType.FLOAT32, (parameters,))], Codec(how.codec))
