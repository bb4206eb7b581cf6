"""Mode `host --door-only`: run a peer through which new machines find the swarm."""

from __future__ import annotations

import asyncio
import shlex
from dataclasses import replace

from swarmnode.cli.options.founding import DoorOptions
from swarmnode.cli.options.metrics import MetricsOptions
from swarmnode.cli.options.node_options import NodeOptions
from swarmnode.cli.options.quantities import parse_name
from swarmnode.cli.options.swarm import open_swarm
from swarmnode.terminal.console import print_json, run_async, say

DOOR = "bootstrap"  # name that others see


def open_door(
    swarm: str, node: NodeOptions, name: str, doors: DoorOptions, metrics: MetricsOptions, *, as_json: bool
) -> None:
    """Run a bootstrap peer of `swarm` until Ctrl-C; it listens at the addresses in `doors`, too. It relays for machines behind NAT
    and hands out weights, but computes nothing. Raises UsageError, LocalError, NetworkDown."""
    from swarmnode.net.addressing.addresses import check_all
    from swarmnode.node.bootstrap import Bootstrap

    host = replace(
        node.host,
        name=parse_name(name, "--name"),
        host_maddrs=check_all("--listen", doors.listen),
        announce_maddrs=check_all("--announce", doors.announce, dialled=True),
    )
    watch = metrics.watch(node.home, as_json=as_json)
    loaded = open_swarm(swarm, node.home)

    async def serve(stop: asyncio.Event) -> None:
        peer = await Bootstrap.start(loaded, host, file=loaded.file)
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
