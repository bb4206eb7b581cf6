"""What a live swarm has measured, as a network to plan on."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from swarmnode.errors import LocalError
from swarmnode.peer.swarm_status import measured_network
from swarmnode.plan.offline.planner_files import Scenario
from swarmnode.swarm.records.announcement import VERSION, Announcement, State, peer_digest

NEAR = (0, 0, 0, 1, 10)  # a coordinate in tenths of a millisecond
FAR = (500, 0, 0, 1, 10)


def lender(name: str, **said: Any) -> Announcement:
    plain = Announcement(VERSION, b"swarm", f"peer-{name}", 1, 0.0, 60.0, 0.0, State.READY, (0, 6), name=name)
    return msgspec.structs.replace(plain, **{"memory_bytes": 8 * 10**9, **said})


def network_of(*announced: Announcement) -> dict[str, Any]:
    manifest = SimpleNamespace(model=SimpleNamespace(units=6))
    swarm: Any = SimpleNamespace(manifest=manifest, name="friends", id=b"\x01" * 4)
    return measured_network(swarm, {one.peer: one for one in announced})


def test_gaps_are_filled_and_marked(tmp_path: Path) -> None:
    """Of three links one was measured, one follows from coordinates, and one is assumed; of one machine no line is known."""
    ada = lender("ada", rtt_us={peer_digest("peer-bob"): 20_000}, coordinate=NEAR, up_bps=1e7, down_bps=5e7)
    bob = lender("bob", up_bps=2e7, down_bps=2e7, training_units_per_s=300.0)
    cyd = lender("cyd", coordinate=FAR, device="NVIDIA GeForce RTX 3090", decode_units_per_s=40.0)
    found = network_of(cyd, bob, ada)
    path = tmp_path / "network.json"
    path.write_text(json.dumps(found))
    network = Scenario.load(path)
    assert network.peers == ("peer-ada", "peer-bob", "peer-cyd") and network.swarm == "01010101"
    assert network.delay_s[0, 1] == network.delay_s[1, 0] == pytest.approx(0.01)
    assert network.delay_s[0, 2] == pytest.approx(0.0251)
    assert network.bandwidth_bps[0, 1] == 1e7 and network.bandwidth_bps[1, 0] == 2e7
    assert network.training_units_per_s == (None, 300.0, None) and network.decode_units_per_s == (None, None, 40.0)
    assert set(found["estimated"]["delay_ms"]) == {(0, 2), (2, 0), (1, 2), (2, 1)}
    assert set(found["estimated"]["bandwidth_gbps"]) == {(0, 2), (2, 0), (1, 2), (2, 1)}


def test_one_machine_is_a_network(tmp_path: Path) -> None:
    path = tmp_path / "network.json"
    path.write_text(json.dumps(network_of(lender("ada"), lender("door", memory_bytes=0))))
    assert Scenario.load(path).devices == 1


def test_where_nobody_lends_there_is_none() -> None:
    with pytest.raises(LocalError, match="no peer lends a machine to friends"):
        network_of(lender("gone", state=State.OFFLINE), lender("door", memory_bytes=0))
