"""Start of the engine for a peer's network settings: finds the relays that answer, and whether the peer is hidden behind NAT."""

from __future__ import annotations

from swarmnode.net.addressing.addresses import is_public
from swarmnode.net.addressing.probe import answering
from swarmnode.net.addressing.reachability import is_hidden, own_interfaces
from swarmnode.net.libp2p.engine import Engine, EngineConfig
from swarmnode.net.network_config import NetworkConfig

RELAY_TIMEOUT_S = 2.0  # a relay that has not answered by then is not used


async def start_engine(config: NetworkConfig) -> Engine:
    """Join the real network. Raises LocalError if a port is in use or p2pd does not start, UsageError if a setting is not valid."""
    relays = tuple(await answering(config.relays, timeout_s=RELAY_TIMEOUT_S))
    mapped = bool(config.announce_maddrs) or config.nat_port_map
    hidden = not mapped and any(map(is_public, relays)) and is_hidden(config.host_maddrs, own_interfaces())
    return await Engine.start(EngineConfig(**{**vars(config), "relays": relays, "hidden": hidden}))
