"""A worker signs receipts for itself, and a friend signs one for more work than all clients together had from it."""

from __future__ import annotations

import contextlib

from attack import Outcome, main

from swarmnode.errors import ProtocolError
from swarmnode.net.identity import Identity, verify
from swarmnode.plan.credit import credit_of
from swarmnode.swarm.records.receipt import MAX_UNIT_TOKENS, Receipt, open_receipt, sign_receipt

VIRTUAL, FAST = True, True
SWARM = bytes(32)
CLIENTS, WORK = 10, 1000


def receipt(client: Identity, worker: Identity, served: int) -> list[Receipt]:
    """Sign a receipt and return it as other peers read it: a list with one receipt, empty if they refuse it."""
    signed = sign_receipt(Receipt(SWARM, client.peer_id, worker.peer_id, 1, 2, served), client.sign)
    with contextlib.suppress(ProtocolError):
        return [open_receipt(signed, SWARM, verify)]
    return []


async def attack() -> Outcome:
    worker, friend = Identity.generate(), Identity.generate()
    own = receipt(worker, worker, MAX_UNIT_TOKENS)
    forged = receipt(friend, worker, MAX_UNIT_TOKENS)
    honest = [one for _ in range(CLIENTS) for one in receipt(Identity.generate(), worker, WORK)]
    alone, before, after = (credit_of(found).counted for found in (forged, honest, honest + forged))
    return Outcome(
        not own and alone == 0 and after - before <= 2 * CLIENTS * WORK,
        f"{len(own)} receipts of its own count; the friend's alone is worth {alone:.0f}, and beside {CLIENTS} clients "
        f"who signed for {CLIENTS * WORK} it raises {before:.0f} to {after:.0f}",
    )


main(__name__, attack, virtual=VIRTUAL)
