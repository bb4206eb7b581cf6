"""Receipts for work. The peer that did the work keeps them, up to the work that it did; the client that ordered the work
issues them."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from dataclasses import dataclass, field

from swarmnode.codec.messages import MAX_WORK_IDS, End, Error, SignedReceipt
from swarmnode.credit.priorities import Priorities
from swarmnode.errors import ErrorCode, LocalError, NetworkDown, PeerError, ProtocolError
from swarmnode.metrics import table
from swarmnode.metrics.metric import Reading, Readings
from swarmnode.net.addressing.addresses import Claimant
from swarmnode.net.identity import verify
from swarmnode.net.interfaces import PeerId
from swarmnode.net.tasks import Tasks
from swarmnode.peer.completed_work import CompletedWork
from swarmnode.peer.host import Host
from swarmnode.peer.questions import Answer, QuestionServer, ask, board_of
from swarmnode.plan.credit import Credit, credit_of
from swarmnode.serving.client.session_spec import ServedWork
from swarmnode.swarm.records.manifest import CREDIT
from swarmnode.swarm.records.receipt import MAX_BATCH_S, Receipt, ReceiptFolder, receipts_of, sign_receipt

log = logging.getLogger(__name__)

GATHER_S = 5.0  # work done in this time goes on one receipt
ANSWER_S = 5.0
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
                self._check(receipt, question.work)
                await asyncio.to_thread(self._folder.keep, receipt, question.receipt)
            except ProtocolError as error:
                log.info("receipt refused: %s", error)
                self._counts["refused"] += 1
                return Answer(Error(error.code))
            except LocalError as error:
                log.warning("a receipt is lost: %s", error)
                return Answer(Error(ErrorCode.INTERNAL))
        self._counts["kept"] += 1
        return Answer(End())

    def _check(self, receipt: Receipt, works: tuple[bytes, ...]) -> None:
        """Check that the receipt covers more work than the previous one of its batch, but no more than was done; then mark
        the work as confirmed.

        Raises ProtocolError if it does not.
        """
        before = self._folder.last(receipt)
        told = 0 if before is None else before.served + before.trained
        more, done = receipt.served + receipt.trained - told, self._completed.unconfirmed(works)
        if not 0 < more <= done:
            text = f"its receipt adds {more} layers x tokens, but {done} were computed"
            raise ProtocolError(text, code=ErrorCode.REFUSED, peer=receipt.client)
        if before is not None and (receipt.served < before.served or receipt.trained < before.trained):
            raise ProtocolError(
                "its receipt covers less than the one before", code=ErrorCode.REFUSED, peer=receipt.client
            )
        self._completed.confirm(works, more, receipt.client)


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

    def note(self, peer: PeerId, work: bytes, *, served: int = 0, trained: int = 0) -> None:
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
            self.note(peer, session, served=unit_tokens)

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
                if len(waiting) < MAX_WORK_IDS:
                    await self._gather()
                await self._sign(peer, self._batch(peer))
        except (PeerError, NetworkDown, asyncio.TimeoutError) as error:
            log.info("peer %s did not take your receipt: %s", peer, error or "no answer")
            del self._batches[peer]  # later work starts a batch with a later time
        finally:
            self._issuing.discard(peer)

    async def _gather(self) -> None:
        """Wait GATHER_S seconds for more work on the same receipts, or until the node leaves."""
        try:
            await asyncio.wait_for(self._leaving.wait(), GATHER_S)
        except asyncio.TimeoutError:
            return

    async def _sign(self, peer: PeerId, batch: _Batch) -> None:
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
