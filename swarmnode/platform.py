"""What a peer stands on: a network and clocks. A machine's, unless somebody gives it others, as virtual time does."""

from __future__ import annotations

from dataclasses import dataclass

from swarmnode.net.clock import MACHINE_CLOCK, Clock
from swarmnode.net.interfaces import Network
from swarmnode.net.network_config import NetworkConfig, StartNetwork


async def _start_engine(config: NetworkConfig) -> Network:
    from swarmnode.net.engine_start import start_engine  # the only place that brings in libp2p and hivemind

    return await start_engine(config)


@dataclass(frozen=True)
class Platform:
    """`start_network` brings a peer onto the network that it shall be on."""

    start_network: StartNetwork = _start_engine
    clock: Clock = MACHINE_CLOCK


MACHINE = Platform()
