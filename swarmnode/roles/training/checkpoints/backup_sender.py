"""Has other peers keep the states of units that too few nodes hold: in the background, and at once before this node leaves.

Whom it asks, and with which steps, is decided in `plan/training/backups.py`; what they do, in `backup_server.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import Callable

from swarmnode.codec.state_messages import BackUp, StateEntry
from swarmnode.errors import NetworkDown, PeerError, PeerRefused, ProtocolError
from swarmnode.net.interfaces import PeerId
from swarmnode.net.links.switchboard import Switchboard
from swarmnode.net.tasks import Tasks
from swarmnode.plan.training import backups
from swarmnode.roles.host import Host
from swarmnode.roles.question_server import ask
from swarmnode.roles.training.checkpoints.backup_server import BACKUP_PROTOCOL, PATIENCE_S, SLOWER
from swarmnode.swarm.records.announcement import Announcement
from swarmnode.swarm.records.run import encode_run
from swarmnode.swarm.storage.content import FileContent
from swarmnode.swarm.storage.states import StateStore

log = logging.getLogger(__name__)

LOOK_S = 2.0
REST_S = 30.0  # for a peer that did not take a state
HAND_OVER_S = 60.0  # before a node leaves, at most


class BackupSender:
    """Of a stage whose states are in `store()`. So many holders, or disks, are `wanted` for each unit; below 2 nothing is sent."""

    def __init__(self, host: Host, store: Callable[[], StateStore | None], wanted: int) -> None:
        assert host.swarm.manifest is not None
        self.sent_bytes = 0
        self._host = host
        self._units = host.swarm.manifest.model.units
        self._store = store
        self._wanted = wanted
        self._board = Switchboard(host.network, BACKUP_PROTOCOL, host.hello, host.link_config)
        self._there: dict[tuple[bytes, int, PeerId], int] = {}  # by run, block and disk: the newest step that is there
        self._first: tuple[bytes, float, int] | None = None  # run, time and newest step at the first look
        self._away = (b"", -1)  # run and step that were brought away last
        self._rests_until_s: dict[PeerId, float] = {}
        self._tasks = Tasks("backups", on_crash=host.supervisor.ends_peer)

    def __repr__(self) -> str:
        return f"<BackupSender, step {self._away[1]} is away, {self.sent_bytes / 1e6:.1f} MB sent>"

    def start(self) -> None:
        """Send in the background from now on."""
        if self._wanted > 1:
            self._tasks.spawn(self._send_forever(), "sends")

    async def close(self) -> None:
        """Send nothing any more."""
        await self._tasks.close()
        await self._board.close()

    async def hand_over(self) -> tuple[int, ...]:
        """Bring the newest state of what this node alone holds to another peer, as fast as it goes; the blocks that nobody took."""
        await self._tasks.close()
        store = self._store()
        step = None if store is None else store.newest()
        if store is None or not step or self._wanted < 2:
            return ()
        alone = {block: file for block, file in store.files(step).items() if self._lacking(block, wanted=2)}
        left = list(alone)

        async def send() -> None:
            for block, file in alone.items():  # a disk takes one after another
                if await self._send(store, step, block, file, count=1, rate_bps=0.0):
                    left.remove(block)

        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(send(), HAND_OVER_S)
        return tuple(left)

    # -- in the background

    async def _send_forever(self) -> None:
        while True:
            store = self._store()
            if store is not None:
                await self._send_newest(store)
            await asyncio.sleep(LOOK_S)

    async def _send_newest(self, store: StateStore) -> None:
        """The next step that is to be away, as far as somebody takes it; and the last one once more where its disks were lost."""
        run = store.run
        last = self._away[1] if self._away[0] == run.id else -1
        rate_bps, steps = self._rate_bps(), tuple(store.steps())
        late = self._late(store, rate_bps)
        step = backups.next_step(steps, last, run.checkpoint_steps, run.steps, late=late)
        if step is None:
            step = last
        for block, file in store.files(step).items():
            count = self._lacking(block, wanted=self._wanted)
            if count and not await self._send(store, step, block, file, count=count, rate_bps=rate_bps):
                return
        self._away = run.id, step

    def _late(self, store: StateStore, rate_bps: float) -> float:
        """How many checkpoints come while all that is scarce is brought away; infinite until one has come."""
        now_s, newest = asyncio.get_running_loop().time(), store.newest() or 0
        if self._first is None or self._first[0] != store.run.id:
            self._first = store.run.id, now_s, newest
        _, since_s, first = self._first
        passed = (newest - first) / store.run.checkpoint_steps
        scarce = [file.size for block, file in store.files(newest).items() if self._lacking(block, wanted=self._wanted)]
        return math.inf if passed < 1 else sum(scarce) * 8 / rate_bps * passed / (now_s - since_s)

    def _rate_bps(self) -> float:
        own = self._host.directory.own
        limiter = self._host.link_config.rate_limiter
        return backups.rate_bps(0.0 if own is None else own.up_bps, None if limiter is None else limiter.rate_bps)

    def _announced(self) -> list[Announcement]:
        shunned = self._host.standing.shunned
        return [one for peer, one in self._host.directory.peers().items() if peer not in shunned]

    def _lacking(self, block: int, *, wanted: int) -> int:
        return backups.lacking(self._announced(), self._host.peer_id, block, self._units, wanted)

    async def _send(
        self, store: StateStore, step: int, block: int, file: FileContent, *, count: int, rate_bps: float
    ) -> bool:
        """Have so many disks keep a block; whether they do."""
        now_s = asyncio.get_running_loop().time()
        announced, own = self._announced(), self._host.peer_id
        alive = backups.disks(announced, own, block, self._units, 0)
        there = [disk for disk in alive if self._there.get((store.run.id, block, disk)) == step]
        roomy = backups.disks(announced, own, block, self._units, file.size)
        for disk in roomy:
            if len(there) >= count:
                break
            if disk in there or self._rests_until_s.get(disk, 0.0) > now_s:
                continue
            if await self._ask(disk, store, StateEntry(step, block, file.size, file.root), rate_bps):
                self._there[store.run.id, block, disk] = step
                there.append(disk)
        return len(there) >= count

    async def _ask(self, disk: PeerId, store: StateStore, state: StateEntry, rate_bps: float) -> bool:
        """Whether a peer keeps this state."""
        pace_bps = max(backups.LEAST_BPS, rate_bps)
        within_s = PATIENCE_S + SLOWER * state.size * 8 / pace_bps
        question = BackUp(encode_run(store.run), state, rate_bps)
        try:
            async for _ in ask(self._board, disk, question, silence_s=within_s):
                raise ProtocolError("a peer answers something else than that it keeps a state", peer=disk)
        except (PeerError, NetworkDown) as error:
            retry_s = error.retry_s if isinstance(error, PeerRefused) else None
            self._rests_until_s[disk] = asyncio.get_running_loop().time() + max(REST_S, retry_s or 0.0)
            log.info("%s does not keep step %d of unit %d: %s", disk, state.step, state.block, error)
            return False
        self.sent_bytes += state.size
        return True
