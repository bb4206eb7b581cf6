"""From what a peer wants of a network to an engine that runs: which relays answer, and whether anybody gets in directly."""

from __future__ import annotations

from swarmnode.net.addressing.addresses import is_public
from swarmnode.net.addressing.probe import answering
from swarmnode.net.addressing.reachability import is_hidden, own_interfaces
from swarmnode.net.libp2p.engine import Engine, EngineConfig
from swarmnode.net.network_config import NetworkConfig

RELAY_TIMEOUT_S = 2.0  # one that has not answered by then is no relay for us


async def start_engine(config: NetworkConfig) -> Engine:
    """Come up on the real network. Raises LocalError where a port is in use or p2pd does not start, UsageError."""
    relays = tuple(await answering(config.relays, timeout_s=RELAY_TIMEOUT_S))
    mapped = bool(config.announce_maddrs) or config.nat_port_map
    hidden = not mapped and any(map(is_public, relays)) and is_hidden(config.host_maddrs, own_interfaces())
    return await Engine.start(EngineConfig(**{**vars(config), "relays": relays, "hidden": hidden}))
