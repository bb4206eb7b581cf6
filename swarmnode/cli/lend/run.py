"""Command `swarmnode run`: lend this machine as a volunteer's node."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from swarmnode.cli.lend.lending import attended
from swarmnode.cli.options.metrics import MetricsOptions, port_option
from swarmnode.cli.options.node_file import CONFIG, LendingOptions
from swarmnode.cli.options.node_options import NodeOptions
from swarmnode.cli.options.swarm import SWARM, open_swarm
from swarmnode.errors import LocalError
from swarmnode.gateway.gateway_address import LOOPBACK, PORT, GatewayAddress, beside
from swarmnode.terminal.console import (
    EVENTS,
    CollectorPause,
    LogOptions,
    beginning_anew,
    command,
    has_terminal,
    heeds_hangup,
    run_async,
)
from swarmnode.terminal.option import option
from swarmnode.terminal.progress import Teller

if TYPE_CHECKING:
    from swarmnode.node.description import Tell
    from swarmnode.node.node import Node
    from swarmnode.node.node_config import NodeConfig
    from swarmnode.swarm.storage.swarmfile import Swarm

log = logging.getLogger(__name__)


@command
def run(
    context: typer.Context,
    *,
    swarm: str = SWARM,
    config_file: Path = CONFIG,
    node: NodeOptions,
    serve_port: int = port_option(
        "Also serve the swarm's API and page at this loopback port, as `swarmnode serve` does.", "--serve"
    ),
    page: bool = option(False, f"Also open the web page and the API at port {PORT}."),
    as_json: bool = EVENTS,
    metrics: MetricsOptions,
    logs: LogOptions,
) -> None:
    """Lend this machine to a swarm. Ctrl-C leaves in order; press it twice to leave at once.

    In order, texts that are being written move to other machines first. It also leaves if its terminal closes; under nohup or as a
    service it stays.

    If its GPU fails, it leaves, waits and starts again. The pause doubles each time, up to five minutes.

    Example: swarmnode run friends --memory 6GB --only-idle 10m
    """
    logs.begin()
    from swarmnode.lending.rule_watch import yield_cpu, yield_disk

    config = node.config()
    tell = Teller(as_json)
    gateway = _gateway(serve_port, node.home, tell, page=page, as_json=as_json)
    yield_cpu(node.nice)  # this process gives way to others
    if node.idle_disk:
        yield_disk()
    watch = metrics.watch(node.home, as_json=as_json)

    async def lend(stop: asyncio.Event) -> None:
        with CollectorPause() as pause:
            loaded, running = _node(swarm, config, tell, pause)
            options = LendingOptions(node.home, running, context)
            _reload_on_hangup(options.reload)
            if node.life_s is not None:
                asyncio.get_running_loop().call_later(node.life_s, stop.set)
            about = {"swarm": loaded.name, "name": node.name}
            async with attended(running, stop, watch, **about, readings=running.readings, options=options):
                await (running.run(stop) if gateway is None else beside(running.run(stop), loaded, gateway))

    with beginning_anew(), tell:
        run_async(lend)


def _gateway(port: int | None, home: Path, tell: Teller, *, page: bool, as_json: bool) -> GatewayAddress | None:
    """Return the address of the gateway, which it tells once the node serves; None without a `port` and a `page`. A page takes the
    usual port, or any if that one is taken. Raises LocalError if the given port is taken."""
    from swarmnode.net.addressing.addresses import check_port_free, free_port

    if port is None and not page:
        return None
    try:
        check_port_free(f"/ip4/{LOOPBACK}/tcp/{PORT if port is None else port}")
    except LocalError:
        if port is not None:
            raise
        port = free_port()
        tell("port", f"Port {PORT} is taken here: the page and the API are at port {port}.")
    port = PORT if port is None else port
    return GatewayAddress(home, port, as_json=as_json, say=lambda served: tell.last("serving", served.text))


def _node(swarm: str, config: NodeConfig, tell: Tell, pause: CollectorPause) -> tuple[Swarm, Node]:
    """Return the swarm that `swarm` names, and a node for it, which ends `pause` once everything is imported. Raises LocalError
    if a device is missing, UsageError if the plan is for another swarm."""
    from swarmnode.compute.device import probe_devices
    from swarmnode.lending.control import process_of, running_nodes
    from swarmnode.node.node import Node

    def report(event: str, text: str, **details: Any) -> None:
        if event == "machine":  # everything is imported by then
            pause.end()
        tell(event, text, **details)

    loaded = open_swarm(swarm, config.host.home)
    if other := process_of(loaded.id, *running_nodes(config.host.home).values()):
        tell(
            "beside",
            f"Process {other['pid']} lends this machine to {loaded.name} already. This second node lends beside it, from memory of "
            "its own. If you do not want that, press Ctrl-C; Edit on the page changes what the first one lends.",
        )
    probe_devices(config.stage.device)  # raises if a device is missing, before the node joins
    if config.plan is not None:
        config.plan.check_swarm(loaded.id.hex())
    return loaded, Node(loaded, config, report)


def _reload_on_hangup(reload: Callable[[], str]) -> None:
    """Read the options again on SIGHUP if the process has no terminal, as a service. With a terminal, SIGHUP means that it
    closes."""

    def on_hangup() -> None:
        try:
            log.warning("%s", reload())
        except LocalError as error:
            log.warning("%s", error)

    if heeds_hangup() and not has_terminal():
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, on_hangup)
