"""Backups of training states on other peers' disks: the blocks, the peers and the frequency. Pure, from announcements alone.

A layer with fewer holders than wanted is scarce. Its states go to peers that offer disk space and do not hold it: first to
peers at another address than the sender's, then to peers that hold nothing, then in an order drawn for each block, so that
the next step replaces the last.

Only steps that all holders keep are of use, because a run resumes from one step. A peer that cannot send every checkpoint in
time sends every fourth or every sixteenth, and all peers keep those for longer (`swarm/storage/state_store.py`).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence

from swarmnode.codec.body import SHARED
from swarmnode.net.addressing.addresses import wide_group
from swarmnode.net.interfaces import PeerId
from swarmnode.plan.view import draw
from swarmnode.swarm.records.announcement import Announcement, State
from swarmnode.swarm.records.run import is_checkpoint
from swarmnode.swarm.storage.state_store import STRIDES

UPLINK_SHARE = 0.25  # the largest share of a node's uplink for backups
UNMEASURED_BPS = 8e6  # an uplink that has not been measured
LEAST_BPS = 256e3
KEEPING = (State.JOINING, State.LOADING, State.READY)


def holds(announcement: Announcement, block: int, units: int) -> bool:
    """Return whether a peer computes `block`. The shared block belongs to the first and the last layer."""
    ends = (0, units - 1) if block == SHARED else (block,)
    return any(announcement.holds(unit) for unit in ends)


def learnt_alone(
    announced: Iterable[Announcement],
    own: PeerId,
    held: range,
    units: int,
    met: Mapping[int, Collection[PeerId]] | None = None,
) -> list[int]:
    """Return the layers of `held` that no other ready peer with a training step holds. If `met` is given, only the peers in
    `met[unit]`, those that have averaged the layer with this peer, count as other holders."""
    others = [peer for peer in announced if peer.peer != own and peer.life is State.READY and peer.training_step > 0]
    return [
        unit
        for unit in held
        if not any(holds(peer, unit, units) and (met is None or peer.peer in met.get(unit, ())) for peer in others)
    ]


def lacking(announced: Collection[Announcement], own: PeerId, block: int, units: int, wanted: int) -> int:
    """Return how many more disks should have a block that this peer holds: `wanted` less its ready holders, this peer
    included; at least 0."""
    others = (peer for peer in announced if peer.peer != own and peer.life is State.READY)
    return max(0, wanted - 1 - sum(holds(peer, block, units) for peer in others))


def disks(announced: Iterable[Announcement], own: PeerId, block: int, units: int, size_bytes: int) -> list[PeerId]:
    """Return the peers that may keep a block of `size_bytes` for this peer, best first. They are live, offer that much space
    and do not hold the block. Empty if there are none."""
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
    """Return the bits/s for backups: a share of the measured uplink `up_bps` (0: unknown), or of `max_upload_bps` if that is
    less; at least `LEAST_BPS`."""
    uplink_bps = min(up_bps or max_upload_bps or UNMEASURED_BPS, max_upload_bps or math.inf)
    return max(LEAST_BPS, UPLINK_SHARE * uplink_bps)


def next_step(steps: Sequence[int], last: int, checkpoint_steps: int, end: int, *, late: float = 0.0) -> int | None:
    """Return the newest step on this disk to send now that step `last` (-1: none) has been sent; None if there is no newer
    checkpoint or none at the stride that the sender can keep up with. `late`: the expected number of checkpoints that come
    during one transfer."""
    named = [step for step in steps if is_checkpoint(step, checkpoint_steps, end)]
    newest = max(named, default=-1)
    if newest <= last:
        return None
    behind = max(late, (newest - last) // checkpoint_steps if last >= 0 else 1)
    stride = next((stride for stride in STRIDES if behind <= stride), STRIDES[-1])
    able = [step for step in named if step > last and is_checkpoint(step, stride * checkpoint_steps, end)]
    return max(able, default=None)
