"""Command `swarmnode bootstrap`: run a peer through which new machines find the swarm."""

from __future__ import annotations

import asyncio
import shlex
from dataclasses import dataclass
from typing import Annotated

from swarmnode.cli.options.metrics import MetricsOptions
from swarmnode.cli.options.node_options import NodeOptions, addresses_option, size_option
from swarmnode.cli.options.quantities import parse_name
from swarmnode.cli.options.swarm import SWARM, open_swarm
from swarmnode.terminal.console import JSON, LogOptions, command, print_json, run_async, say
from swarmnode.terminal.option import option


@dataclass(frozen=True)
class BootstrapOptions(NodeOptions):
    """Options of a bootstrap peer."""

    host_maddrs: tuple[str, ...] = addresses_option(
        "Listen at this address, in addition to the invite's. Repeatable.", "--host-maddr"
    )
    max_cache_bytes: int | None = size_option(
        "Disk space for backups of training states; default: a quarter of the free space.",
        "--disk",
    )
    name: str = option("bootstrap", "Name shown to others.", parse=parse_name)


@command
def bootstrap(
    *,
    swarm: str = SWARM,
    node: Annotated[BootstrapOptions, "host_maddrs announce_maddrs max_cache_bytes name home nat_port_map direct lan"],
    as_json: bool = JSON,
    metrics: MetricsOptions,
    logs: LogOptions,
) -> None:
    """Run a bootstrap peer: new machines find the swarm through it. It relays for machines behind NAT and hands out
    weights, but computes nothing.

    Example: swarmnode bootstrap friends.swarm
    """
    logs.begin()
    from swarmnode.node.bootstrap import Bootstrap

    watch = metrics.watch(node.home, as_json=as_json)
    loaded = open_swarm(swarm, node.home)

    async def serve(stop: asyncio.Event) -> None:
        peer = await Bootstrap.start(loaded, node.host, file=loaded.file)
        invite = None if loaded.private else peer.host.swarm.invite
        try:
            addresses = await peer.host.network.addresses()
            if as_json:
                print_json({"event": "joined", "peer": peer.host.peer_id, "addresses": addresses, "invite": invite})
            else:
                say(f"Bootstrap peer {peer.host.peer_id} of swarm {loaded.name} listens on:")
                for address in addresses:
                    say(f"  {address}")
                hint = f"Invite:\n{invite}" if invite else f"Invites: swarmnode invite {shlex.quote(str(loaded.file))}"
                say(f"{hint}\nPress Ctrl-C to stop.")
            async with watch.over(loaded.name, peer.host.readings):
                await peer.run(stop)
        finally:
            await peer.close()

    run_async(serve)
