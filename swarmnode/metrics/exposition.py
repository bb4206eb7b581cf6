"""Exposition: the figures of a process over HTTP, for Prometheus to scrape.

The only file that imports prometheus_client (20 ms and 2 MiB in a node): it is loaded where somebody asks for metrics.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, ProcessCollector, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from swarmnode.errors import LocalError
from swarmnode.metrics import table
from swarmnode.metrics.histogram import Histogram
from swarmnode.metrics.metric import Metric, MetricKind, Reading, Source

SCRAPE_TIMEOUT_S = 5.0
FAMILIES: dict[MetricKind, Callable[..., Family]] = {
    MetricKind.COUNTER: CounterMetricFamily,
    MetricKind.GAUGE: GaugeMetricFamily,
    MetricKind.HISTOGRAM: HistogramMetricFamily,
}


@dataclass(frozen=True)
class Sources:
    """Who is asked for figures: `live` on the event loop, where nothing changes meanwhile; `machine` beside it."""

    swarm: str
    live: Source
    machine: Source


class SwarmCollector(Collector):
    """Turns readings into Prometheus' families. Every metric of the table is told, with or without a figure."""

    def __init__(self, sources: Sources, loop: asyncio.AbstractEventLoop) -> None:
        self._sources = sources
        self._loop = loop

    def __repr__(self) -> str:
        return f"<SwarmCollector of {self._sources.swarm}>"

    def collect(self) -> Iterator[Family]:
        """Called from the server's threads. Raises TimeoutError where the loop is stuck: then the scrape fails, too."""
        live = asyncio.run_coroutine_threadsafe(self._read(), self._loop).result(SCRAPE_TIMEOUT_S)
        families = {metric: family(metric) for metric in table.ALL}
        for reading in [*live, *self._sources.machine()]:
            add(families[reading.metric], reading, self._sources.swarm)
        yield from families.values()

    async def _read(self) -> list[Reading]:
        return list(self._sources.live())


def family(metric: Metric) -> Family:
    """A metric without any figure yet."""
    return FAMILIES[metric.kind](metric.name, metric.help, labels=("swarm", *metric.labels))


def add(family: Family, reading: Reading, swarm: str) -> None:
    """Put a reading into its family."""
    labels, value = (swarm, *reading.labels), reading.value
    if isinstance(family, HistogramMetricFamily):
        assert isinstance(value, Histogram)
        family.add_metric(labels, value.buckets(), value.sum)
    else:
        assert isinstance(family, (CounterMetricFamily, GaugeMetricFamily)) and not isinstance(value, Histogram)
        family.add_metric(labels, value)


@contextlib.asynccontextmanager
async def serving(sources: Sources, host: str, port: int) -> AsyncIterator[int]:
    """Answer scrapes while the context lasts, at the port that it yields (a free one for 0). Raises LocalError."""
    registry = CollectorRegistry()
    registry.register(SwarmCollector(sources, asyncio.get_running_loop()))
    ProcessCollector(registry=registry)
    try:
        # Off the loop: the server asks the resolver for the host's name, which may take its time.
        server, thread = await asyncio.to_thread(start_http_server, port, host, registry)
    except OSError as error:
        reason = error.strerror or error
        raise LocalError(
            f"metrics cannot be served at {host}:{port}: {reason}; choose another --metrics-port"
        ) from None
    try:
        yield server.server_port
    finally:
        await asyncio.to_thread(server.shutdown)
        server.server_close()
        thread.join()
