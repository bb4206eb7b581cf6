"""Local peer: the part of this machine's peer that its servers use, and its links for one protocol."""

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
    """The presence that all servers of one process share; `Host` is the real one. Used on the event loop.

    Attributes:
        network: The network of the peer; it outlives every server.
        hello: The greeting at the beginning of each link.
        link_config: Patience, limits, gate and ledger of the links; one object for all servers, since it holds shared state.
        observed_latency: Compute times of other peers, as sessions observe them.
        completed: The work done here for other peers; receipts are checked against it.
        decisions: The log of decisions and the facts behind them.
        weight_of: The share of the device's time that a client deserves, relative to 1 for a stranger. It may be replaced at any
            time: read the attribute at each use.
    """

    network: Network
    hello: Hello
    link_config: LinkConfig
    observed_latency: ObservedLatency
    completed: CompletedWork
    decisions: DecisionLog
    weight_of: Callable[[PeerId], float]

    def sign(self, message: bytes) -> bytes:
        """Sign with the key of this machine's peer id.

        Args:
            message: Bytes that begin with a domain of their own, so that a signature is good for one purpose only.

        Returns:
            The signature, 64 bytes.
        """

    def lost_neighbour(self, error: PeerError) -> None:
        """Note that a link ended by the peer's fault. Returns at once.

        Args:
            error: Why it ended. Its `peer` is left out of routes for now, unless it only refused this peer.
        """


def board_of(
    peer: LocalPeer,
    protocol: str,
    *,
    accept: Callable[[Channel, Frame, Body], None] | None = None,
    on_peer_lost: Callable[[PeerError], None] = lambda _error: None,
) -> Switchboard:
    """Make the links of a peer for one protocol; see `Switchboard`. The caller closes them."""
    links = peer.network, protocol, peer.hello, peer.link_config
    return Switchboard(*links, accept=accept, on_peer_lost=on_peer_lost)
