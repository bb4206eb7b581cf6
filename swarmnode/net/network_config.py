"""A peer's network settings, for any network."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

from swarmnode.net.interfaces import Network, RecordValidator
from swarmnode.net.links.link_config import OPEN_GATE, Gate
from swarmnode.net.tasks import Supervisor

LOOPBACK_ANY_PORT = "/ip4/127.0.0.1/tcp/0"


@dataclass(frozen=True)
class NetworkConfig:
    """A peer's network settings. Addresses are multiaddrs, those of `relays` end with /p2p/ and an id. The identity file must
    exist."""

    identity_path: Path
    host_maddrs: tuple[str, ...] = (LOOPBACK_ANY_PORT,)
    announce_maddrs: tuple[str, ...] = ()  # addresses at which others reach this peer, given by the user
    relays: tuple[str, ...] = ()  # peers that may relay to this one if it cannot be reached directly
    public: bool = False  # a bootstrap peer, which others reach for sure
    client_mode: bool = False  # uses the DHT without being a part of it
    nat_port_map: bool = False
    direct: bool = True  # use direct TCP connections to peers that accept them
    record_validator: RecordValidator | None = None
    gate: Gate = OPEN_GATE
    unix: Callable[[], float] = time.time  # clock for the expiry of records, in unix seconds
    supervisor: Supervisor = field(default_factory=Supervisor)


StartNetwork = Callable[[NetworkConfig], Awaitable[Network]]
"""Function that brings a peer onto a network. Raises LocalError if this machine cannot."""
