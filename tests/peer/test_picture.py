"""The picture of a swarm, whoever looks at it: what it costs where there are many machines."""

from __future__ import annotations

from pathlib import Path

import pytest

from swarmnode.codec.tensors import Codec
from swarmnode.peer import picture
from swarmnode.swarm.peers.standing import Standing
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

    monkeypatch.setattr(picture, "peer_digest", counted)
    peers = {peer: announced(peer) for peer in (f"peer {number}" for number in range(50))}
    assert len(picture.picture_of(SWARM, peers, Standing(tmp_path / "standing", lambda: 0.0))["peers"]) == 50
    assert len(digests) == 50


def test_it_tells_in_which_codec_who_sends_to_whom(tmp_path: Path) -> None:
    sends = {peer_digest("b"): int(Codec.INT8), peer_digest("gone"): 0}
    peers = {"a": announced("a", sends=sends), "b": announced("b", sends={peer_digest("a"): 77})}
    told = picture.picture_of(SWARM, peers, Standing(tmp_path / "standing", lambda: 0.0))
    assert {peer["peer"]: peer["sends"] for peer in told["peers"]} == {"a": {"b": "int8"}, "b": {"a": "77"}}
