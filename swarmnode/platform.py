"""The platform of a peer: its network, its executors and its clock. `MACHINE` is the real one; tests and simulations give
others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from swarmnode.compute.executor import Executor
from swarmnode.net.clock import MACHINE_CLOCK, Clock
from swarmnode.net.interfaces import Network
from swarmnode.net.network_config import NetworkConfig, StartNetwork


async def _start_engine(config: NetworkConfig) -> Network:
    from swarmnode.net.libp2p.engine import start_engine  # the only place that brings in libp2p and hivemind

    return await start_engine(config)


@dataclass(frozen=True)
class Platform:
    """Access of a peer to the outside: network, executors, clock.

    `start_network` joins the network that a NetworkConfig describes. `start_executor` takes the number of threads of an operation
    on a device (None: torch's default).
    """

    start_network: StartNetwork = _start_engine
    start_executor: Callable[[int | None], Executor] = lambda threads: Executor(threads=threads)
    clock: Clock = MACHINE_CLOCK


MACHINE = Platform()
