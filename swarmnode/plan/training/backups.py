"""Which training states are kept on other peers' disks, on whose, and how often: pure, from announcements alone.

A unit that fewer nodes hold than wanted is scarce. Its states go to peers that offer disk space and do not hold it: first to
those that hold nothing, and such as are not behind the same address, then in an order drawn for each unit, so that the next step
replaces the last.

Only steps that all holders keep are of use, for a run goes on from one step. Who cannot bring every checkpoint away in time brings
every fourth or every sixteenth, which all keep for longer for this (`swarm/storage/states.py`).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence

from swarmnode.codec.body import SHARED
from swarmnode.net.interfaces import PeerId
from swarmnode.net.limits.address_group import wide_group
from swarmnode.plan.view import draw
from swarmnode.swarm.records.announcement import Announcement, State
from swarmnode.swarm.storage.states import STRIDES

UPLINK_SHARE = 0.25  # of what a node sends, at most, for backups
UNMEASURED_BPS = 8e6  # an uplink that nobody measured
LEAST_BPS = 256e3
KEEPING = (State.JOINING, State.LOADING, State.READY)


def holds(announcement: Announcement, block: int, units: int) -> bool:
    """Whether a peer computes this block; what is shared belongs to the first and the last unit."""
    ends = (0, units - 1) if block == SHARED else (block,)
    return any(announcement.holds(unit) for unit in ends)


def learnt_alone(
    announced: Iterable[Announcement],
    own: PeerId,
    held: range,
    units: int,
    met: Mapping[int, Collection[PeerId]] | None = None,
) -> list[int]:
    """Which of the units that a peer holds no other one has learnt; with `met`, none of those that have averaged each with it."""
    others = [peer for peer in announced if peer.peer != own and peer.life is State.READY and peer.training_step > 0]
    return [
        unit
        for unit in held
        if not any(holds(peer, unit, units) and (met is None or peer.peer in met.get(unit, ())) for peer in others)
    ]


def lacking(announced: Collection[Announcement], own: PeerId, block: int, units: int, wanted: int) -> int:
    """How many disks more should have a block that this peer holds: `wanted`, less all that hold it."""
    others = (peer for peer in announced if peer.peer != own and peer.life is State.READY)
    return max(0, wanted - 1 - sum(holds(peer, block, units) for peer in others))


def disks(announced: Iterable[Announcement], own: PeerId, block: int, units: int, size_bytes: int) -> list[PeerId]:
    """Peers that may keep a block of this size for this one, best first."""
    known = {peer.peer: peer for peer in announced}
    house = wide_group(known[own].addresses) if own in known else ""
    able = [
        peer
        for peer in known.values()
        if peer.peer != own
        and peer.life in KEEPING
        and peer.backup_bytes >= size_bytes
        and not holds(peer, block, units)
    ]

    def rank(peer: Announcement) -> tuple[bool, bool, int]:
        same_house = bool(house) and wide_group(peer.addresses) == house
        return same_house, peer.span[1] > 0, draw(peer.peer, block)

    return [peer.peer for peer in sorted(able, key=rank)]


def rate_bps(up_bps: float, max_upload_bps: float | None) -> float:
    """How fast backups may leave, by the measured uplink (0: unknown) and what the node lends at most."""
    uplink_bps = min(up_bps or max_upload_bps or UNMEASURED_BPS, max_upload_bps or math.inf)
    return max(LEAST_BPS, UPLINK_SHARE * uplink_bps)


def next_step(steps: Sequence[int], last: int, checkpoint_steps: int, end: int, *, late: float = 0.0) -> int | None:
    """Which of the steps on the disk to bring away now that `last` (-1: none) is away; None where none of them. `late`: checkpoints
    that come while one is on its way, as far as can be told beforehand."""
    named = [step for step in steps if step % checkpoint_steps == 0 or step == end]
    newest = max(named, default=-1)
    if newest <= last:
        return None
    behind = max(late, (newest - last) // checkpoint_steps if last >= 0 else 1)
    stride = next((stride for stride in STRIDES if behind <= stride), STRIDES[-1])
    able = [step for step in named if step > last and (step % (stride * checkpoint_steps) == 0 or step == end)]
    return max(able, default=None)
