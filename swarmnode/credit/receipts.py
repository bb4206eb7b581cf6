"""Receipts for work. The peer that did the work keeps them, up to the work that it did; the client that ordered the work
issues them.

Shares of a device's time by the credit of a client's own workers (`create --priority credit`), and the claims to such a
share.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from swarmnode.codec.messages import MAX_CLAIMED, MAX_WORK_IDS, CreditClaim, End, Error, SignedReceipt
from swarmnode.errors import ErrorCode, LocalError, NetworkDown, PeerError, ProtocolError
from swarmnode.metrics import table
from swarmnode.metrics.metric import Reading, Readings
from swarmnode.net.addressing.addresses import Claimant
from swarmnode.net.identity import identities, verify
from swarmnode.net.interfaces import PeerId
from swarmnode.net.tasks import Tasks
from swarmnode.peer.completed_work import CompletedWork
from swarmnode.peer.host import Host
from swarmnode.peer.questions import Answer, QuestionServer, ask, board_of
from swarmnode.plan.credit import Credit, credit_of, weight_of
from swarmnode.serving.client.session_spec import ServedWork
from swarmnode.swarm.records.manifest import CREDIT
from swarmnode.swarm.records.receipt import (
    MAX_BATCH_S,
    Receipt,
    ReceiptFolder,
    Voucher,
    counts,
    open_receipt,
    open_voucher,
    read_receipts,
    receipts_of,
    sign_receipt,
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


def summary(entry: WorkerCredit) -> dict[str, Any]:
    """Return the credit as JSON values for scripts, in layers times tokens: `signed` is all that clients signed for,
    `credit` the part that counts."""
    credit = entry.credit
    return {
        "swarm": entry.swarm.hex(),
        "worker": entry.worker,
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


class Priorities(QuestionServer):
    """The priorities that one node grants. A worker's credit raises one client at a time: the client of its latest claim."""

    def __init__(self, host: Host) -> None:
        assert host.swarm.manifest is not None
        self._units = host.swarm.manifest.model.units
        self._swarm = host.swarm.id
        self._now = host.clock.unix
        self._lent: dict[PeerId, _Lent] = {}
        super().__init__(host, CLAIM_PROTOCOL, CreditClaim, self._lend)

    def weight(self, client: PeerId) -> float:
        """Return the weight of `client` in the sharing of time; 1, that of others, if it has no valid claim."""
        now = self._now()
        return max(
            (lent.weight for lent in self._lent.values() if lent.client == client and lent.until >= now), default=1.0
        )

    async def _lend(self, _asker: Claimant, claim: CreditClaim) -> Answer:
        try:
            voucher, receipts = await asyncio.to_thread(self._open, claim)
        except ProtocolError as error:
            log.info("claim refused: %s", error)
            return Answer(Error(error.code))
        weight = weight_of(credit_of(receipts), self._units)
        self._lent.pop(voucher.worker, None)
        self._lent[voucher.worker] = _Lent(voucher.client, weight, voucher.until)
        if len(self._lent) > MAX_WORKERS:
            # An expired worker goes if there is any, else the one with the smallest weight: invented workers have no credit.
            now = self._now()
            del self._lent[min(self._lent, key=lambda each: (self._lent[each].until >= now, self._lent[each].weight))]
        return Answer(End())

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
            # Choose at most MAX_CLAIMED receipts: first the largest of each client, since receipts of many clients
            # count more than many of one client
            found.sort(key=lambda one: -(one[0].served + one[0].trained))
            first = {receipt.client: (receipt, raw) for receipt, raw in reversed(found)}
            rest = [one for one in found if first[one[0].client][1] != one[1]]
            largest = sorted(first.values(), key=lambda one: -(one[0].served + one[0].trained))
            shown = [*largest, *rest][:MAX_CLAIMED]
            if shown:
                voucher = Voucher(swarm, node.peer_id, self._host.peer_id, int(now) + LIFE_S)
                raw = tuple(raw for _, raw in shown)
                credit = credit_of(receipt for receipt, _ in shown).counted
                claims.append((credit, CreditClaim(sign_voucher(voucher, node.sign), raw)))
        return max(claims, key=lambda one: one[0], default=(0.0, None))[1]


GATHER_S = 5.0  # work done in this time goes on one receipt
LEAVE_S = 2.0  # longest wait for receipts when the node leaves
MAX_WAITING_IDS = 4096  # of one peer: further work gets no receipt while the peer does not answer
CREDIT_PROTOCOL = "/swarmnode/credit/1"
RESULTS = ("kept", "refused")


class ReceiptKeeper:
    """The receipts of one node, and, if the swarm has priority by credit, the priorities that it grants to clients."""

    def __init__(self, host: Host) -> None:
        self._completed: CompletedWork = host.completed
        folder = receipts_of(host.config.home, host.swarm.id)
        self._folder = ReceiptFolder(folder, host.swarm.id, host.peer_id, verify, host.clock.unix)
        self._server = QuestionServer(host, CREDIT_PROTOCOL, SignedReceipt, self._answer)
        self._priorities: Priorities | None = None
        if host.swarm.manifest is not None and host.swarm.manifest.priority == CREDIT:
            self._priorities = Priorities(host)
            host.weight_of = self._priorities.weight
        self._writing = asyncio.Lock()
        self._counts: Counter[str] = Counter()

    def __repr__(self) -> str:
        return f"<ReceiptKeeper {self._folder!r}, {self._completed!r}>"

    @property
    def credit(self) -> Credit:
        """Credit that the kept receipts add up to."""
        return credit_of(self._folder.receipts)

    async def start(self) -> None:
        """Start accepting receipts that clients sign for this node's work."""
        await self._server.start()
        if self._priorities is not None:
            await self._priorities.start()

    async def close(self) -> None:
        """Stop accepting receipts."""
        if self._priorities is not None:
            await self._priorities.close()
        await self._server.close()

    def readings(self) -> Readings:
        """Yield the metrics of work, receipts and credit."""
        credit = self.credit
        yield Reading(table.ANSWERS, self._completed.answers)
        yield Reading(table.COMPLETED_WORK, self._completed.total)
        yield Reading(table.POSITIONS_FOR_OTHERS, self._completed.positions_for_others)
        yield Reading(table.RECEIPTED_WORK, self._completed.receipted)
        for result in RESULTS:
            yield Reading(table.RECEIPTS, self._counts[result], (result,))
        yield Reading(table.CREDIT_WORK, credit.served, ("serve",))
        yield Reading(table.CREDIT_WORK, credit.trained, ("train",))
        yield Reading(table.CREDIT_CLIENTS, credit.clients)
        yield Reading(table.CREDIT, credit.counted)

    async def _answer(self, _asker: Claimant, question: SignedReceipt) -> Answer:
        async with self._writing:  # two receipts at once must not cover the same work
            try:
                receipt = self._folder.open(question.receipt)
                # The receipt must cover more work than the previous one of its batch, but no more than was done.
                before = self._folder.last(receipt)
                told = 0 if before is None else before.served + before.trained
                more, done = receipt.served + receipt.trained - told, self._completed.unconfirmed(question.work)
                if not 0 < more <= done:
                    text = f"its receipt adds {more} layers x tokens, but {done} were computed"
                    raise ProtocolError(text, code=ErrorCode.REFUSED, peer=receipt.client)
                if before is not None and (receipt.served < before.served or receipt.trained < before.trained):
                    raise ProtocolError(
                        "its receipt covers less than the one before", code=ErrorCode.REFUSED, peer=receipt.client
                    )
                self._completed.confirm(question.work, more, receipt.client)
                await asyncio.to_thread(self._folder.store, receipt, question.receipt)
            except ProtocolError as error:
                log.info("receipt refused: %s", error)
                self._counts["refused"] += 1
                return Answer(Error(error.code))
            except LocalError as error:
                log.warning("a receipt is lost: %s", error)
                return Answer(Error(ErrorCode.INTERNAL))
        self._counts["kept"] += 1
        return Answer(End())


@dataclass
class _Batch:
    """The work of one peer: the amounts on its latest receipt, and the (served, trained) amounts that wait for one, by work id."""

    since: int
    served: int = 0
    trained: int = 0
    waiting: dict[bytes, tuple[int, int]] = field(default_factory=dict)


class ReceiptIssuer:
    """The receipts that one client or trainer signs for the peers that work for it."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._board = board_of(host, CREDIT_PROTOCOL)
        self._batches: dict[PeerId, _Batch] = {}
        self._tasks = Tasks("receipts", on_crash=host.link_config.supervisor.ends_conversation)
        self._issuing: set[PeerId] = set()
        self._leaving = asyncio.Event()

    def __repr__(self) -> str:
        waiting = sum(len(batch.waiting) for batch in self._batches.values())
        return f"<ReceiptIssuer for {len(self._batches)} peers, {waiting} ids wait>"

    def record(self, peer: PeerId, work: bytes, *, served: int = 0, trained: int = 0) -> None:
        """Record that `peer` did work under the id `work`, in layers times tokens, and issue a receipt for it in the
        background.

        Ignores work of this node itself, work after `close`, and work beyond MAX_WAITING_IDS ids that wait for a receipt.
        """
        if served + trained <= 0 or peer == self._host.peer_id or self._leaving.is_set():
            return
        batch = self._batch(peer)
        if len(batch.waiting) >= MAX_WAITING_IDS:
            return
        batch.waiting[work] = served, trained
        if peer not in self._issuing:
            self._issuing.add(peer)
            self._tasks.spawn(self._issue(peer), f"for {peer}")

    def served(self, work: ServedWork) -> None:
        """Record the work of a session that has ended."""
        for (peer, session), unit_tokens in work.by_peer_and_session():
            self.record(peer, session, served=unit_tokens)

    async def close(self) -> None:
        """Sign the remaining receipts, for at most LEAVE_S, and stop."""
        self._leaving.set()
        try:
            await asyncio.wait_for(self._tasks.idle(), LEAVE_S)
        except asyncio.TimeoutError:
            log.info("your node leaves before all receipts are delivered: %r", self)
        await self._tasks.close()
        await self._board.close()

    def _batch(self, peer: PeerId) -> _Batch:
        now, batch = int(self._host.clock.unix()), self._batches.get(peer)
        if batch is None or now - batch.since > MAX_BATCH_S // 2:
            since = now if batch is None else max(now, batch.since + 1)
            batch = self._batches[peer] = _Batch(since, waiting={} if batch is None else batch.waiting)
        return batch

    async def _issue(self, peer: PeerId) -> None:
        """Send receipts to `peer` until none of its work waits. If it fails, the work that waits gets no receipt."""
        try:
            while waiting := self._batch(peer).waiting:
                if len(waiting) < MAX_WORK_IDS:  # more work may go on the same receipt, unless the node leaves
                    with contextlib.suppress(asyncio.TimeoutError):
                        await asyncio.wait_for(self._leaving.wait(), GATHER_S)
                batch = self._batch(peer)
                covered = dict(list(batch.waiting.items())[:MAX_WORK_IDS])
                served = batch.served + sum(one for one, _ in covered.values())
                trained = batch.trained + sum(one for _, one in covered.values())
                host, until = self._host, max(batch.since, int(self._host.clock.unix()))
                receipt = Receipt(host.swarm.id, host.peer_id, peer, batch.since, until, served, trained)
                signed = SignedReceipt(tuple(covered), sign_receipt(receipt, host.identity.sign))
                async for _ in ask(self._board, peer, signed, silence_s=ANSWER_S):
                    pass  # only END comes
                batch.served, batch.trained = served, trained
                for work in covered:
                    batch.waiting.pop(work, None)
        except (PeerError, NetworkDown, asyncio.TimeoutError) as error:
            log.info("peer %s did not take your receipt: %s", peer, error or "no answer")
            del self._batches[peer]  # later work starts a batch with a later time
        finally:
            self._issuing.discard(peer)
