"""Work for others, and the owner's own."""

from __future__ import annotations

from pathlib import Path

import pytest

from swarmnode.net.identity import Identity
from swarmnode.peer import completed_work
from swarmnode.peer.completed_work import CompletedWork, HomePeers

OWN, OTHER = "own", "other"


def test_own_requests_are_not_work_for_others() -> None:
    completed = CompletedWork({OWN}.__contains__)
    completed.begin(b"a", OTHER)
    completed.begin(b"b", OWN)
    for work in (b"a", b"b", b"c"):  # c: behind the first hop, whose client is not known yet
        completed.record(work, 30, 10)
    assert (completed.total, completed.positions_for_others) == (90, 20)
    completed.confirm([b"c"], 30, OWN)
    assert completed.positions_for_others == 10, "its receipt tells whose it was"
    completed.record(b"c", 3, 1)
    completed.confirm([b"a"], 30, OTHER)
    assert (completed.total, completed.positions_for_others, completed.receipted) == (93, 10, 60)
    assert completed.unconfirmed([b"a", b"b"]) == 30, "receipts cover own work as well"


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(completed_work, "MAX_IDS", 3)
    completed = CompletedWork({OWN}.__contains__)
    for number in range(10):
        completed.begin(bytes([number]), OWN)
        completed.record(bytes([number]), 1, 1)
        completed.record(bytes([100 + number]), 1, 1)
    kept = completed._own, completed._positions, completed._unconfirmed
    assert all(len(each) <= 3 for each in kept) and completed.positions_for_others == 10


def test_the_peers_of_a_home_are_those_with_a_key_there(tmp_path: Path) -> None:
    home, node, client = HomePeers(tmp_path), Identity(bytes(32)), Identity(bytes([1] * 32))
    assert node.peer_id not in home
    node.save(tmp_path / "node.key")
    (tmp_path / "torn.key").write_bytes(b"\0")
    assert node.peer_id in home and client.peer_id not in home
    client.save(tmp_path / "client.key")
    assert client.peer_id in home
    (tmp_path / "client.key").unlink()
    assert client.peer_id not in home and "" not in home
