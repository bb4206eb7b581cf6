"""The picture of a swarm, whoever looks at it: what it costs where there are many machines."""

from __future__ import annotations

from pathlib import Path

import pytest

from swarmnode.codec.tensors import Codec
from swarmnode.peer import swarm_status
from swarmnode.peer.findings_record import Findings
from swarmnode.swarm.records.announcement import VERSION, Announcement, State, peer_digest
from swarmnode.swarm.records.manifest import Manifest, ModelInfo
from swarmnode.swarm.storage.swarmfile import Swarm

UNITS = 8
SWARM = Swarm(bytes(32), "crowd", manifest=Manifest("crowd", ModelInfo("llama", UNITS, 64), (), 0))


def announced(peer: str, **more: object) -> Announcement:
    return Announcement(VERSION, SWARM.id, peer, 1, 0.0, 600.0, 0.0, State.READY, (0, UNITS), **more)  # type: ignore[arg-type]


def test_its_work_grows_as_the_swarm_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    digests: list[str] = []

    def counted(peer: str) -> bytes:
        digests.append(peer)
        return peer_digest(peer)

    monkeypatch.setattr(swarm_status, "peer_digest", counted)
    peers = {peer: announced(peer) for peer in (f"peer {number}" for number in range(50))}
    assert len(swarm_status.picture_of(SWARM, peers, Findings(tmp_path / "standing", lambda: 0.0))["peers"]) == 50
    assert len(digests) == 50


def test_it_tells_in_which_codec_who_sends_to_whom(tmp_path: Path) -> None:
    sends = {peer_digest("b"): int(Codec.INT8), peer_digest("gone"): 0}
    peers = {"a": announced("a", sends=sends), "b": announced("b", sends={peer_digest("a"): 77})}
    told = swarm_status.picture_of(SWARM, peers, Findings(tmp_path / "standing", lambda: 0.0))
    assert {peer["peer"]: peer["sends"] for peer in told["peers"]} == {"a": {"b": "int8"}, "b": {"a": "77"}}


def test_peers_with_the_same_addresses_are_on_one_machine(tmp_path: Path) -> None:
    home, relayed = "/ip4/192.168.1.5/tcp", "/ip4/203.0.113.1/tcp/1/p2p/12D3KooWRelay/p2p-circuit"
    peers = {
        "a": announced("a", addresses=(f"{home}/4001", "/ip4/203.0.113.7/tcp/4001", relayed)),
        "b": announced("b", addresses=("/ip4/203.0.113.7/tcp/4002", f"{home}/4002")),
        "c": announced("c", addresses=("/ip4/192.168.1.6/tcp/4001", "/ip4/203.0.113.7/tcp/4003")),
        "d": announced("d", addresses=(relayed,)),
        "e": announced("e", addresses=(relayed,)),
    }
    told = swarm_status.picture_of(SWARM, peers, Findings(tmp_path / "standing", lambda: 0.0))
    found = {peer["peer"]: peer["machine"] for peer in told["peers"]}
    assert found == {"a": "a", "b": "a", "c": "c", "d": "d", "e": "e"}
