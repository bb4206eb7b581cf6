"""The folder of receipts: what is kept, what counts, and what a hostile client or a power cut leaves of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from swarmnode.errors import LocalError, ProtocolError
from swarmnode.net.identity import Identity, verify
from swarmnode.swarm.records import receipt as receipt_folder
from swarmnode.swarm.records.receipt import LIFE_S, SKEW_S, Receipt, ReceiptFolder, read_receipts, sign_receipt

SWARM, NOW = bytes(32), 1_763_800_000
worker, *clients = (Identity(bytes([number] * 32)) for number in range(1, 7))


def receipt(client: Identity = clients[0], **changes: object) -> tuple[Receipt, bytes]:
    usual = Receipt(SWARM, client.peer_id, worker.peer_id, NOW - 60, NOW, 100)
    made = msgspec.structs.replace(usual, **changes)
    return made, sign_receipt(made, client.sign)


def opened(path: Path, now: Callable[[], float] = lambda: NOW) -> ReceiptFolder:
    return ReceiptFolder(path, SWARM, worker.peer_id, verify, now)


def kept(path: Path) -> set[int]:
    """What the receipts say that a folder has when it is opened anew."""
    return {one.served for one in opened(path).receipts}


def test_the_later_receipt_of_a_batch_takes_the_place_of_the_earlier(tmp_path: Path) -> None:
    folder = opened(tmp_path)
    for served in (100, 250):
        folder.store(*receipt(served=served))
    folder.store(*receipt(clients[1], served=7))
    assert kept(tmp_path) == {250, 7}
    assert len(list(tmp_path.rglob("*.receipt"))) == 2


@pytest.mark.parametrize(
    "changes",
    [
        {"worker": clients[3].peer_id},
        {"swarm": bytes([1] * 32)},
        {"until": NOW + SKEW_S + 1, "since": NOW},
        {"since": NOW - LIFE_S - 60, "until": NOW - LIFE_S - 1},
    ],
    ids=["for another worker", "of another swarm", "of the future", "forgotten"],
)
def test_what_is_not_for_this_folder(tmp_path: Path, changes: dict[str, object]) -> None:
    with pytest.raises(ProtocolError):
        opened(tmp_path).open(receipt(**changes)[1])


def test_strange_files_count_for_nothing(tmp_path: Path) -> None:
    opened(tmp_path).store(*receipt())
    own = tmp_path / worker.peer_id
    (own / "empty.receipt").write_bytes(b"")
    (own / "long.receipt").write_bytes(bytes(1 << 20))
    (own / "forged.receipt").write_bytes(sign_receipt(receipt(clients[1], served=10**9)[0], clients[2].sign))
    (own / "copied.receipt").write_bytes(receipt()[1])
    assert [one.served for one in opened(tmp_path).receipts] == [100]
    assert {one.served for one in read_receipts(tmp_path, None, verify)} == {100}


def test_a_torn_receipt_is_none(tmp_path: Path) -> None:
    opened(tmp_path).store(*receipt())
    (path,) = tmp_path.rglob("*.receipt")
    whole = path.read_bytes()
    for end in range(len(whole)):
        for torn in (whole[:end], whole[:end] + bytes(len(whole) - end)):
            path.write_bytes(torn)
            assert kept(tmp_path) == set() or torn == whole
    opened(tmp_path).store(*receipt(served=101))
    assert kept(tmp_path) == {101}


def test_the_folder_is_bounded_in_all_and_by_client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receipt_folder, "STORED_PER_CLIENT", 3)
    monkeypatch.setattr(receipt_folder, "STORED_RECEIPTS", 4)
    folder = opened(tmp_path)
    folder.store(*receipt(clients[1], served=50))
    for batch in range(9):
        folder.store(*receipt(clients[0], since=NOW - 100 + batch, served=1000 + batch))
    assert kept(tmp_path) == {50, 1006, 1007, 1008}, "who signs for ever new batches pushes out its own"
    folder.store(*receipt(clients[2], served=60))
    assert kept(tmp_path) == {60, 1006, 1007, 1008}, "where it is full, what says least goes"
    assert len(list(tmp_path.rglob("*.receipt"))) == 4


def test_receipts_are_forgotten_in_time(tmp_path: Path) -> None:
    now = float(NOW)
    folder = opened(tmp_path, lambda: now)
    folder.store(*receipt())
    now += LIFE_S + 1
    assert folder.receipts == []
    folder.store(*receipt(clients[1], since=int(now), until=int(now)))
    assert len(list(tmp_path.rglob("*.receipt"))) == 1, "its file, too"


def test_a_disk_that_takes_nothing_changes_nothing(tmp_path: Path) -> None:
    folder = opened(tmp_path)
    folder.store(*receipt())
    (tmp_path / worker.peer_id).rename(tmp_path / "away")
    (tmp_path / worker.peer_id).write_bytes(b"")
    with pytest.raises(LocalError):
        folder.store(*receipt(served=101))
    assert [one.served for one in folder.receipts] == [100]
