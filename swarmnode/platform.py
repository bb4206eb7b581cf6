"""What a peer stands on: a network, clocks, and what computes. Those of a machine, unless somebody gives others (virtual time)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from swarmnode.compute.executor import Executor
from swarmnode.net.addressing.addresses import is_public
from swarmnode.net.addressing.probe import answering
from swarmnode.net.addressing.reachability import is_hidden, own_interfaces
from swarmnode.net.clock import MACHINE_CLOCK, Clock
from swarmnode.net.interfaces import Network
from swarmnode.net.libp2p.engine import Engine, EngineConfig
from swarmnode.net.network_config import NetworkConfig, StartNetwork

RELAY_TIMEOUT_S = 2.0  # one that has not answered by then is no relay for us


async def start_engine(config: NetworkConfig) -> Engine:
    """Come up on the real network. Raises LocalError where a port is in use or p2pd does not start, UsageError."""
    relays = tuple(await answering(config.relays, timeout_s=RELAY_TIMEOUT_S))
    mapped = bool(config.announce_maddrs) or config.nat_port_map
    hidden = not mapped and any(map(is_public, relays)) and is_hidden(config.host_maddrs, own_interfaces())
    return await Engine.start(EngineConfig(**{**vars(config), "relays": relays, "hidden": hidden}))


async def _start_engine(config: NetworkConfig) -> Network:

    return await start_engine(config)


@dataclass(frozen=True)
class Platform:
    """`start_network` brings a peer onto the network that it shall be on; `start_executor` is given how many threads an operation
    of a device may use (None: as many as torch takes)."""

    start_network: StartNetwork = _start_engine
    start_executor: Callable[[int | None], Executor] = lambda threads: Executor(threads=threads)
    clock: Clock = MACHINE_CLOCK


MACHINE = Platform()
