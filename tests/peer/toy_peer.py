"""A peer as servers know it, without a directory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from swarmnode.codec.body import VERSION
from swarmnode.codec.messages import Hello
from swarmnode.decisions import DecisionLog
from swarmnode.errors import PeerError
from swarmnode.links.link_config import LinkConfig
from swarmnode.net.interfaces import Network, PeerId
from swarmnode.peer.completed_work import CompletedWork
from swarmnode.peer.paths import ObservedLatency

HELLO = Hello(VERSION, bytes(32), "toy")


@dataclass
class ToyPeer:
    """Stands in for `Host`, as servers know it (`LocalPeer`)."""

    network: Network
    link_config: LinkConfig
    hello: Hello = HELLO
    observed_latency: ObservedLatency = field(default_factory=ObservedLatency)
    completed: CompletedWork = field(default_factory=CompletedWork)
    decisions: DecisionLog = field(default_factory=DecisionLog)
    weight_of: Callable[[PeerId], float] = lambda _client: 1.0

    def sign(self, message: bytes) -> bytes:
        return self.network.identity.sign(message)  # type: ignore[attr-defined,no-any-return]

    def lost_neighbour(self, error: PeerError) -> None:
        """Routes are the client's business."""
