"""`swarmnode run`: a volunteer's node."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from click.exceptions import ClickException

from swarmnode.cli.options.gateway import LOOPBACK, PORT, GatewayAddress, beside
from swarmnode.cli.options.metrics import METRICS_HOST, SERVICE_METRICS_PORT, Watch
from swarmnode.cli.options.node_file import CONFIG
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
    HOME,
    LOG_FORMAT,
    VERBOSE,
    reports_errors,
    run_async,
    set_up_logging,
)
from swarmnode.cli.terminal.restart import begin_anew
from swarmnode.cli.terminal.teller import Teller
from swarmnode.errors import ExecutorDied, SwarmnodeError

if TYPE_CHECKING:
    from swarmnode.node import Node

log = logging.getLogger(__name__)


@reports_errors
def run(
    context: typer.Context,
    swarm: str = SWARM,
    config_file: Path = CONFIG,
    device: str = typer.Option("auto", "--device", help="auto, cpu, cuda, cuda:1, mps."),
    dtype: str = typer.Option("auto", "--dtype", help="auto, float32, bfloat16, float16."),
    quantize: str = typer.Option("none", "--quantize", metavar="none|int8|nf4", help="Quantise the weights at load."),
    capture: str = typer.Option(
        "auto",
        "--capture",
        metavar="auto|off",
        help="On a card, replay steps of decoding as CUDA graphs where that works.",
    ),
    memory: str = typer.Option(
        "", "--memory", metavar="SIZE", help="Memory to lend, as 6GB or 512MiB; default: what is free."
    ),
    disk: str = typer.Option(
        "",
        "--disk",
        metavar="SIZE",
        help="Disk space for fetched weights of all swarms; default: most of what is free.",
    ),
    max_upload: str = typer.Option(
        "", "--max-upload", metavar="RATE", help="Send no faster than this, as in 8Mbit; default: as fast as it goes."
    ),
    max_download: str = typer.Option("", "--max-download", metavar="RATE", help="The same of what comes from peers."),
    share: str = typer.Option(
        "100%", "--cpu-share", "--gpu-share", metavar="SHARE", help="Compute for so much of the time only, as 50%."
    ),
    nice: int = typer.Option(
        0, "--nice", min=0, max=19, help="Let other programs go first: the more, the higher, up to 19."
    ),
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
    max_gpu_temperature: float = typer.Option(
        None, "--max-gpu-temperature", metavar="°C", min=30, max=110, help="Rest more where a card is hotter."
    ),
    max_gpu_power: float = typer.Option(
        None, "--max-gpu-power", metavar="WATTS", min=1, help="Rest more where a card draws more."
    ),
    max_age: str = typer.Option(
        "", "--max-age", metavar="12h", help="Leave in order after so long.", show_default=False
    ),
    idle_disk: bool = typer.Option(False, "--idle-disk", help="Let other programs go first at the disk (ionice idle)."),
    compress: str = typer.Option(
        "auto",
        "--compress",
        metavar="auto|none|bf16|int8|int4|adatopk",
        help="In training, what is sent to other stages: auto takes no more than a slow link needs.",
    ),
    span: str = typer.Option(
        "", "--span", metavar="A:B", help="Hold units A to B-1; default: what the swarm needs most."
    ),
    plan: Path = typer.Option(
        None,
        "--plan",
        metavar="PLAN.json",
        help="In training, begin where plan --model --json put this node.",
        show_default=False,
    ),
    host_maddr: list[str] = typer.Option([], "--host-maddr", metavar="MADDR", help="Where to listen. Repeatable."),
    announce_maddr: list[str] = typer.Option(
        [], "--announce-maddr", metavar="MADDR", help="Address under which others reach this node. Repeatable."
    ),
    peer: list[str] = typer.Option(
        [], "--peer", metavar="MADDR", help="A peer of the swarm to join through, beside the invite's. Repeatable."
    ),
    home: Path = HOME,
    name: str = typer.Option("", "--name", help="Name shown to others."),
    threads: int = typer.Option(0, "--threads", help="CPU threads to compute with; default: torch's choice."),
    throttle: float = typer.Option(
        0.0, "--throttle", metavar="UNITS_PER_S", min=0.0, hidden=True, help="Serve as a device of this speed would."
    ),
    nat: bool = typer.Option(False, "--nat/--no-nat", help="Ask the router to map a port (UPnP)."),
    direct: bool = typer.Option(True, "--direct/--no-direct", help="Connect to other peers by plain TCP, too, sealed."),
    lan: bool = typer.Option(False, "--lan/--no-lan", help="Find peers on the local network and be found (mDNS)."),
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
    as_json: bool = typer.Option(False, "--json", help="Print one JSON object per event."),
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
    from swarmnode.lending.control_server import ControlServer
    from swarmnode.lending.courtesy import yield_disk
    from swarmnode.net.addressing.addresses import check_port_free
    from swarmnode.node import Node

    config = node_config(context.params)
    life_s = parse_duration(max_age) if max_age else None
    if page and serve_port is None:
        serve_port = PORT
    if serve_port:
        check_port_free(f"/ip4/{LOOPBACK}/tcp/{serve_port}")
    os.nice(nice)
    if idle_disk:
        yield_disk()

    watch = Watch(metrics_host, metrics_port, config.host.home, as_json)
    tell = Teller(as_json)

    async def serve(stop: asyncio.Event) -> None:
        pause = CollectorPause()

        def note(event: str, text: str, **details: Any) -> None:
            if event == "machine":  # by which everything is imported
                pause.end()
            tell(event, text, **details)

        loaded = open_swarm(swarm, config.host.home)
        if config.plan is not None:
            config.plan.check_swarm(loaded.id.hex())
        node = Node(loaded, config, note)
        control = ControlServer(node.lending, stop, node.describe, node.why)
        _reload_on_hangup(context, node)
        if life_s is not None:
            asyncio.get_running_loop().call_later(life_s, stop.set)
        async with watch.over(loaded.name, node.readings), control.listening(config.host.home, name or loaded.name):
            if serve_port is None:
                await node.run(stop)
            else:
                await beside(node.run(stop), loaded, GatewayAddress(config.host.home, serve_port, as_json=as_json))

    began_s = time.monotonic()
    try:
        with tell:
            run_async(serve)
    except ExecutorDied as error:
        begin_anew(error, time.monotonic() - began_s)


def _reload_on_hangup(context: typer.Context, node: Node) -> None:
    """After SIGHUP the options are read again, flags and file, and what can change in a running node does."""
    from swarmnode.cli.options.node_options import node_config

    def reload() -> None:
        try:
            again = context.command.make_context("run", list(context.meta["args"]), parent=context.parent)
            rest = node.follow(node_config(again.params))
        except (SwarmnodeError, typer.Exit, ClickException) as error:
            log.warning("the options are not changed: %s", error)
            return
        log.warning("the options were read again%s", f"; a restart is needed for {', '.join(rest)}" if rest else "")

    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, reload)
