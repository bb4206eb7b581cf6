"""`swarmnode why credit`: what it shows of receipts, and of what is none."""

from __future__ import annotations

import datetime
import json
import time
from pathlib import Path

from swarmnode.lending import cards
from swarmnode.measuring.service_report import FOLDER
from swarmnode.net.identity import Identity, verify
from swarmnode.swarm.records.receipt import Receipt, ReceiptFolder, receipts_of, sign_receipt
from swarmnode.swarm.storage.small_files import write_stored
from swarmnode.swarm.storage.swarmfile import load_swarm
from tests.cli.command import assert_clear, invoke
from tests.swarm.storage.test_joined_swarms import FRIENDS

SWARM = load_swarm(FRIENDS).id
worker, *clients = (Identity(bytes([number] * 32)) for number in range(1, 30))


def sign(home: Path, *served: int) -> None:
    now = int(time.time())
    folder = ReceiptFolder(receipts_of(home, SWARM), SWARM, worker.peer_id, verify, time.time)
    for client, work in zip(clients, served, strict=False):
        receipt = Receipt(SWARM, client.peer_id, worker.peer_id, now - 60, now, work)
        folder.store(receipt, sign_receipt(receipt, client.sign))


def test_a_swarm_or_a_folder_of_receipts(tmp_path: Path) -> None:
    home = tmp_path / "home"
    assert invoke("join", FRIENDS, home=home).returncode == 0
    sign(home, 300, 100)
    done = invoke("why", "credit", "friends", "--json", home=home)
    shown = json.loads(done.stdout)
    (told,) = shown["nodes"]
    assert [shown["given"][name] for name in ("answers", "people", "visits", "kwh")] == [0, 0, 2, None]
    assert told == {
        "swarm": SWARM.hex(),
        "worker": worker.peer_id,
        "served": 400,
        "trained": 0,
        "signed": 400,
        "clients": 2,
        "concentration": 0.625,
        "credit": 150,
        "by_client": {clients[0].peer_id: 300, clients[1].peer_id: 100},
    }
    assert json.loads(invoke("why", "credit", str(home / "receipts"), "--json", home=tmp_path / "other").stdout) == {
        "given": None,
        "nodes": [told],
    }
    text = invoke("why", "credit", home=home).stdout
    assert "2 clients signed for 400 tokens through a layer" in text and "Of that, 150 counts" in " ".join(text.split())
    assert clients[0].peer_id[-8:] in text and "75.0%" in text


def test_what_a_single_client_signed_is_shown_with_why_it_does_not_count(tmp_path: Path) -> None:
    sign(tmp_path, 1_234)
    text = " ".join(invoke("why", "credit", str(tmp_path / "receipts"), home=tmp_path).stdout.split())
    assert "1 client signed for 1,234 tokens through a layer." in text and "No credit yet" in text


def test_answers_people_hours_and_energy(tmp_path: Path) -> None:
    """Of all runs of this home, whatever the swarm."""
    assert invoke("join", FRIENDS, home=tmp_path).returncode == 0
    write_stored(tmp_path / FOLDER / "a.json", {"answers": 12, "lent_s": 9000.0})
    text = " ".join(invoke("why", "credit", "friends", home=tmp_path).stdout.split())
    assert text.startswith("This machine gave 12 answers in 2.5 hours. No receipts here yet.")
    today = datetime.date.today().isoformat()
    write_stored(tmp_path / cards.FILE, {"day": today, "today_j": 3.6e5, "total_j": 7.2e6, "counter_j": 0.0, "at": 0.0})
    sign(tmp_path, 300)
    text = " ".join(invoke("why", "credit", "friends", home=tmp_path).stdout.split())
    assert (
        "in the last 30 days for 1 visit to open swarms; 2.00 kWh drawn by its GPUs. Today its GPUs drew 0.10 kWh."
        in text
    )


def test_many_clients_are_summed_up(tmp_path: Path) -> None:
    sign(tmp_path, *range(100, 128))
    assert "8 others" in invoke("why", "credit", str(tmp_path / "receipts"), home=tmp_path).stdout


def test_nothing_and_nonsense(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert "No receipts" in invoke("why", "credit", str(tmp_path / "empty"), home=tmp_path).stdout
    assert (
        invoke("why", "credit", str(tmp_path / "empty"), "--json", home=tmp_path).stdout.strip()
        == '{"given": null, "nodes": []}'
    )
    assert_clear(invoke("why", "credit", home=tmp_path), 2, "which swarm?")
    assert_clear(invoke("why", "credit", "nobody", home=tmp_path), 2, "nobody")
