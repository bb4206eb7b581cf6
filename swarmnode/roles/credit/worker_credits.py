"""The credit of nodes, from their receipts alone: those of a home, or any folder that somebody shows."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from swarmnode.net.identity import verify
from swarmnode.net.interfaces import PeerId
from swarmnode.plan.credit import Credit, credit_of
from swarmnode.swarm.records.receipt import Receipt
from swarmnode.swarm.storage.receipt_folder import counts, read_receipts, receipts_of


class WorkerCredit(NamedTuple):
    """Of one node in one swarm."""

    swarm: bytes
    worker: PeerId
    credit: Credit


def worker_credits(home: Path, swarm: bytes) -> list[WorkerCredit]:
    """Of the nodes of a home in a swarm, those with most first. Raises LocalError where the folder cannot be read."""
    return _credits(read_receipts(receipts_of(home, swarm), swarm, verify))


def folder_credits(folder: Path) -> list[WorkerCredit]:
    """Of all whose receipts lie in a folder, of whatever swarms, those with most first. Raises LocalError."""
    return _credits(read_receipts(folder, None, verify))


def summary(one: WorkerCredit) -> dict[str, Any]:
    """As scripts read it, in units times tokens: `signed` is all that clients signed for, `credit` what of it counts."""
    credit = one.credit
    return {
        "swarm": one.swarm.hex(),
        "worker": one.worker,
        "served": credit.served,
        "trained": credit.trained,
        "signed": credit.signed,
        "clients": credit.clients,
        "concentration": round(credit.concentration, 4),
        "credit": round(credit.counted),
    }


def _credits(receipts: Iterable[Receipt]) -> list[WorkerCredit]:
    now, found = time.time(), dict[tuple[bytes, PeerId], list[Receipt]]()
    for receipt in receipts:
        if counts(receipt, now):
            found.setdefault((receipt.swarm, receipt.worker), []).append(receipt)
    credits = [WorkerCredit(swarm, worker, credit_of(own)) for (swarm, worker), own in found.items()]
    return sorted(credits, key=lambda one: (-one.credit.counted, one.worker))
