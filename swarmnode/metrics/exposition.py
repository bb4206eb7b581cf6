"""Exposition: the figures of a process over HTTP for Prometheus, and a health check for supervisors.

The only file that imports prometheus_client (20 ms and 2 MiB in a node): it is loaded only where metrics are served.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import socket
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, ProcessCollector, generate_latest, make_wsgi_app
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from swarmnode.errors import LocalError
from swarmnode.metrics import table
from swarmnode.metrics.metric import Histogram, Metric, MetricKind, Reading, Readings, Source

log = logging.getLogger(__name__)

SCRAPE_TIMEOUT_S = 5.0
MAX_CONNECTIONS = 32
END_LOOK_S = 0.05  # how often the server checks whether it should end; stopping a node waits for that
FAMILIES: dict[MetricKind, Callable[..., Family]] = {
    MetricKind.COUNTER: CounterMetricFamily,
    MetricKind.GAUGE: GaugeMetricFamily,
    MetricKind.HISTOGRAM: HistogramMetricFamily,
}
CONTENT_TYPE = CONTENT_TYPE_LATEST


def _nothing() -> Readings:
    return ()


@dataclass(frozen=True)
class Sources:
    """Sources of a swarm's figures: `live` is read on the event loop, where nothing changes meanwhile; `machine` on another
    thread."""

    swarm: str
    live: Source
    machine: Source = _nothing


class SwarmCollector(Collector):
    """Collector that turns readings into Prometheus' metric families. Every metric of the table is listed, with or without a
    figure.

    `live` returns the readings of the sources' `live`, in the order of `sources`.
    """

    def __init__(self, sources: Sequence[Sources], live: Callable[[], list[list[Reading]]]) -> None:
        self._sources = sources
        self._live = live

    def __repr__(self) -> str:
        return f"<SwarmCollector of {', '.join(each.swarm for each in self._sources)}>"

    def collect(self) -> Iterator[Family]:
        """Yield all metric families. Called on threads other than the event loop's."""
        families = {metric: family(metric) for metric in table.ALL}
        for each, readings in zip(self._sources, self._live(), strict=True):
            for reading in [*readings, *each.machine()]:
                add(families[reading.metric], reading, each.swarm)
        yield from families.values()


def family(metric: Metric) -> Family:
    """Return the empty metric family of `metric`."""
    return FAMILIES[metric.kind](metric.name, metric.help, labels=("swarm", *metric.labels))


def add(family: Family, reading: Reading, swarm: str) -> None:
    """Add a reading to its metric family, with the swarm's name and the reading's labels."""
    labels, value = (swarm, *reading.labels), reading.value
    if isinstance(family, HistogramMetricFamily):
        assert isinstance(value, Histogram)
        family.add_metric(labels, value.buckets(), value.sum)
    else:
        assert isinstance(family, (CounterMetricFamily, GaugeMetricFamily)) and not isinstance(value, Histogram)
        family.add_metric(labels, value)


async def exposed(sources: Sequence[Sources]) -> bytes:
    """Return all figures of this process in Prometheus' text format (CONTENT_TYPE)."""
    live = await _read(sources)
    return await asyncio.to_thread(lambda: generate_latest(_registry(sources, lambda: live)))


async def _read(sources: Sequence[Sources]) -> list[list[Reading]]:
    return [list(each.live()) for each in sources]


def _registry(sources: Sequence[Sources], live: Callable[[], list[list[Reading]]]) -> CollectorRegistry:
    registry = CollectorRegistry()
    registry.register(SwarmCollector(sources, live))
    ProcessCollector(registry=registry)
    return registry


@contextlib.asynccontextmanager
async def serving(sources: Sources, host: str, port: int) -> AsyncIterator[int]:
    """Serve /metrics and /healthz while the context lasts; yield the port (a free one if `port` is 0). Raises LocalError if the
    address cannot be used."""
    loop = asyncio.get_running_loop()

    def live() -> list[list[Reading]]:
        """Read the live figures. Raises TimeoutError if the event loop is stuck: then the scrape fails, too."""
        return asyncio.run_coroutine_threadsafe(_read([sources]), loop).result(SCRAPE_TIMEOUT_S)

    registry = _registry([sources], live)
    try:
        # Off the loop: the server asks the resolver for the host's name, which may take its time.
        server = await asyncio.to_thread(_listen, MetricsApp(registry, loop), host, port)
    except OSError as error:
        reason = error.strerror or error
        raise LocalError(
            f"metrics cannot be served at {host}:{port}: {reason}; choose another --metrics-port"
        ) from None
    thread = threading.Thread(target=server.serve_forever, args=(END_LOOK_S,), name="metrics", daemon=True)
    thread.start()
    try:
        yield server.server_port
    finally:
        await asyncio.to_thread(server.shutdown)
        server.server_close()
        await asyncio.to_thread(thread.join)


class MetricsApp:
    """WSGI application: /metrics, /healthz (200 while the event loop runs, else 503), and 404 for any other path."""

    def __init__(self, registry: CollectorRegistry, loop: asyncio.AbstractEventLoop) -> None:
        self._metrics = make_wsgi_app(registry)
        self._loop = loop

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        path = environ.get("PATH_INFO", "/").rstrip("/")
        if path == "/metrics":
            pages: Iterable[bytes] = self._metrics(environ, start_response)
            return pages
        if path == "/healthz":
            turns = self._turns()
            status, text = ("200 OK", "ok\n") if turns else ("503 Service Unavailable", "the event loop is stuck\n")
        else:
            status, text = "404 Not Found", "the paths are /metrics and /healthz\n"
        start_response(status, [("Content-Type", "text/plain; charset=utf-8")])
        return [text.encode()]

    def _turns(self) -> bool:
        turned = threading.Event()
        self._loop.call_soon_threadsafe(turned.set)
        return turned.wait(SCRAPE_TIMEOUT_S)


class _Server(ThreadingMixIn, WSGIServer):
    """Server with a thread for each connection, at most MAX_CONNECTIONS: a further one closes the oldest of the address that has
    most."""

    request_queue_size = MAX_CONNECTIONS  # a caller beyond socketserver's five would wait for seconds
    daemon_threads = True
    block_on_close = False  # else an ended thread is kept as long as the server

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._open: dict[socket.socket, str] = {}  # the oldest first, with its address
        self._lock = threading.Lock()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve the connection in a thread. If there are too many, close the oldest one of the address with most connections."""
        with self._lock:
            if len(self._open) >= MAX_CONNECTIONS:
                most = Counter(self._open.values()).most_common(1)[0][0]
                oldest = next(held for held, address in self._open.items() if address == most)
                del self._open[oldest]
                with contextlib.suppress(OSError):
                    oldest.shutdown(socket.SHUT_RDWR)  # its thread closes it
            self._open[request] = client_address[0]
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """Close a connection and let another one take its place."""
        with self._lock:
            self._open.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log a failed scrape: a scraper that goes away or stays silent is no error of this process."""
        log.info("a scrape from %s failed", client_address[0], exc_info=True)


class _ServerOfIPv6(_Server):
    address_family = socket.AF_INET6


class _Quiet(WSGIRequestHandler):
    """Request handler that logs nothing: a scrape comes every few seconds."""

    timeout = SCRAPE_TIMEOUT_S  # of each read and write

    def log_message(self, format: str, *args: object) -> None:
        pass


def _listen(app: MetricsApp, host: str, port: int) -> WSGIServer:
    with contextlib.suppress(ValueError):
        if ipaddress.ip_address(host).version == 6:
            return make_server(host, port, app, _ServerOfIPv6, handler_class=_Quiet)
    return make_server(host, port, app, _Server, handler_class=_Quiet)
