"""Priorities: who may have more of a device's time, since a node of theirs served others (`create --priority credit`)."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import NamedTuple

from swarmnode.codec.credit_messages import CreditClaim
from swarmnode.codec.messages import End, Error
from swarmnode.errors import ProtocolError
from swarmnode.net.identity import verify
from swarmnode.net.interfaces import PeerId
from swarmnode.net.limits.address_group import Claimant
from swarmnode.plan.credit import credit_of, weight_of
from swarmnode.roles.host import Host
from swarmnode.roles.question_server import Answer, QuestionServer
from swarmnode.swarm.records.receipt import Receipt, open_receipt
from swarmnode.swarm.records.voucher import Voucher, open_voucher
from swarmnode.swarm.storage.receipt_folder import counts

log = logging.getLogger(__name__)

CLAIM_PROTOCOL = "/swarmnode/claim/1"
MAX_WORKERS = 1024  # whose credit is remembered; who has least goes first


class _Lent(NamedTuple):
    client: PeerId
    weight: float
    until: int


class Priorities:
    """Of one node. A worker's credit is for one client at a time: the one whose claim came last."""

    def __init__(self, host: Host) -> None:
        assert host.swarm.manifest is not None
        self._units = host.swarm.manifest.model.units
        self._swarm = host.swarm.id
        self._now = host.clock.unix
        self._lent: dict[PeerId, _Lent] = {}
        self._server = QuestionServer(
            host.network, CLAIM_PROTOCOL, host.hello, host.link_config, CreditClaim, self._answer
        )

    def __repr__(self) -> str:
        return f"<Priorities of {len(self._lent)} workers>"

    def weight(self, client: PeerId) -> float:
        """How many times as much time as others it may have."""
        now = self._now()
        return max(
            (lent.weight for lent in self._lent.values() if lent.client == client and lent.until >= now), default=1.0
        )

    async def start(self) -> None:
        """Take claims from now on."""
        await self._server.start()

    async def close(self) -> None:
        """Take none any more."""
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
        """Whose credit is over, or else the least: workers that somebody invented have none."""
        now = self._now()
        return min(self._lent, key=lambda worker: (self._lent[worker].until >= now, self._lent[worker].weight))

    def _open(self, claim: CreditClaim) -> tuple[Voucher, list[Receipt]]:
        """What of a claim holds; 65 signatures at most. Raises ProtocolError where the voucher does not."""
        now = self._now()
        voucher = open_voucher(claim.voucher, self._swarm, verify, now)
        receipts = []
        for raw in claim.receipts:
            with contextlib.suppress(ProtocolError):
                receipts.append(open_receipt(raw, self._swarm, verify))
        return voucher, [one for one in receipts if one.worker == voucher.worker and counts(one, now)]
