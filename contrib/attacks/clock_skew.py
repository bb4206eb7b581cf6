"""A stranger signs with a clock that is years off, and replays records of others, so that they stay valid for ever."""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path

from attack import Outcome, main

from swarmnode.errors import ProtocolError
from swarmnode.net.identity import Identity, verify
from swarmnode.net.interfaces import key_digest
from swarmnode.swarm.peers.peer_table import PeerTable
from swarmnode.swarm.peers.record_validation import record_validator
from swarmnode.swarm.peers.shards import SAMPLE
from swarmnode.swarm.records.announcement import MAX_LIFE_S, VERSION, Announcement, State, sign_announcement
from swarmnode.swarm.records.receipt import Receipt, ReceiptFolder, Voucher, open_voucher, sign_receipt, sign_voucher
from tests.swarm.society import ALICE, Ticket, private

VIRTUAL, FAST = True, True
SWARM, NOW = bytes(range(32)), 1_800_000_000.0
LIFE_S = 16.0
YEAR_S, DAY_S, MINUTE_S = 365 * 86_400, 86_400, 60
OFF_S = (-YEAR_S, -2 * DAY_S, -30 * MINUTE_S, 30 * MINUTE_S, 2 * DAY_S, YEAR_S)


async def attack() -> Outcome:
    with tempfile.TemporaryDirectory() as folder:
        taken = {
            "announcements": sum(_announced(off_s) for off_s in OFF_S),
            "announcements kept for longer": sum(_announced(0.0, kept_s=kept_s) for kept_s in (MAX_LIFE_S, YEAR_S)),
            "announcements of who has left": int(_brings_back()),
            "admissions": sum(_admitted(off_s) for off_s in OFF_S if off_s > 0),
            "receipts": sum(_receipt(Path(folder), off_s) for off_s in (-YEAR_S, 2 * DAY_S, YEAR_S)),
            "vouchers": sum(_vouched(off_s) for off_s in OFF_S if abs(off_s) > DAY_S),
        }
        honest = _announced(0.0) and _admitted(-DAY_S) and _receipt(Path(folder), -1.0) and _vouched(DAY_S / 2)
    told = ", ".join(f"{count} {what}" for what, count in taken.items())
    return Outcome(
        honest and not any(taken.values()), f"{told} were taken; those of now {'were' if honest else 'were not'}"
    )


def _announcement(author: Identity, issued_at: float, **changes: object) -> Announcement:
    fields = {"sequence": 1, "state": State.READY, "span": (0, 4), **changes}
    return Announcement(
        VERSION,
        SWARM,
        author.peer_id,
        issued_at=issued_at,
        expires_at=issued_at + LIFE_S,
        started_at=issued_at,
        **fields,  # type: ignore[arg-type]
    )


def _announced(off_s: float, *, kept_s: float = LIFE_S) -> bool:
    """Return whether the table would take an announcement signed `off_s` seconds from now and keep it for `kept_s` seconds."""
    author = Identity.generate()
    valid = record_validator(SWARM, verify, lambda: NOW)
    raw = sign_announcement(_announcement(author, NOW + off_s), author.sign)
    ends_at = NOW + off_s + kept_s
    return ends_at > NOW and valid(key_digest(SAMPLE.key(SWARM)), author.peer_id.encode(), raw, ends_at)


def _brings_back() -> bool:
    """Return whether a replayed announcement brings back a peer that has left."""
    author, table = Identity.generate(), PeerTable()
    before = _announcement(author, NOW, sequence=5)
    for said in (before, _announcement(author, NOW + 1, sequence=6, state=State.OFFLINE), before):
        table.observe(said)
    table.update(NOW + 2)
    raw = sign_announcement(before, author.sign)
    valid = record_validator(SWARM, verify, lambda: NOW + DAY_S)
    longer = valid(key_digest(SAMPLE.key(SWARM)), author.peer_id.encode(), raw, NOW + DAY_S + LIFE_S)
    return author.peer_id in table.live or longer


def _admitted(off_s: float) -> bool:
    with contextlib.suppress(ProtocolError):
        private().admit(ALICE, Ticket(expires_at=NOW + 2 * YEAR_S).certificate(ALICE, NOW + off_s), NOW)
        return True
    return False


def _receipt(folder: Path, off_s: float) -> bool:
    client, worker = Identity.generate(), Identity.generate()
    until = int(NOW + off_s)
    raw = sign_receipt(Receipt(SWARM, client.peer_id, worker.peer_id, until - 1, until, 100), client.sign)
    with contextlib.suppress(ProtocolError):
        ReceiptFolder(folder, SWARM, worker.peer_id, verify, lambda: NOW).open(raw)
        return True
    return False


def _vouched(off_s: float) -> bool:
    worker = Identity.generate()
    raw = sign_voucher(Voucher(SWARM, worker.peer_id, "client", int(NOW + off_s)), worker.sign)
    with contextlib.suppress(ProtocolError):
        open_voucher(raw, SWARM, verify, NOW)
        return True
    return False


main(__name__, attack, virtual=VIRTUAL)
