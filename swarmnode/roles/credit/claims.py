"""Claims: a client shows whom it asks what a node of its home is credited, where that has priority."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterable, Iterator
from pathlib import Path

from swarmnode.codec.credit_messages import MAX_CLAIMED, CreditClaim
from swarmnode.errors import LocalError, NetworkDown, PeerError
from swarmnode.net.identity import Identity, verify
from swarmnode.net.interfaces import PeerId
from swarmnode.net.links.switchboard import Switchboard
from swarmnode.net.tasks import Tasks
from swarmnode.plan.credit import credit_of
from swarmnode.roles.credit.priorities import CLAIM_PROTOCOL
from swarmnode.roles.host import Host
from swarmnode.roles.question_server import ask
from swarmnode.swarm.records.manifest import CREDIT
from swarmnode.swarm.records.receipt import Receipt
from swarmnode.swarm.records.voucher import Voucher, sign_voucher
from swarmnode.swarm.storage.receipt_folder import counts, receipts_of, signed_receipts

log = logging.getLogger(__name__)

AGAIN_S = 3600.0
LIFE_S = 7200
ANSWER_S = 5.0


class Claims:
    """Of one client. `show` is called for whoever is about to be asked; nothing waits for it."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._board = Switchboard(host.network, CLAIM_PROTOCOL, host.hello, host.link_config)
        self._shown_s: dict[PeerId, float] = {}
        self._tasks = Tasks("claims", on_crash=host.link_config.supervisor.ends_conversation)

    def __repr__(self) -> str:
        return f"<Claims shown to {len(self._shown_s)} peers>"

    def show(self, peers: Iterable[PeerId]) -> None:
        """Let these peers know, unless they did lately."""
        manifest, now_s = self._host.swarm.manifest, self._host.clock.monotonic()
        if manifest is None or manifest.priority != CREDIT:
            return
        new = [peer for peer in peers if now_s - self._shown_s.get(peer, -AGAIN_S) >= AGAIN_S]
        if new:
            self._shown_s.update(dict.fromkeys(new, now_s))
            self._tasks.spawn(self._show(new), f"to {len(new)} peers")

    async def shown(self) -> None:
        """Wait until all have heard who can."""
        await self._tasks.idle()

    async def close(self) -> None:
        """Give up what is under way."""
        await self._tasks.close()
        await self._board.close()

    async def _show(self, peers: list[PeerId]) -> None:
        claim = await asyncio.to_thread(self._claim)
        if claim is not None:
            await asyncio.gather(*(self._tell(peer, claim) for peer in peers))

    async def _tell(self, peer: PeerId, claim: CreditClaim) -> None:
        try:
            async for _ in ask(self._board, peer, claim, silence_s=ANSWER_S):
                pass  # END says all
        except (PeerError, NetworkDown) as error:
            log.info("peer %s does not know what our node is credited: %s", peer, error)

    def _claim(self) -> CreditClaim | None:
        """Of the node of this home that has most; None where none has any."""
        home, swarm, now = self._host.config.home, self._host.swarm.id, self._host.clock.unix()
        claims = []
        for node in _nodes(home):
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


def _nodes(home: Path) -> Iterator[Identity]:
    """The identities under which nodes of this home run."""
    for path in sorted(home.glob("node*.key")):
        with contextlib.suppress(OSError, LocalError):
            yield Identity.from_bytes(path.read_bytes())


def _worth_most(found: list[tuple[Receipt, bytes]]) -> list[tuple[Receipt, bytes]]:
    """As many as a claim holds: those of many clients count more than many of one."""
    found.sort(key=lambda one: -(one[0].served + one[0].trained))
    first = {receipt.client: (receipt, raw) for receipt, raw in reversed(found)}
    rest = [one for one in found if first[one[0].client][1] != one[1]]
    largest = sorted(first.values(), key=lambda one: -(one[0].served + one[0].trained))
    return [*largest, *rest][:MAX_CLAIMED]
