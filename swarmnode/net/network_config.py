"""How a peer wants to be on a network, whichever it is."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

from swarmnode.net.interfaces import Network, RecordValidator
from swarmnode.net.links.gate import OPEN_GATE, Gate
from swarmnode.net.tasks import Supervisor

LOOPBACK_ANY_PORT = "/ip4/127.0.0.1/tcp/0"


@dataclass(frozen=True)
class NetworkConfig:
    """Addresses are multiaddrs, those of `relays` with /p2p/. The identity file must exist."""

    identity_path: Path
    host_maddrs: tuple[str, ...] = (LOOPBACK_ANY_PORT,)
    announce_maddrs: tuple[str, ...] = ()  # which others reach us at, as the user knows
    relays: tuple[str, ...] = ()  # peers that may relay for us where nobody gets in directly
    public: bool = False  # a bootstrap peer: others reach it for sure
    client_mode: bool = False  # uses the DHT without being a part of it
    nat_port_map: bool = False
    direct: bool = True  # TCP connections of its own to peers that can be reached by them
    record_validator: RecordValidator | None = None
    gate: Gate = OPEN_GATE
    supervisor: Supervisor = field(default_factory=Supervisor)


StartNetwork = Callable[[NetworkConfig], Awaitable[Network]]
"""Brings a peer onto a network. Raises LocalError where this machine cannot."""
