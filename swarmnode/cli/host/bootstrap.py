"""`swarmnode bootstrap`: where newcomers find the swarm."""

from __future__ import annotations

import asyncio
import shlex
from pathlib import Path

import typer

from swarmnode.cli.options.metrics import METRICS_HOST, SERVICE_METRICS_PORT, Watch
from swarmnode.cli.options.node_flags import ANNOUNCE_MADDR, DIRECT, LAN, NAT
from swarmnode.cli.options.swarm import SWARM, open_swarm
from swarmnode.cli.terminal.console import (
    HOME,
    JSON,
    LOG_FORMAT,
    VERBOSE,
    default_home,
    print_json,
    reports_errors,
    run_async,
    say,
    set_up_logging,
)


@reports_errors
def bootstrap(
    swarm: str = SWARM,
    host_maddr: list[str] = typer.Option(
        [],
        "--host-maddr",
        metavar="MADDR",
        help="Listen here too, beside the addresses that the invite promises. Repeatable.",
    ),
    announce_maddr: list[str] = ANNOUNCE_MADDR,
    disk: str = typer.Option(
        "",
        "--disk",
        metavar="SIZE",
        help="Disk space for training states, so that none is lost with its node; default: a quarter of what is free.",
    ),
    name: str = typer.Option("bootstrap", "--name", help="Name shown to others."),
    home: Path = HOME,
    nat: bool = NAT,
    direct: bool = DIRECT,
    lan: bool = LAN,
    as_json: bool = JSON,
    metrics_port: int = SERVICE_METRICS_PORT,
    metrics_host: str = METRICS_HOST,
    log_format: str = LOG_FORMAT,
    verbose: bool = VERBOSE,
) -> None:
    """Run a bootstrap peer: newcomers find the swarm here; it relays for peers behind NAT, gives out weights, computes nothing.

    Example: swarmnode bootstrap friends.swarm
    """
    set_up_logging(verbose, log_format)
    from swarmnode.cli.options.quantities import parse_bytes, parse_name
    from swarmnode.net.addressing.addresses import check_all
    from swarmnode.node.bootstrap import Bootstrap
    from swarmnode.roles.host import HostConfig

    config = HostConfig(
        home=default_home(home),
        name=parse_name(name),
        host_maddrs=check_all("--host-maddr", host_maddr),
        announce_maddrs=check_all("--announce-maddr", announce_maddr, dialled=True),
        nat_port_map=nat,
        direct=direct,
        lan=lan,
        max_cache_bytes=parse_bytes(disk, "--disk") if disk else None,
    )
    watch = Watch(metrics_host, metrics_port, config.home, as_json)
    loaded = open_swarm(swarm, default_home(home))

    async def serve(stop: asyncio.Event) -> None:
        peer = await Bootstrap.start(loaded, config, file=loaded.file)
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
                say(f"{hint}\nCtrl-C stops it.")
            async with watch.over(loaded.name, peer.host.readings):
                await peer.run(stop)
        finally:
            await peer.close()

    run_async(serve)
