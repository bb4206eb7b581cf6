"""What a peer stands on: a network, clocks, and what computes. Those of a machine, unless somebody gives others (virtual time)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from swarmnode.compute.executor import Executor
from swarmnode.net.clock import MACHINE_CLOCK, Clock
from swarmnode.net.interfaces import Network
from swarmnode.net.network_config import NetworkConfig, StartNetwork


async def _start_engine(config: NetworkConfig) -> Network:
    from swarmnode.net.engine_start import start_engine  # the only place that brings in libp2p and hivemind

    return await start_engine(config)


@dataclass(frozen=True)
class Platform:
    """`start_network` brings a peer onto the network that it shall be on; `start_executor` is given how many threads an operation
    of a device may use (None: as many as torch takes)."""

    start_network: StartNetwork = _start_engine
    start_executor: Callable[[int | None], Executor] = lambda threads: Executor(threads=threads)
    clock: Clock = MACHINE_CLOCK


MACHINE = Platform()
