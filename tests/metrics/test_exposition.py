"""Exposition: figures over HTTP."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from pathlib import Path
from wsgiref.simple_server import WSGIServer

import pytest
from prometheus_client.parser import text_string_to_metric_families

from swarmnode.errors import LocalError
from swarmnode.metrics import exposition, table
from swarmnode.metrics.exposition import Sources, serving
from swarmnode.metrics.metric import Histogram, Reading, Readings

ROOT = Path(__file__).parents[2]


def read() -> Readings:
    histogram = Histogram((1.0,))
    histogram.observe(0.5)
    yield Reading(table.MOVES, 3)
    yield Reading(table.STATE, True, ("ready",))
    yield Reading(table.DHT_SECONDS, histogram, ("get",))


def nothing() -> Readings:
    return ()


async def scrape(port: int) -> str:
    def get() -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
            return str(answer.read().decode())

    return await asyncio.to_thread(get)


async def test_figures_come_with_the_swarm_and_their_labels() -> None:
    async with serving(Sources("friends", read, nothing), "127.0.0.1", 0) as port:
        text = await scrape(port)
    lines = text.splitlines()
    assert 'swarmnode_moves_total{swarm="friends"} 3.0' in lines
    assert 'swarmnode_node_state{state="ready",swarm="friends"} 1.0' in lines
    assert 'swarmnode_dht_seconds_bucket{le="+Inf",operation="get",swarm="friends"} 1.0' in lines
    assert 'swarmnode_dht_seconds_sum{operation="get",swarm="friends"} 0.5' in lines
    assert any(line.startswith("process_resident_memory_bytes ") for line in lines)


async def test_only_what_is_there_is_answered() -> None:
    def status(port: int, path: str) -> int:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}") as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            return error.code

    async with serving(Sources("friends", nothing, nothing), "127.0.0.1", 0) as port:
        told = {path: await asyncio.to_thread(status, port, path) for path in ("/metrics", "/healthz", "/", "/nosuch")}
    assert told == {"/metrics": 200, "/healthz": 200, "/": 404, "/nosuch": 404}


async def test_every_metric_is_told_with_or_without_a_figure() -> None:
    async with serving(Sources("friends", nothing, nothing), "127.0.0.1", 0) as port:
        text = await scrape(port)
    told = {family.name for family in text_string_to_metric_families(text)}
    assert {metric.name.removesuffix("_total") for metric in table.ALL} <= told


async def test_figures_are_read_anew_at_each_scrape_on_the_event_loop() -> None:
    count = 0

    def read() -> Readings:
        nonlocal count
        asyncio.get_running_loop()  # raises in any other thread
        count += 1
        yield Reading(table.MOVES, count)

    async with serving(Sources("friends", read, nothing), "127.0.0.1", 0) as port:
        assert count == 0
        for expected in (1, 2):
            assert f'swarmnode_moves_total{{swarm="friends"}} {expected}.0' in await scrape(port)


async def test_a_loop_that_is_stuck_fails_the_scrape(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exposition, "SCRAPE_TIMEOUT_S", 0.05)
    answered = threading.Event()

    def status(port: int) -> int:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            return error.code
        finally:
            answered.set()

    async with serving(Sources("friends", nothing, nothing), "127.0.0.1", 0) as port:
        scraping = asyncio.get_running_loop().run_in_executor(None, status, port)
        answered.wait(10)  # blocks the loop, on purpose
        assert await scraping == 500


async def test_a_port_in_use_is_said_to_be_so() -> None:
    sources = Sources("friends", nothing, nothing)
    async with serving(sources, "127.0.0.1", 0) as port:
        with pytest.raises(LocalError, match=f"127.0.0.1:{port}.*in use.*--metrics-port"):
            async with serving(sources, "127.0.0.1", port):
                pytest.fail("two servers at one port")
    async with serving(sources, "127.0.0.1", port):  # given back in the end
        pass


async def test_a_node_that_ends_hardly_waits_for_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    serve_forever, looks_s = WSGIServer.serve_forever, []

    def serve(server: WSGIServer, poll_interval: float = 0.5) -> None:
        looks_s.append(poll_interval)
        serve_forever(server, poll_interval)

    monkeypatch.setattr(WSGIServer, "serve_forever", serve)
    async with serving(Sources("friends", nothing, nothing), "127.0.0.1", 0):
        pass
    assert looks_s and max(looks_s) < 0.1


def test_nobody_pays_who_does_not_ask() -> None:
    node = "swarmnode.node.node, swarmnode.training.worker.training_worker"
    rooms = f"swarmnode.cli.main, swarmnode.node.bootstrap, swarmnode.client.swarm_client, {node}"
    done = subprocess.run(
        [sys.executable, "-c", f"import sys, {rooms}; print(*sys.modules)"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "prometheus_client" not in done.stdout.split()


async def test_silent_connections_are_bounded_and_scrapes_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exposition._Quiet, "timeout", 0.5)
    before = threading.active_count()
    async with serving(Sources("friends", nothing, nothing), "127.0.0.1", 0) as port:
        silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3 * exposition.MAX_CONNECTIONS)]
        assert "swarmnode" in await scrape(port)
        assert threading.active_count() - before <= exposition.MAX_CONNECTIONS + 40
        for reader, writer in silent:
            assert await reader.read() == b""
            writer.close()
