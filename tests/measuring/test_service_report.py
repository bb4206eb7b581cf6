"""What a node tells its owner of what it does: news or nothing, and the record of what a machine gave."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import cast

from swarmnode.lending import cards
from swarmnode.lending.cards import EnergyMeter
from swarmnode.measuring.service_report import (
    FOLDER,
    LEAST_TOKENS,
    Donation,
    ServiceReport,
    ServiceReporter,
    WorkRecord,
    donation,
)
from swarmnode.metrics import table
from swarmnode.metrics.metric import Histogram, Reading, Readings
from swarmnode.net.addressing.reachability import Reachability
from swarmnode.net.identity import Identity
from swarmnode.swarm.records.announcement import Announcement
from swarmnode.swarm.records.receipt import LIFE_S, Receipt, receipts_of, sign_receipt
from swarmnode.swarm.storage.swarmfile import Swarm
from tests.swarm.storage.test_receipt_folder import NOW, SWARM

OPEN = bytes([1] * 32)


def swarm(of: bytes, *, private: bool) -> Swarm:
    """A swarm of which only the id and the kind count."""
    return cast("Swarm", SimpleNamespace(id=of, private=private))


class Worker:
    """A node's own figures, and the peers that it knows."""

    def __init__(self) -> None:
        self.answers = self.sessions = self.decoded = self.lost = 0
        self.lent_s = 0.0
        self.passes = Histogram()
        self.peers: dict[str, Announcement] = {}
        self.reporter = ServiceReporter(self.readings)

    def readings(self) -> Readings:
        yield Reading(table.ANSWERS, self.answers)
        yield Reading(table.SESSIONS, self.sessions, ("0:3",))
        yield Reading(table.TOKENS, self.decoded, ("0:3", "decode"))
        yield Reading(table.TOKENS, 10_000, ("0:3", "prefill"))
        yield Reading(table.PASS_SECONDS, self.passes, ("0:3", "decode"))
        yield Reading(table.PASS_SECONDS, Histogram(), ("0:3", "prefill"))
        yield Reading(table.LENT_SECONDS, self.lent_s)
        yield Reading(table.FAULTS, self.lost, ("0:3", "serve", "peer_lost"))

    def write(self, answers: int, tokens: int, seconds: float) -> None:
        """Work on so many texts and tokens."""
        self.answers += answers
        self.decoded += tokens
        self.passes.observe(seconds)

    def minute(self, reachability: Reachability = Reachability.UNKNOWN) -> str:
        """The line of a minute; empty without one."""
        report = self.reporter.report(reachability, self.peers, since=100.0)
        assert report is None or (isinstance(report, ServiceReport) and report.news)
        return str(report or "")


def peer(name: str, span: tuple[int, int], started_at: float) -> Announcement:
    """An announcement of a machine."""
    return Announcement(1, SWARM, f"id-of-{name}", 1, 1.0, 2.0, started_at, span=span, name=name)


def test_the_line_of_a_minute_is_news_or_nothing() -> None:
    worker = Worker()
    assert worker.minute() == ""
    worker.write(1, 40, 2.0)
    assert worker.minute() == "First answer served, at 20.0 tokens/s."
    worker.write(3, 40, 1.9)
    assert worker.minute() == "", "more of the same"
    worker.write(1, LEAST_TOKENS - 1, 100.0)
    assert worker.minute() == "", "too few tokens to tell a speed"
    worker.write(5, 400, 80.0)
    assert worker.minute() == "10 answers served so far. Now 5.0 tokens/s instead of 20.0."
    worker.write(0, 400, 80.0)
    assert worker.minute() == ""
    worker.lost += 2
    assert worker.minute(Reachability.PUBLIC) == (
        "Others reach this machine directly. 2 texts broke off here: the next machine was lost."
    )
    assert worker.minute(Reachability.PUBLIC) == ""
    worker.decoded, worker.passes = 0, Histogram()  # it has moved
    worker.write(1, 50, 10.0)
    assert worker.minute(Reachability.PUBLIC) == ""


def test_machines_that_come_and_go_are_news() -> None:
    """In the first minute only those that began after this node."""
    worker = Worker()
    worker.peers = {
        one.peer: one for one in (peer("old", (0, 4), 50.0), peer("ada", (4, 8), 150.0), peer("door", (0, 0), 160.0))
    }
    assert worker.minute() == "Joined: ada (layers 4 to 7)."
    assert worker.minute() == ""
    worker.peers = {one.peer: one for one in (peer(f"m{number}", (number, number + 1), 20.0) for number in range(5))}
    told = worker.minute()
    assert "m2 (layer 2) and 2 more. " in told and "Left: old, ada." in told


def test_what_was_given_is_kept_over_restarts(tmp_path: Path) -> None:
    """By each node of a home for itself; people are those whose receipts are kept, without one's own client."""
    first, second = Worker(), Worker()
    assert not donation(tmp_path).any
    for worker, name in ((first, "a"), (second, "b")):
        record = WorkRecord(tmp_path, name, swarm(SWARM, private=True), worker.readings)
        assert record.store(record.run_sums()) == donation(tmp_path)
        worker.answers, worker.lent_s = 2, 1800.0
        record.store(record.run_sums())
        record.store(record.run_sums())
    again = Worker()
    record = WorkRecord(tmp_path, "a", swarm(OPEN, private=False), again.readings)
    again.answers, again.lent_s = 1, 3600.0
    record.store(record.run_sums())
    own, ada, bob = (Identity.generate() for _ in range(3))
    own.save(tmp_path / "client.key")
    node = Identity.generate()
    signed = (
        (SWARM, own, NOW),
        (SWARM, ada, NOW),
        (SWARM, ada, NOW - 60),
        (SWARM, bob, NOW - LIFE_S - 60),
        (OPEN, ada, NOW),
    )
    for number, (where, client, ended) in enumerate(signed):
        receipt = Receipt(where, client.peer_id, node.peer_id, ended - 50, ended, 5)
        path = receipts_of(tmp_path, where) / node.peer_id / f"{number}.receipt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(sign_receipt(receipt, client.sign))
    assert donation(tmp_path, lambda: NOW) == Donation(5, 7200.0, 1, 1, None)
    assert (tmp_path / FOLDER / "a.json").stat().st_mode & 0o077 == 0
    assert ada.peer_id.encode() not in b"".join(path.read_bytes() for path in (tmp_path / FOLDER).iterdir())
    (tmp_path / FOLDER / "a.json").write_text("{")
    assert donation(tmp_path, lambda: NOW).answers == 2, "a damaged file counts as empty"


def test_energy_is_told_where_a_card_measures_it(tmp_path: Path) -> None:
    meter = EnergyMeter(tmp_path, lambda: None, now=iter((0.0, 60.0, 60.0)).__next__)  # type: ignore[arg-type, return-value]
    for counter_j in (0.0, 1.8e6):
        meter.record(counter_j)
    assert donation(tmp_path).energy_j == 1.8e6 and (tmp_path / cards.FILE).exists()
    assert str(Donation(1, 90.0, 0, 0, None)) == "1 answer in 2 minutes"
    assert str(Donation(0, 7200.0, 0, 1, None)) == "2.0 hours; in the last 30 days for 1 visit to open swarms"
    told = Donation(1234, 7200.0, 2, 0, 1.8e6)
    assert str(told) == "1,234 answers in 2.0 hours; in the last 30 days for 2 people; 0.50 kWh drawn by its GPUs"
    assert told.to_json() == {
        "answers": 1234,
        "lent_s": 7200.0,
        "people": 2,
        "visits": 0,
        "people_days": 30,
        "kwh": 0.5,
    }
