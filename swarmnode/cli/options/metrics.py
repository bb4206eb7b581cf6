"""Options of metrics, and the metrics server of commands that keep running."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from swarmnode.metrics.metric import Source
from swarmnode.terminal.console import print_json, say
from swarmnode.terminal.formatting import origin
from swarmnode.terminal.option import option

port_option = partial(option, None, typed=int, metavar="PORT", min=0, max=65535)
_AT_PORT = "Serve metrics for Prometheus at this port; 0 picks one; default: off."


@dataclass(frozen=True)
class MetricsOptions:
    """Options of the metrics of a command that keeps running."""

    metrics_port: int | None = port_option(_AT_PORT, envvar="SWARMNODE_METRICS_PORT")
    metrics_host: str = option(
        "127.0.0.1",
        "Where to serve metrics; 0.0.0.0 is open to other machines.",
        envvar="SWARMNODE_METRICS_HOST",
        metavar="ADDRESS",
    )

    def watch(self, home: Path, *, as_json: bool = False) -> Watch:
        """Return a metrics server that has not started yet. Raises LocalError if it cannot listen at the port."""
        return Watch(self.metrics_host, self.metrics_port, home, as_json)


@dataclass(frozen=True)
class PassingMetricsOptions(MetricsOptions):
    """MetricsOptions of a short command, without the environment variable of the port: that belongs to a command that keeps
    running, perhaps in the same container."""

    metrics_port: int | None = port_option(_AT_PORT)


@dataclass(frozen=True)
class Watch:
    """Metrics server of a command. `port` None turns it off. `home` is the folder of the command's state."""

    host: str
    port: int | None
    home: Path
    as_json: bool = False  # print the address as a JSON event

    def __post_init__(self) -> None:
        """Raise LocalError if the server cannot listen at the address."""
        from swarmnode.net.addressing.addresses import check_can_listen

        if self.port is not None:
            check_can_listen("--metrics-host", self.host, self.port)

    @contextlib.asynccontextmanager
    async def over(self, swarm: str, live: Source) -> AsyncIterator[None]:
        """Serve the metrics that `live` returns while the context lasts; do nothing if `port` is None. Raises LocalError if the
        port is taken."""
        if self.port is None:
            yield
            return
        from swarmnode.metrics.exposition import Sources, serving
        from swarmnode.metrics.machine import machine

        sources = Sources(swarm, live, await asyncio.to_thread(machine, self.home))
        async with serving(sources, self.host, self.port) as port:
            url = f"{origin(self.host, port)}/metrics"
            if self.as_json:
                print_json({"event": "metrics", "url": url})
            else:
                say(f"Metrics: {url}", err=True)  # standard output may hold generated text or a curve
            yield
