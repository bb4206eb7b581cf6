"""Local peer: this machine's peer in a swarm, as far as its servers need to know it, and its links for one protocol."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from swarmnode.codec.body import Body
from swarmnode.codec.frames import Frame
from swarmnode.codec.messages import Hello
from swarmnode.decisions import DecisionLog
from swarmnode.errors import PeerError
from swarmnode.net.interfaces import Network, PeerId
from swarmnode.net.links.link_config import LinkConfig
from swarmnode.net.links.switchboard import Channel, Switchboard
from swarmnode.peer.completed_work import CompletedWork
from swarmnode.peer.paths import ObservedLatency


class LocalPeer(Protocol):
    """The presence that all servers of one process share. `Host` is the live one. Used on the loop.

    Attributes:
        network: The network that the peer is on; it outlives every server.
        hello: The greeting with which each link begins.
        link_config: Patience, limits, gate and ledger of the links; one for all servers, since it holds what they share.
        observed_latency: How long other peers take to compute, as sessions find out.
        completed: The work done here for other peers, against which receipts are checked.
        decisions: The log of what was decided and on which facts.
        weight_of: The share of the device's time that a client deserves, relative to 1 for a stranger. It may be exchanged at any
            time, so nobody keeps it.
    """

    network: Network
    hello: Hello
    link_config: LinkConfig
    observed_latency: ObservedLatency
    completed: CompletedWork
    decisions: DecisionLog
    weight_of: Callable[[PeerId], float]

    def lost_neighbour(self, error: PeerError) -> None:
        """Note that a link ended by the peer's fault. Returns at once.

        Args:
            error: Why it ended. Its `peer` is left out of routes for now, unless it only refused us.
        """


def board_of(
    peer: LocalPeer,
    protocol: str,
    *,
    accept: Callable[[Channel, Frame, Body], None] | None = None,
    on_peer_lost: Callable[[PeerError], None] = lambda _error: None,
) -> Switchboard:
    """Make the links of a peer for one protocol; see `Switchboard`. Whoever makes them closes them."""
    links = peer.network, protocol, peer.hello, peer.link_config
    return Switchboard(*links, accept=accept, on_peer_lost=on_peer_lost)
