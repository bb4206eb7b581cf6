"""Shares of a device's time by the credit of a client's own workers (`create --priority credit`), and the claims to such a
share."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from swarmnode.codec.messages import MAX_CLAIMED, CreditClaim, End, Error
from swarmnode.errors import NetworkDown, PeerError, ProtocolError
from swarmnode.net.addressing.addresses import Claimant
from swarmnode.net.identity import identities, verify
from swarmnode.net.interfaces import PeerId
from swarmnode.net.tasks import Tasks
from swarmnode.peer.host import Host
from swarmnode.peer.questions import Answer, QuestionServer, ask, board_of
from swarmnode.plan.credit import Credit, credit_of, weight_of
from swarmnode.swarm.records.manifest import CREDIT
from swarmnode.swarm.records.receipt import (
    Receipt,
    Voucher,
    counts,
    open_receipt,
    open_voucher,
    read_receipts,
    receipts_of,
    sign_voucher,
    signed_receipts,
)

log = logging.getLogger(__name__)

AGAIN_S = 3600.0
LIFE_S = 7200
ANSWER_S = 5.0
CLAIM_PROTOCOL = "/swarmnode/claim/1"
MAX_WORKERS = 1024  # workers whose credit is remembered; beyond that the smallest is dropped


class WorkerCredit(NamedTuple):
    """Credit that one node has earned in one swarm."""

    swarm: bytes
    worker: PeerId
    credit: Credit


def worker_credits(home: Path, swarm: bytes) -> list[WorkerCredit]:
    """Return the credit of each node of the home in the swarm, largest first. Raises LocalError if the folder cannot be read."""
    return _credits(read_receipts(receipts_of(home, swarm), swarm, verify))


def folder_credits(folder: Path) -> list[WorkerCredit]:
    """Return the credit of every node, per swarm, that has receipts in `folder`, largest first. Raises LocalError if it
    cannot be read."""
    return _credits(read_receipts(folder, None, verify))


def summary(one: WorkerCredit) -> dict[str, Any]:
    """Return the credit as JSON values for scripts, in layers times tokens: `signed` is all that clients signed for,
    `credit` the part that counts."""
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


class _Lent(NamedTuple):
    client: PeerId
    weight: float
    until: int


class Priorities:
    """The priorities that one node grants. A worker's credit raises one client at a time: the client of its latest claim."""

    def __init__(self, host: Host) -> None:
        assert host.swarm.manifest is not None
        self._units = host.swarm.manifest.model.units
        self._swarm = host.swarm.id
        self._now = host.clock.unix
        self._lent: dict[PeerId, _Lent] = {}
        self._server = QuestionServer(host, CLAIM_PROTOCOL, CreditClaim, self._answer)

    def weight(self, client: PeerId) -> float:
        """Return the weight of `client` in the sharing of time; 1, that of others, if it has no valid claim."""
        now = self._now()
        return max(
            (lent.weight for lent in self._lent.values() if lent.client == client and lent.until >= now), default=1.0
        )

    async def start(self) -> None:
        """Start answering clients that show vouchers to claim priority."""
        await self._server.start()

    async def close(self) -> None:
        """Stop answering clients that claim priority."""
        await self._server.close()

    async def _answer(self, _asker: Claimant, claim: CreditClaim) -> Answer:
        try:
            voucher, receipts = await asyncio.to_thread(self._open, claim)
        except ProtocolError as error:
            log.info("claim refused: %s", error)
            return Answer(Error(error.code))
        weight = weight_of(credit_of(receipts), self._units)
        self._lent.pop(voucher.worker, None)
        self._lent[voucher.worker] = _Lent(voucher.client, weight, voucher.until)
        if len(self._lent) > MAX_WORKERS:
            del self._lent[self._least()]
        return Answer(End())

    def _least(self) -> PeerId:
        """Return an expired worker if there is any, else the worker with the smallest weight. Invented workers have no credit."""
        now = self._now()
        return min(self._lent, key=lambda worker: (self._lent[worker].until >= now, self._lent[worker].weight))

    def _open(self, claim: CreditClaim) -> tuple[Voucher, list[Receipt]]:
        """Verify a claim (at most 65 signatures) and return its voucher and the receipts that count for its worker.

        Ignores invalid receipts. Raises ProtocolError if the voucher is invalid.
        """
        now = self._now()
        voucher = open_voucher(claim.voucher, self._swarm, verify, now)
        receipts = []
        for raw in claim.receipts:
            with contextlib.suppress(ProtocolError):
                receipts.append(open_receipt(raw, self._swarm, verify))
        return voucher, [one for one in receipts if one.worker == voucher.worker and counts(one, now)]


class Claims:
    """The claims of one client: it shows the best credit of this home's nodes to peers that the client is about to ask, in
    the background."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._board = board_of(host, CLAIM_PROTOCOL)
        self._shown_s: dict[PeerId, float] = {}
        self._tasks = Tasks("claims", on_crash=host.link_config.supervisor.ends_conversation)

    def show(self, peers: Iterable[PeerId]) -> None:
        """Send the claim to those of `peers` that have not been sent it within AGAIN_S, without waiting. Does nothing
        unless the swarm has priority by credit."""
        manifest, now_s = self._host.swarm.manifest, self._host.clock.monotonic()
        if manifest is None or manifest.priority != CREDIT:
            return
        new = [peer for peer in peers if now_s - self._shown_s.get(peer, -AGAIN_S) >= AGAIN_S]
        if new:
            self._shown_s.update(dict.fromkeys(new, now_s))
            self._tasks.spawn(self._show(new), f"to {len(new)} peers")

    async def shown(self) -> None:
        """Wait until every claim that is being sent has been delivered or has failed."""
        await self._tasks.idle()

    async def close(self) -> None:
        """Cancel the pending claims and close the links."""
        await self._tasks.close()
        await self._board.close()

    async def _show(self, peers: list[PeerId]) -> None:
        claim = await asyncio.to_thread(self._claim)
        if claim is not None:
            await asyncio.gather(*(self._tell(peer, claim) for peer in peers))

    async def _tell(self, peer: PeerId, claim: CreditClaim) -> None:
        try:
            async for _ in ask(self._board, peer, claim, silence_s=ANSWER_S):
                pass  # only END comes
        except (PeerError, NetworkDown) as error:
            log.info("peer %s has not received your node's credit: %s", peer, error)

    def _claim(self) -> CreditClaim | None:
        """Return the claim of the node of this home that has the most credit, or None if no node has receipts that count."""
        home, swarm, now = self._host.config.home, self._host.swarm.id, self._host.clock.unix()
        claims = []
        for node in identities(home, "node*.key"):
            found = [
                (receipt, raw)
                for receipt, raw in signed_receipts(receipts_of(home, swarm) / node.peer_id, swarm, verify)
                if receipt.worker == node.peer_id and counts(receipt, now)
            ]
            shown = _worth_most(found)
            if shown:
                voucher = Voucher(swarm, node.peer_id, self._host.peer_id, int(now) + LIFE_S)
                raw = tuple(raw for _, raw in shown)
                credit = credit_of(receipt for receipt, _ in shown).counted
                claims.append((credit, CreditClaim(sign_voucher(voucher, node.sign), raw)))
        return max(claims, key=lambda one: one[0], default=(0.0, None))[1]


def _worth_most(found: list[tuple[Receipt, bytes]]) -> list[tuple[Receipt, bytes]]:
    """Choose at most MAX_CLAIMED receipts: first the largest of each client, since receipts of many clients count more than
    many of one client."""
    found.sort(key=lambda one: -(one[0].served + one[0].trained))
    first = {receipt.client: (receipt, raw) for receipt, raw in reversed(found)}
    rest = [one for one in found if first[one[0].client][1] != one[1]]
    largest = sorted(first.values(), key=lambda one: -(one[0].served + one[0].trained))
    return [*largest, *rest][:MAX_CLAIMED]
