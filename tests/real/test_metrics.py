"""A real Prometheus scrapes real nodes that train and serve: every query of the dashboard finds its data."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import typing
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from swarmnode.localswarm import NodeProcess
from swarmnode.metrics.machine import machine
from tests.real.forked import ForkedSwarm
from tests.real.prometheus import CONTRIB, Prometheus, free_port, needs_prometheus, promtool

pytestmark = needs_prometheus

DASHBOARD = json.loads((CONTRIB / "grafana" / "swarmnode.json").read_text())
CARDS = "swarmnode_gpu_"
DATA = Path(typing.__file__)
TIMEOUT_S = 300.0
SETTINGS = (
    "--data", str(DATA), "--steps", "100000", "--batch", "8", "--microbatch", "4", "--sequence", "16",
    "--schedule", "constant",
)  # fmt: skip
SWARMNODE = (sys.executable, "-m", "swarmnode.cli.main")
ASKING = """
import asyncio, sys
from pathlib import Path
from swarmnode.cli.options.metrics import Watch
from swarmnode.client.swarm_client import aconnect

async def ask(file, home, port):
    async with await aconnect(file, home=Path(home), audit_share=0.0) as swarm:
        async with Watch("127.0.0.1", int(port), Path(home)).over("local", swarm.readings):
            while True:
                await swarm.generate(list(range(1, 200)), max_new_tokens=100)

asyncio.run(ask(*sys.argv[1:]))
"""
CPU_SHARE = "25%"  # what is scraped has to go on, not to be fast, and would take a core of the other tests
NODES = {"a": ("127.0.0.2", "0:3"), "b": ("127.0.0.3", "0:3"), "c": ("127.0.0.4", "3:6")}


def queries() -> list[str]:
    """What the dashboard asks, as Grafana would for all swarms."""
    expressions = [target["expr"] for panel in DASHBOARD["panels"] for target in panel.get("targets", ())]
    return [text.replace("$__rate_interval", "30s").replace("$swarm", ".*") for text in expressions]


class Watched:
    """A swarm that trains and is asked to generate, scraped at every role."""

    def __init__(self, local: ForkedSwarm, server: Prometheus) -> None:
        self.local = local
        self.server = server
        self.port = str(free_port())
        self.door = local.bootstrap("--metrics-port", self.port)
        self.nodes = {
            name: local.node(
                name,
                *("--span", span, "--compress", "int8", "--cpu-share", CPU_SHARE, "--host-maddr", f"/ip4/{host}/tcp/0"),
                *("--metrics-host", host, "--metrics-port", self.port, "--log-format", "json", "--verbose"),
            )
            for name, (host, span) in NODES.items()
        }
        for node in self.nodes.values():
            node.wait_for("ready", TIMEOUT_S)
        self.trainer = local.trainer("trainer", *SETTINGS, "--metrics-port", "0")
        self.trainer.wait_until(lambda line: line.get("step", -1) >= 1, "the second step", TIMEOUT_S)
        self._follow_status()

    def _follow_status(self) -> None:
        """Targets as an operator makes them: announced ones out of the status, the trainer by hand."""
        status = [*SWARMNODE, "status", str(self.local.file), "--json", "--watch", "--home", str(self.local.folder)]
        self.status = subprocess.Popen(status, stdout=subprocess.PIPE, env=self.local.environment)
        script, out = CONTRIB / "prometheus" / "targets.py", self.server.targets / "swarm.json"
        follow = [sys.executable, str(script), "--port", self.port, "--out", str(out)]
        self.follower = subprocess.Popen(follow, stdin=self.status.stdout)
        self.add_target("trainer", url_of(self.trainer).split("/")[2])

    def close(self) -> None:
        """End what follows the status; the swarm's own members end with it."""
        self.status.terminate()
        for process in (self.status, self.follower):
            process.wait(TIMEOUT_S)

    @contextlib.contextmanager
    def generating(self) -> Iterator[None]:
        """A client that asks again and again, so that Prometheus sees its counters grow. Its target goes before it does."""
        port = str(free_port())
        self.add_target("client", f"127.0.0.1:{port}")
        arguments = [str(self.local.file), str(self.local.folder / "client"), port]
        client = subprocess.Popen([sys.executable, "-c", ASKING, *arguments], env=self.local.environment)
        try:
            yield
        finally:
            (self.server.targets / "client.json").unlink()
            self.server.wait_for_nothing('up{node="client"}', TIMEOUT_S)
            client.kill()
            client.wait()

    def add_target(self, name: str, target: str) -> None:
        entry = [{"targets": [target], "labels": {"node": name}}]
        (self.server.targets / f"{name}.json").write_text(json.dumps(entry))


def url_of(member: NodeProcess) -> str:
    return str(member.wait_for("metrics")["url"])


def page(member: NodeProcess) -> str:
    """What a member shows Prometheus."""
    with urllib.request.urlopen(url_of(member)) as answer:
        return str(answer.read().decode())


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    folder = tmp_path_factory.mktemp("watched")
    config = GPT2Config(
        vocab_size=256, n_embd=64, n_layer=4, n_head=4, n_positions=4096, bos_token_id=0, eos_token_id=0
    )
    torch.manual_seed(3)
    GPT2LMHeadModel(config).save_pretrained(folder / "model")
    with Prometheus(folder / "prometheus") as server, ForkedSwarm(folder / "swarm") as local:
        local.folder.mkdir()
        local.create(folder / "model", "--mode", "train")
        watched = Watched(local, server)
        yield watched
        watched.close()


def test_promtool_likes_every_page(watched: Watched) -> None:
    for member in (watched.door, watched.trainer, *watched.nodes.values()):
        text = page(member)
        checked = promtool("check", "metrics", stdin=text)
        assert checked.returncode == 0 and not checked.stderr, (member.name, checked.stderr)
        assert member.name == "trainer" or 'swarmnode_node_state{state="ready",swarm="local"} 1.0' in text


def test_no_label_tells_of_peers(watched: Watched) -> None:
    peers = [member.peer for member in (watched.door, *watched.nodes.values())]
    assert not [peer for peer in peers if peer in page(watched.nodes["a"])]


def test_status_names_what_prometheus_scrapes(watched: Watched) -> None:
    hosts = {"127.0.0.1", *(host for host, _ in NODES.values())}
    up = [f'up{{job="swarmnode", instance="{host}:{watched.port}"}} == 1' for host in hosts]
    assert not watched.server.wait_for_values(up, TIMEOUT_S)


def test_every_query_of_the_dashboard_returns_data(watched: Watched) -> None:
    expressions = [expression for expression in queries() if CARDS not in expression]
    assert len(expressions) > 40
    with watched.generating():
        missing = watched.server.wait_for_values(expressions, TIMEOUT_S)
    assert not missing


def test_queries_of_cards(watched: Watched) -> None:
    """Where there is no card they return nothing, but they ask for metrics that there are."""
    known = watched.server.ask("metadata")
    has_cards = any(reading.metric.name.startswith(CARDS) for reading in machine(Path("/"))())
    for expression in queries():
        if CARDS in expression:
            assert bool(watched.server.query(expression)) is has_cards
            names = [word for word in expression.replace("{", " ").split() if word.startswith(CARDS)]
            assert names and not [name for name in names if name not in known]


def test_logs_are_one_json_object_per_line(watched: Watched) -> None:
    lines = [json.loads(line) for line in watched.nodes["a"].log.read_text().splitlines()]
    assert lines and all({"time", "level", "logger", "message"} <= line.keys() for line in lines)
    assert {line["level"] for line in lines} <= {"debug", "info", "warning"}, "nothing worse has happened"


def test_alerts_see_a_stage_that_is_killed(watched: Watched) -> None:
    """The last test: only one node held these units."""
    rules = [rule for group in watched.server.ask("rules")["groups"] for rule in group["rules"]]
    assert len(rules) == 13 and all(rule["health"] == "ok" for rule in rules), rules
    expected = {"SwarmnodeAbsent", "SwarmUnitWithoutHolder"}
    watched.server.wait_for_nothing(f'ALERTS{{alertname=~"{"|".join(expected)}"}}', TIMEOUT_S)  # of one late scrape
    healthy = {alert["labels"]["alertname"] for alert in watched.server.ask("alerts")["alerts"]}
    assert not healthy & expected
    watched.nodes["c"].kill()
    assert not watched.server.wait_for_alerts(expected, TIMEOUT_S)
