"""Warm starts: which groups may go on from the factors of their last sum, where factors alternate (ACP-SGD)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from swarmnode.codec.averaging_messages import Group
from swarmnode.net.interfaces import PeerId
from swarmnode.roles.training.coordinator.worker_handle import WorkerHandle, WorkerState

Had = Mapping[PeerId, tuple[WorkerHandle, int]]
"""Who committed a sum: by which line, and after how many moves"""


class WarmStarts:
    """A group may whose members all committed the last sum of the same blocks and have kept what they remember since: who comes, or
    comes back, makes it begin anew."""

    def __init__(self) -> None:
        self._had: dict[tuple[tuple[int, ...], int], Had] = {}

    def __repr__(self) -> str:
        return f"<WarmStarts of {len(self._had)} groups>"

    def clear(self) -> None:
        """Nobody knows any more what members remember."""
        self._had.clear()

    def may(self, group: Group, members: Iterable[WorkerHandle]) -> bool:
        """Whether all of its members have what the last sum left."""
        had, here = self._had.get((group.blocks, group.how), {}), {member.peer: member for member in members}
        return all(_still_has(had, here.get(member.peer)) for member in group.members)

    def committed(self, groups: Iterable[Group], members: Iterable[WorkerHandle]) -> None:
        """These groups' sums are what all of these members go on with. Other groupings of the same blocks are forgotten."""
        had = {member.peer: (member, member.moves) for member in members if member.state is WorkerState.USABLE}
        for group in groups:
            blocks = set(group.blocks)
            self._had = {
                key: earlier for key, earlier in self._had.items() if key[1] != group.how or blocks.isdisjoint(key[0])
            }
            self._had[group.blocks, group.how] = {
                member.peer: had[member.peer] for member in group.members if member.peer in had
            }


def _still_has(had: Had, member: WorkerHandle | None) -> bool:
    if member is None or member.peer not in had or member.state is not WorkerState.USABLE:
        return False
    handle, moves = had[member.peer]
    return handle is member and moves == member.moves
