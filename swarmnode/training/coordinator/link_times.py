"""Link times: a coordinator's estimates of the links between stages, from their announcements.

Stages announce measured round trips, coordinates, the rates of their lines, and the codecs that they use.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass

import numpy as np

from swarmnode.codec.body import SHARED
from swarmnode.codec.tensors import Codec, DType, TensorInfo
from swarmnode.net.addressing.addresses import home_of
from swarmnode.net.interfaces import PeerId
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
    """Transfer times between the peers of one swarm. `width`: values of a position between stages, or of a module's sample; if it
    is 0 only delays count. `parameters`: number of parameters of each layer, empty if unknown. `matrix_width`: that of the layers'
    matrices; 0: `width`. `clock`: seconds."""

    directory: Directory
    units: int
    width: int
    parameters: Sequence[float] = ()
    _: KW_ONLY
    matrix_width: int = 0
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._home_lines = HomeLines(self.clock)

    def __repr__(self) -> str:
        return f"<LinkTimes of {len(self.directory.peers())} peers, {self.width} values a position>"

    def between(self, peers: Sequence[PeerId], positions: int) -> tuple[Floats, Floats]:
        """Return two matrices [N, N] of seconds from each peer to each other: the delay, and the sending time of a
        microbatch of `positions` positions."""
        announced = self.directory.peers()
        view = self._view()
        delay_NN = one_way_delays(view, peers)
        sends = [announced[peer].sends if peer in announced else {} for peer in peers]
        receivers = [peer_digest(peer) for peer in peers]
        values = TensorInfo(Codec.NONE, DType.FLOAT32, (positions, self.width))
        size_bytes = {int(codec): float(encoded_bytes([values], codec)) for codec in LADDER}
        plain_bytes = size_bytes[Codec.NONE]
        # The codec that each sender announces for each receiver counts, else none.
        size_NN = np.array([[size_bytes.get(said.get(there, 0), plain_bytes) for there in receivers] for said in sends])
        return delay_NN, transfer_s(size_NN, np.zeros_like(delay_NN), bandwidths(view, peers))

    def _view(self) -> View:
        """Return the view of all announcements. A line that several peers share keeps its highest recent rate."""
        view = view_of(self.units, self.directory.peers().values())
        return self._home_lines.held(view, view.peers)

    def homes(self, peers: Sequence[PeerId]) -> tuple[int, ...]:
        """Return a number for each peer; peers behind the same line, by their announced addresses, have the same number. Returns an
        empty tuple if no two peers share a line."""
        announced = self.directory.peers()
        addresses = [announced[peer].addresses if peer in announced else () for peer in peers]
        return shared_homes([home_of(own) or peer for peer, own in zip(peers, addresses, strict=True)])

    def line_bps(self, peer: PeerId) -> float:
        """Return the rate of a stage's line in bits/s, the lower of up and down, as it announces it; 0 if it measured neither."""
        announced = self.directory.peers().get(peer)
        ways = (0.0, 0.0) if announced is None else (announced.up_bps, announced.down_bps)
        return min((bps for bps in ways if bps > 0), default=0.0)

    def paths_bps(self, peers: Sequence[PeerId]) -> Floats:
        """Return the bits/s [from, to] at which large frames arrived, as senders announce; 0 if unknown."""
        path_bps = self._view().path_bps
        return np.array([[path_bps.get((here, there), 0.0) for there in peers] for here in peers], dtype=float)

    def averaged_bytes(self, blocks: Sequence[int], how: Averaging) -> float:
        """Estimate the encoded bytes of the gradients of these blocks; 0 if the parameters are unknown. The shared block
        counts as the larger of both ends."""
        if not self.parameters:
            return 0.0
        ends = max(self.parameters[0], self.parameters[-1])
        parameters = sum(ends if block == SHARED else self.parameters[block] for block in blocks)
        return averaged_bytes(int(parameters), self.matrix_width or max(1, self.width), how)
