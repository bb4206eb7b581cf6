"""Link times: what a coordinator believes of the links between stages, by what they announce: measured round trips and coordinates,
lines up and down, and the codecs that they send to one another with."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass

import numpy as np

from swarmnode.codec.body import SHARED
from swarmnode.codec.tensors import Codec, DType, TensorInfo
from swarmnode.net.interfaces import PeerId
from swarmnode.net.limits.address_group import home_of
from swarmnode.plan.compression import LADDER, encoded_bytes
from swarmnode.plan.cost import transfer_s
from swarmnode.plan.routes.delays import HomeLines, bandwidths, one_way_delays, shared_homes
from swarmnode.plan.spans.flow import Floats
from swarmnode.plan.training.averaging import averaged_bytes
from swarmnode.plan.view import View, view_of
from swarmnode.swarm.peers.directory import Directory
from swarmnode.swarm.records.announcement import peer_digest
from swarmnode.swarm.records.run import Averaging


@dataclass(eq=False)
class LinkTimes:
    """Times of the links of one swarm. `width`: values of a position between stages, or of a module's sample; 0 where nothing
    passes between units, so that delays alone count. `parameters`: of each unit, as far as they are known. `clock`: seconds."""

    directory: Directory
    units: int
    width: int
    parameters: Sequence[float] = ()
    _: KW_ONLY
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._home_lines = HomeLines(self.clock)

    def __repr__(self) -> str:
        return f"<LinkTimes of {len(self.directory.peers())} peers, {self.width} values a position>"

    def between(self, peers: Sequence[PeerId], positions: int) -> tuple[Floats, Floats]:
        """Seconds [N, N] from each of these peers to each other: the delay, and how long the values of a microbatch of so many
        positions take to be sent."""
        announced = self.directory.peers()
        view = self._view()
        delay_NN = one_way_delays(view, peers)
        sends = [announced[peer].sends if peer in announced else {} for peer in peers]
        size_NN = self._sizes(sends, [peer_digest(peer) for peer in peers], positions)
        return delay_NN, transfer_s(size_NN, np.zeros_like(delay_NN), bandwidths(view, peers))

    def _view(self) -> View:
        """What all announce; lines that several share as fast as they were."""
        view = view_of(self.units, self.directory.peers().values())
        return self._home_lines.held(view, view.peers)

    def homes(self, peers: Sequence[PeerId]) -> tuple[int, ...]:
        """Numbers that those have in common who share a line, by the addresses that they announce; nothing where nobody does."""
        announced = self.directory.peers()
        addresses = [announced[peer].addresses if peer in announced else () for peer in peers]
        return shared_homes([home_of(own) or peer for peer, own in zip(peers, addresses, strict=True)])

    def line_bps(self, peer: PeerId) -> float:
        """What a stage says that the line out of its home carries, up or down, whichever is less; 0 where it measured neither."""
        announced = self.directory.peers().get(peer)
        ways = (0.0, 0.0) if announced is None else (announced.up_bps, announced.down_bps)
        return min((bps for bps in ways if bps > 0), default=0.0)

    def paths_bps(self, peers: Sequence[PeerId]) -> Floats:
        """Bits/s [from, to] as senders say that the others saw their large frames come; 0 where they say nothing."""
        path_bps = self._view().path_bps
        return np.array([[path_bps.get((here, there), 0.0) for there in peers] for here in peers], dtype=float)

    def averaged_bytes(self, blocks: Sequence[int], how: Averaging) -> float:
        """What replicas send of these blocks; what the ends share counts as the larger of both."""
        if not self.parameters:
            return 0.0
        ends = max(self.parameters[0], self.parameters[-1])
        parameters = sum(ends if block == SHARED else self.parameters[block] for block in blocks)
        return averaged_bytes(int(parameters), max(1, self.width), how)

    def _sizes(self, sends: Sequence[Mapping[bytes, int]], receivers: Sequence[bytes], positions: int) -> Floats:
        """Bytes [N, N]: with the codecs that each says it sends to others, else uncompressed."""
        values = TensorInfo(Codec.NONE, DType.FLOAT32, (positions, self.width))
        size_bytes = {int(codec): float(encoded_bytes([values], codec)) for codec in LADDER}
        plain_bytes = size_bytes[Codec.NONE]
        return np.array([[size_bytes.get(said.get(there, 0), plain_bytes) for there in receivers] for said in sends])
