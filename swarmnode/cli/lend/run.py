"""`swarmnode run`: a volunteer's node."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from swarmnode.cli.lend.attendance import attended
from swarmnode.cli.options.gateway import LOOPBACK, PORT, GatewayAddress, beside
from swarmnode.cli.options.metrics import METRICS_HOST, SERVICE_METRICS_PORT, Watch
from swarmnode.cli.options.node_file import CONFIG
from swarmnode.cli.options.node_flags import (
    ANNOUNCE_MADDR,
    AUDIT_SHARE,
    CAPTURE,
    COMPRESS,
    DEVICE,
    DIRECT,
    DISK,
    DTYPE,
    HOST_MADDR,
    IDLE_DISK,
    LAN,
    MAX_AGE,
    MAX_DOWNLOAD,
    MAX_GPU_POWER,
    MAX_GPU_TEMPERATURE,
    MAX_UPLOAD,
    MEMORY,
    MIN_HOLDERS,
    NAT,
    NICE,
    PEER,
    PLAN,
    QUANTIZE,
    SHARE,
    SPAN,
    THREADS,
    THROTTLE,
)
from swarmnode.cli.options.rule_flags import (
    DAYS,
    EXCLUSIVE,
    HOURS,
    MAX_GPU_LOAD,
    MAX_GPU_MEMORY,
    MAX_LOAD,
    MAX_PRESSURE,
    MONTH_DAY,
    MONTHLY,
    ON_MAINS,
    ONLY_IDLE,
    RULES,
    UNMETERED,
)
from swarmnode.cli.options.swarm import SWARM, open_swarm
from swarmnode.cli.terminal.collector import CollectorPause
from swarmnode.cli.terminal.console import (
    EVENTS,
    HOME,
    LOG_FORMAT,
    VERBOSE,
    reports_errors,
    run_async,
    set_up_logging,
)
from swarmnode.cli.terminal.restart import beginning_anew
from swarmnode.cli.terminal.teller import Teller
from swarmnode.cli.terminal.usage_errors import WrongUsage
from swarmnode.errors import SwarmnodeError

if TYPE_CHECKING:
    from swarmnode.node.node import Node, NodeConfig
    from swarmnode.node.texts import Tell
    from swarmnode.swarm.storage.swarmfile import Swarm

log = logging.getLogger(__name__)


@reports_errors
def run(
    context: typer.Context,
    swarm: str = SWARM,
    config_file: Path = CONFIG,
    device: str = DEVICE,
    dtype: str = DTYPE,
    quantize: str = QUANTIZE,
    capture: str = CAPTURE,
    memory: str = MEMORY,
    disk: str = DISK,
    min_holders: int = MIN_HOLDERS,
    max_upload: str = MAX_UPLOAD,
    max_download: str = MAX_DOWNLOAD,
    share: str = SHARE,
    nice: int = NICE,
    rules: Path = RULES,
    only_idle: str = ONLY_IDLE,
    max_load: str = MAX_LOAD,
    exclusive: list[str] = EXCLUSIVE,
    hours: str = HOURS,
    days: str = DAYS,
    on_mains: bool = ON_MAINS,
    max_pressure: str = MAX_PRESSURE,
    monthly: str = MONTHLY,
    month_day: str = MONTH_DAY,
    unmetered: bool = UNMETERED,
    max_gpu_memory: str = MAX_GPU_MEMORY,
    max_gpu_load: str = MAX_GPU_LOAD,
    max_gpu_temperature: float = MAX_GPU_TEMPERATURE,
    max_gpu_power: float = MAX_GPU_POWER,
    max_age: str = MAX_AGE,
    idle_disk: bool = IDLE_DISK,
    compress: str = COMPRESS,
    audit_share: str = AUDIT_SHARE,
    span: str = SPAN,
    plan: Path = PLAN,
    host_maddr: list[str] = HOST_MADDR,
    announce_maddr: list[str] = ANNOUNCE_MADDR,
    peer: list[str] = PEER,
    home: Path = HOME,
    name: str = typer.Option("", "--name", help="Name shown to others."),
    threads: int = THREADS,
    throttle: float = THROTTLE,
    nat: bool = NAT,
    direct: bool = DIRECT,
    lan: bool = LAN,
    serve_port: int = typer.Option(
        None,
        "--serve",
        metavar="PORT",
        min=0,
        max=65535,
        help="Answer OpenAI's API for the swarm and show its page, at this port of loopback, as `swarmnode serve` does.",
        show_default=False,
    ),
    page: bool = typer.Option(False, "--page", help=f"The same, at port {PORT}."),
    as_json: bool = EVENTS,
    metrics_port: int = SERVICE_METRICS_PORT,
    metrics_host: str = METRICS_HOST,
    log_format: str = LOG_FORMAT,
    verbose: bool = VERBOSE,
) -> None:
    """Lend this machine to a swarm. Ctrl-C lets running sessions move to others before it leaves; twice leaves now.

    Where its card fails it leaves, waits, and begins anew; the pause doubles each time, up to five minutes.

    Example: swarmnode run swarm1… --device cuda --memory 6GB
    """
    set_up_logging(verbose, log_format)
    from swarmnode.cli.options.node_options import node_config
    from swarmnode.cli.terminal.durations import parse_duration

    config = node_config(context.params)
    life_s = parse_duration(max_age) if max_age else None
    gateway = _gateway(PORT if page and serve_port is None else serve_port, config.host.home, as_json=as_json)
    _give_way(nice, idle_disk=idle_disk)
    watch = Watch(metrics_host, metrics_port, config.host.home, as_json)
    tell = Teller(as_json)

    async def lend(stop: asyncio.Event) -> None:
        with CollectorPause() as pause:
            loaded, node = _node(swarm, config, tell, pause)
            _reload_on_hangup(context, node)
            if life_s is not None:
                asyncio.get_running_loop().call_later(life_s, stop.set)
            async with attended(node, stop, watch, swarm=loaded.name, readings=node.readings, name=name):
                await (node.run(stop) if gateway is None else beside(node.run(stop), loaded, gateway))

    with beginning_anew(), tell:
        run_async(lend)


def _gateway(port: int | None, home: Path, *, as_json: bool) -> GatewayAddress | None:
    """Where to answer OpenAI's API, if anywhere. Raises LocalError where the port is taken."""
    from swarmnode.net.addressing.addresses import check_port_free

    if port:
        check_port_free(f"/ip4/{LOOPBACK}/tcp/{port}")
    return None if port is None else GatewayAddress(home, port, as_json=as_json)


def _give_way(nice: int, *, idle_disk: bool) -> None:
    """To other programs, at the CPU and at the disk."""
    from swarmnode.lending.courtesy import yield_cpu, yield_disk

    yield_cpu(nice)
    if idle_disk:
        yield_disk()


def _node(swarm: str, config: NodeConfig, tell: Tell, pause: CollectorPause) -> tuple[Swarm, Node]:
    """The swarm that is meant, and a node for it, which ends the pause. Raises UsageError where its plan is for another one."""
    from swarmnode.compute.device import probe_devices
    from swarmnode.node.node import Node

    def note(event: str, text: str, **details: Any) -> None:
        if event == "machine":  # by which everything is imported
            pause.end()
        tell(event, text, **details)

    loaded = open_swarm(swarm, config.host.home)
    probe_devices(config.stage.device)  # raises where one is not here, before anything is joined
    if config.plan is not None:
        config.plan.check_swarm(loaded.id.hex())
    return loaded, Node(loaded, config, note)


def _reload_on_hangup(context: typer.Context, node: Node) -> None:
    """After SIGHUP the options are read again, flags and file, and what can change in a running node does."""
    from swarmnode.cli.options.node_options import node_config

    def reload() -> None:
        try:
            again = context.command.make_context("run", list(context.meta["args"]), parent=context.parent)
            rest = node.follow(node_config(again.params))
        except (SwarmnodeError, WrongUsage) as error:
            log.warning("the options are not changed: %s", error)
            return
        except typer.Exit:  # what is wrong has been said
            log.warning("the options are not changed")
            return
        log.warning("the options were read again%s", f"; a restart is needed for {', '.join(rest)}" if rest else "")

    if sys.platform != "win32":
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, reload)
