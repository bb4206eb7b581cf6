"""The side that did the work: takes receipts for no more than it did, and keeps them."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter

from swarmnode.codec.credit_messages import SignedReceipt
from swarmnode.codec.messages import End, Error
from swarmnode.errors import ErrorCode, LocalError, ProtocolError
from swarmnode.metrics import table
from swarmnode.metrics.metric import Reading, Readings
from swarmnode.net.identity import verify
from swarmnode.net.limits.address_group import Claimant
from swarmnode.plan.credit import Credit, credit_of
from swarmnode.roles.credit.completed_work import CompletedWork
from swarmnode.roles.credit.priorities import Priorities
from swarmnode.roles.host import Host
from swarmnode.roles.question_server import Answer, QuestionServer
from swarmnode.swarm.records.manifest import CREDIT
from swarmnode.swarm.records.receipt import Receipt
from swarmnode.swarm.storage.receipt_folder import ReceiptFolder, receipts_of

log = logging.getLogger(__name__)

CREDIT_PROTOCOL = "/swarmnode/credit/1"
RESULTS = ("kept", "refused")


class ReceiptKeeper:
    """Of one node, for as long as it is in the swarm, with the priorities that follow where the swarm has them."""

    def __init__(self, host: Host) -> None:
        self._completed: CompletedWork = host.completed
        folder = receipts_of(host.config.home, host.swarm.id)
        self._folder = ReceiptFolder(folder, host.swarm.id, host.peer_id, verify, host.clock.unix)
        self._server = QuestionServer(
            host.network, CREDIT_PROTOCOL, host.hello, host.link_config, SignedReceipt, self._answer
        )
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
        """What the receipts add up to."""
        return credit_of(self._folder.receipts)

    async def start(self) -> None:
        """Take receipts from now on."""
        await self._server.start()
        if self._priorities is not None:
            await self._priorities.start()

    async def close(self) -> None:
        """Take none any more."""
        if self._priorities is not None:
            await self._priorities.close()
        await self._server.close()

    def readings(self) -> Readings:
        """What Prometheus may know of it."""
        credit = self.credit
        yield Reading(table.COMPLETED_WORK, self._completed.total)
        yield Reading(table.RECEIPTED_WORK, self._completed.receipted)
        for result in RESULTS:
            yield Reading(table.RECEIPTS, self._counts[result], (result,))
        yield Reading(table.CREDIT_WORK, credit.served, ("serve",))
        yield Reading(table.CREDIT_WORK, credit.trained, ("train",))
        yield Reading(table.CREDIT_CLIENTS, credit.clients)
        yield Reading(table.CREDIT, credit.counted)

    async def _answer(self, _asker: Claimant, question: SignedReceipt) -> Answer:
        async with self._writing:  # what one receipt covers no other one does
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
        """That it says more than the one before, and no more than was done. Raises ProtocolError."""
        before = self._folder.last(receipt)
        told = 0 if before is None else before.served + before.trained
        more, done = receipt.served + receipt.trained - told, self._completed.unconfirmed(works)
        if not 0 < more <= done:
            text = f"{more} units x tokens more on a receipt, where {done} were done"
            raise ProtocolError(text, code=ErrorCode.REFUSED, peer=receipt.client)
        if before is not None and (receipt.served < before.served or receipt.trained < before.trained):
            raise ProtocolError("a receipt that takes back", code=ErrorCode.REFUSED, peer=receipt.client)
        self._completed.confirm(works, more)
