"""targets.py: who is scraped where, out of a status."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[2] / "contrib" / "prometheus" / "targets.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("targets", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = sys.modules["targets"] = importlib.util.module_from_spec(spec)  # where dataclasses look for it
    spec.loader.exec_module(module)
    return module


def status(addresses: dict[str, list[str]]) -> dict[str, Any]:
    """As `swarmnode status --json` prints it, as far as the script reads it."""
    return {"peers": [{"peer": "12D3KooWalice", "name": "alice", "state": "ready"}], "addresses": addresses}


@pytest.mark.parametrize(
    ("multiaddrs", "network", "expected"),
    [
        (["/ip4/127.0.0.1/tcp/1", "/ip4/192.168.1.4/tcp/1"], None, "192.168.1.4:9464"),
        (["/ip4/127.0.0.1/tcp/1"], None, "127.0.0.1:9464"),
        (["/ip4/172.17.0.2/tcp/1", "/ip4/10.1.2.3/udp/1/quic"], "10.0.0.0/8", "10.1.2.3:9464"),
        (["/ip6/2001:db8::7/tcp/1"], None, "[2001:db8::7]:9464"),
        (["/ip4/203.0.113.9/tcp/1/p2p/12D3KooWrelay/p2p-circuit", "/ip4/10.0.0.9/tcp/1"], None, "10.0.0.9:9464"),
        (["/dns4/example.org/tcp/1"], None, None),
        (["/ip6/2001:db8::7/tcp/1"], "10.0.0.0/8", None),
    ],
)
def test_the_address_that_fits(
    script: ModuleType, multiaddrs: list[str], network: str | None, expected: str | None
) -> None:
    found = script.targets(status({"12D3KooWalice": multiaddrs}), 9464, network)
    assert [(target.place, target.node) for target in found] == ([(expected, "alice")] if expected else [])


def test_a_machine_is_one_target_and_doors_are_known_by_the_end_of_their_id(script: ModuleType) -> None:
    alice, bob, door = "12D3KooWalice", "12D3KooWbob", "12D3KooWthe-door"
    here, there = ["/ip4/10.0.0.1/tcp/1"], ["/ip4/10.0.0.2/tcp/1"]
    found = script.targets(status({alice: here, bob: here, door: there}), 9464)
    assert {target.place: target.node for target in found} == {"10.0.0.1:9464": "alice", "10.0.0.2:9464": "the-door"}


def test_who_vanishes_stays_a_target_for_a_while_who_leaves_does_not(script: ModuleType) -> None:
    register = script.Register(keep_s=60.0)
    staying, vanishing, leaving = (
        script.Target("a", "a"),
        script.Target("b", "b"),
        script.Target("c", "c", leaving=True),
    )
    assert register.update([staying, vanishing, leaving], 0.0) == [staying, vanishing, leaving]
    assert register.update([staying], 30.0) == [staying, vanishing]
    assert register.update([staying], 59.0) == [staying, vanishing]
    assert register.update([staying], 60.0) == [staying]
    assert register.update([staying, vanishing], 61.0) == [staying, vanishing]


def test_a_node_that_drains_is_leaving(script: ModuleType) -> None:
    told = status({"12D3KooWalice": ["/ip4/10.0.0.1/tcp/1"]})
    assert not script.targets(told, 9464)[0].leaving
    told["peers"][0]["state"] = "draining"
    assert script.targets(told, 9464)[0].leaving


def test_each_line_replaces_the_file(tmp_path: Path) -> None:
    lines = [json.dumps(status({"12D3KooWalice": [f"/ip4/10.0.0.{number}/tcp/1"]})) for number in (1, 2)]
    out = tmp_path / "friends.json"
    command = [sys.executable, str(SCRIPT), "--port", "9464", "--out", str(out), "--keep", "0"]
    subprocess.run(command, input="\n".join(lines), text=True, check=True)
    assert json.loads(out.read_text())[0]["targets"] == ["10.0.0.2:9464"]
    assert [path.name for path in tmp_path.iterdir()] == ["friends.json"]
