"""The side that was served: counts what each peer did for it, and signs for it, a few seconds after or when it leaves.

Nothing waits for it, and nothing follows where a peer does not take it: the next receipt of that peer begins anew.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field

from swarmnode.codec.credit_messages import MAX_WORK_IDS, SignedReceipt
from swarmnode.errors import NetworkDown, PeerError
from swarmnode.net.interfaces import PeerId
from swarmnode.net.links.switchboard import Switchboard
from swarmnode.net.tasks import Tasks
from swarmnode.roles.credit.receipt_keeper import CREDIT_PROTOCOL
from swarmnode.roles.host import Host
from swarmnode.roles.question_server import ask
from swarmnode.roles.serving.client.served_work import ServedWork
from swarmnode.swarm.records.receipt import MAX_BATCH_S, Receipt, sign_receipt

log = logging.getLogger(__name__)

GATHER_S = 5.0  # what is done meanwhile goes on one receipt
ANSWER_S = 5.0
LEAVE_S = 2.0  # the most that leaving waits for it
MAX_WAITING_IDS = 4096  # of one peer: what comes on top while it does not answer is not signed for


@dataclass
class _Batch:
    """Of one peer: what its receipt says so far, and what it does not say yet, by id: (served, trained)."""

    since: int
    served: int = 0
    trained: int = 0
    waiting: dict[bytes, tuple[int, int]] = field(default_factory=dict)


class ReceiptIssuer:
    """Of one client or trainer."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._board = Switchboard(host.network, CREDIT_PROTOCOL, host.hello, host.link_config)
        self._batches: dict[PeerId, _Batch] = {}
        self._tasks = Tasks("receipts", on_crash=host.link_config.supervisor.ends_conversation)
        self._issuing: set[PeerId] = set()
        self._leaving = asyncio.Event()

    def __repr__(self) -> str:
        waiting = sum(len(batch.waiting) for batch in self._batches.values())
        return f"<ReceiptIssuer for {len(self._batches)} peers, {waiting} ids wait>"

    def note(self, peer: PeerId, work: bytes, *, served: int = 0, trained: int = 0) -> None:
        """A peer did so much, in units times tokens, under this id."""
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
        """A session is over."""
        for (peer, session), unit_tokens in work.by_peer_and_session():
            self.note(peer, session, served=unit_tokens)

    async def close(self) -> None:
        """Sign for what is left, for a moment, and end."""
        self._leaving.set()
        try:
            await asyncio.wait_for(self._tasks.idle(), LEAVE_S)
        except asyncio.TimeoutError:
            log.info("left without all receipts given: %r", self)
        await self._tasks.close()
        await self._board.close()

    def _batch(self, peer: PeerId) -> _Batch:
        now, batch = int(self._host.clock.unix()), self._batches.get(peer)
        if batch is None or now - batch.since > MAX_BATCH_S // 2:
            since = now if batch is None else max(now, batch.since + 1)
            batch = self._batches[peer] = _Batch(since, waiting={} if batch is None else batch.waiting)
        return batch

    async def _issue(self, peer: PeerId) -> None:
        """Sign until nothing of this peer waits."""
        try:
            while waiting := self._batch(peer).waiting:
                if len(waiting) < MAX_WORK_IDS:
                    await self._gather()
                await self._sign(peer, self._batch(peer))
        except (PeerError, NetworkDown, asyncio.TimeoutError) as error:
            log.info("peer %s has no receipt from us: %s", peer, error or "no answer")
            del self._batches[peer]  # and what comes later begins anew, by a later time
        finally:
            self._issuing.discard(peer)

    async def _gather(self) -> None:
        """Until enough is done, or we leave."""
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
            pass  # END says all
        batch.served, batch.trained = served, trained
        for work in covered:
            batch.waiting.pop(work, None)
