"""Backups: training states of other peers on this disk, and this node's states on others' (`protocol/frames.md`,
"Backups").

A writer offers a state that too few peers hold. The disk's node fetches it from the writer chunk by chunk, verifies each
chunk, and answers once the state is on the disk. It refuses a writer whose announcement does not include the layer.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass

from swarmnode.checkpoints.state_exchange import file_of, state_board
from swarmnode.codec.messages import BackUp, End, Error, StateEntry
from swarmnode.errors import (
    Busy,
    ErrorCode,
    LocalError,
    NetworkDown,
    PeerError,
    PeerLost,
    PeerRefused,
    ProtocolError,
    SwarmnodeError,
    refusal,
)
from swarmnode.net.addressing.addresses import Claimant, owner_of
from swarmnode.net.interfaces import PeerId
from swarmnode.net.tasks import Tasks
from swarmnode.peer.host import Host
from swarmnode.peer.questions import Answer, QuestionServer, ask, board_of
from swarmnode.plan.training import backups
from swarmnode.plan.training.backups import LEAST_BPS, holds
from swarmnode.swarm.records.announcement import Announcement, DiskOffer
from swarmnode.swarm.records.run import decode_run, encode_run
from swarmnode.swarm.storage.chunk_folder import ChunkFolder, disk_error
from swarmnode.swarm.storage.content import FileContent, verify_chunk, verify_hashes
from swarmnode.swarm.storage.state_store import BackupFolder, StateStore
from swarmnode.weights.sources import PeerSource

log = logging.getLogger(__name__)

LOOK_S = 2.0
REST_S = 30.0  # for a peer that refused a state
HAND_OVER_S = 60.0  # longest time that a leaving node spends on it
BACKUP_PROTOCOL = "/swarmnode/backup/1"
FULL_RETRY_S = 600.0
# time limit for a state: these seconds, and this many times its duration at the agreed rate
PATIENCE_S, SLOWER = 60.0, 4.0
AT_ONCE = 4
TURN_S = 60.0
RETRY_S = 10.0  # before a waiting owner asks again
WAITS_S = 120.0  # since the last request of an owner; after that its place in the queue is lost
MAX_WAITING = 256


@dataclass(eq=False)
class BackupTurn:
    """Place of an owner that sends a state. `give_way` is called when the place goes to another owner; then `over` is set."""

    owner: str
    since_s: float
    give_way: Callable[[], object] = bool
    over: bool = False


class BackupPlaces:
    """The AT_ONCE places for states that arrive at the same time, shared out fairly among owners. `clock`: in seconds,
    monotonic."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._turns: list[BackupTurn] = []  # in order of their start
        self._waiting: dict[str, float] = {}  # time of an owner's last request, the longest waiting first

    def admit(self, claimant: Claimant) -> BackupTurn:
        """Take a place for `claimant`, if need be from an owner whose turn is over.

        Raises Busy if no place is free and no turn is over, or if other owners have waited longer.
        """
        now_s, owner = self._clock(), owner_of(claimant)
        self._waiting = {other: asked_s for other, asked_s in self._waiting.items() if asked_s + WAITS_S > now_s}
        ready = [*[None] * (AT_ONCE - len(self._turns)), *self._due(owner, now_s)]
        ahead = list(self._waiting).index(owner) if owner in self._waiting else len(self._waiting)
        if ahead >= len(ready):
            if owner in self._waiting or len(self._waiting) < MAX_WAITING:
                self._waiting[owner] = now_s
            raise Busy("this node is receiving states of other peers", retry_s=RETRY_S)
        self._waiting.pop(owner, None)
        leaving = ready[0]
        if leaving is not None:
            self.leave(leaving)
            leaving.over = True
            leaving.give_way()
        turn = BackupTurn(owner, now_s)
        self._turns.append(turn)
        return turn

    def leave(self, turn: BackupTurn) -> None:
        """Free the place of `turn`. Does nothing if it was taken away before."""
        if turn in self._turns:
            self._turns.remove(turn)

    def _due(self, owner: str, now_s: float) -> list[BackupTurn]:
        """Return the turns that must give way to `owner`: turns longer than TURN_S, and further turns of an owner. The list
        is empty if `owner` has a turn itself."""
        owners = [turn.owner for turn in self._turns]
        return [
            turn
            for number, turn in enumerate(self._turns)
            if owner not in owners and (turn.since_s + TURN_S <= now_s or turn.owner in owners[:number])
        ]


class BackupServer:
    """Server that keeps other peers' states in `folder`, and announces how much room is left there."""

    def __init__(self, host: Host, folder: BackupFolder) -> None:
        self.received_bytes = 0  # received since the start
        self._host = host
        self._folder = folder
        self._board = state_board(host)
        self._places = BackupPlaces(host.clock.monotonic)
        self._tasks = Tasks("backups of others", on_crash=None)
        self._server = QuestionServer(host, BACKUP_PROTOCOL, BackUp, self._answer)

    async def start(self) -> None:
        """Start taking states, and announce the free room."""
        await self._server.start()
        await self._offer()

    async def close(self) -> None:
        """Stop accepting other peers' training states."""
        await self._server.close()
        await self._tasks.close()
        await self._board.close()

    async def _offer(self) -> None:
        """Announce the free room for backups; 0 if the disk cannot be read."""
        try:
            free_bytes = await asyncio.to_thread(lambda: self._folder.free_bytes)
        except OSError as error:
            log.warning("%s", disk_error(self._host.config.home, error))
            free_bytes = 0
        self._host.directory.announce(DiskOffer(backup_bytes=free_bytes))

    async def _answer(self, writer: Claimant, question: BackUp) -> Answer:
        try:
            await self._receive_in_turn(writer, question)
        except LocalError as error:
            log.warning("your node does not keep a state of peer %s: %s", writer.peer, error)
            return Answer(Error(ErrorCode.BUSY, FULL_RETRY_S))
        except SwarmnodeError as error:
            log.info("your node does not keep a state of peer %s: %s", writer.peer, error)
            return Answer(Error(error.code, error.retry_s) if isinstance(error, Busy) else Error(error.code))
        return Answer(End())

    async def _receive_in_turn(self, writer: Claimant, question: BackUp) -> None:
        """Take the state for as long as the writer's turn lasts. Chunks that arrived stay on the disk.

        Raises Busy if there is no place or another owner takes it over; otherwise raises as `_receive`.
        """
        turn = self._places.admit(writer)
        taking = self._tasks.spawn(self._receive(writer.peer, question), f"from {writer.peer}", awaited=True)
        turn.give_way = taking.cancel
        try:
            await taking
        except asyncio.CancelledError:
            if not turn.over:
                raise
            raise Busy("another peer has taken over the place", retry_s=RETRY_S) from None
        finally:
            self._places.leave(turn)
            await self._offer()

    async def _receive(self, writer: PeerId, question: BackUp) -> None:
        """Fetch the state from the writer, unless it is already here.

        Raises PeerError if the writer fails, is slow or lies, Busy if there is no room, LocalError if the disk fails.
        """
        run, state = decode_run(question.run), question.state
        self._check(writer, state)
        try:
            store = await asyncio.to_thread(self._folder.open, writer, run, state.size)
            here = store.files(state.step).get(state.block)
            if here is not None and here.root == state.root:
                return
            pace_bps = max(LEAST_BPS, question.rate_bps)
            within_s = PATIENCE_S + SLOWER * state.size * 8 / pace_bps
            await asyncio.wait_for(self._bring(writer, store, state, question.rate_bps), within_s)
        except asyncio.TimeoutError:
            raise PeerLost(f"peer {writer} sends its state too slowly", peer=writer) from None
        except OSError as error:
            raise disk_error(self._host.config.home, error) from error

    def _check(self, writer: PeerId, state: StateEntry) -> None:
        """Raise PeerRefused unless the directory knows the writer as a holder of the state's layer."""
        manifest, directory = self._host.swarm.manifest, self._host.directory
        assert manifest is not None
        # A leaving node is under suspicion of the peers that worked with it, yet hands over its states.
        announced = directory.peers().get(writer) or directory.suspects().get(writer)
        if announced is None or not holds(announced, state.block, manifest.model.units):
            raise refusal(ErrorCode.WRONG_SPAN, peer=writer)

    async def _bring(self, writer: PeerId, store: StateStore, state: StateEntry, rate_bps: float) -> None:
        """Fetch every missing chunk of the state in order, at most at `rate_bps` (0: unlimited), and store it.

        Raises ProtocolError if the writer sends false hashes or chunks.
        """
        file, source = file_of(state.block, (state.size, state.root)), PeerSource(self._board, writer)
        incoming = store.incoming(state.step)
        hashes = bytes(await source.hashes(file))
        if not verify_hashes(file, hashes):
            raise ProtocolError("it sends hashes that do not match its state", peer=writer)
        await asyncio.to_thread(incoming.store_hashes, file, hashes)
        for number in await asyncio.to_thread(incoming.missing, file, range(file.chunks())):
            began_s = asyncio.get_running_loop().time()
            await self._bring_chunk(source, incoming, file, hashes, number)
            if rate_bps:
                due_s = began_s + file.chunk_size(number) * 8 / rate_bps
                await asyncio.sleep(due_s - asyncio.get_running_loop().time())
        await asyncio.to_thread(store.complete, state.step, {state.block: file})
        self.received_bytes += file.size

    async def _bring_chunk(
        self, source: PeerSource, incoming: ChunkFolder, file: FileContent, hashes: bytes, number: int
    ) -> None:
        async for _, chunk in source.chunks(file, number, 1):
            if not verify_chunk(hashes, number, bytes(chunk)):
                raise ProtocolError("it sends a false chunk of its state", peer=source.name)
            await asyncio.to_thread(incoming.write, file, number, bytes(chunk))


class BackupSender:
    """Sender of a stage's states to other peers' disks, in the background.

    `store()` returns the stage's states, or None. Each layer should have `wanted` holders or disks; below 2 nothing is sent.
    """

    def __init__(self, host: Host, store: Callable[[], StateStore | None], wanted: int) -> None:
        assert host.swarm.manifest is not None
        self.sent_bytes = 0
        self._host = host
        self._units = host.swarm.manifest.model.units
        self._store = store
        self._wanted = wanted
        self._board = board_of(host, BACKUP_PROTOCOL)
        self._there: dict[tuple[bytes, int, PeerId], int] = {}  # newest step on a disk, by run, block and disk
        self._first: tuple[bytes, float, int] | None = None  # run, time and newest step at the first look
        self._away = (b"", -1)  # run and step that were backed up last
        self._rests_until_s: dict[PeerId, float] = {}
        self._tasks = Tasks("backups", on_crash=host.supervisor.ends_peer)

    def start(self) -> None:
        """Start sending in the background, if `wanted` is at least 2."""
        if self._wanted > 1:
            self._tasks.spawn(self._send_forever(), "sends")

    async def close(self) -> None:
        """Stop sending this node's training states to other peers."""
        await self._tasks.close()
        await self._board.close()

    async def hand_over(self) -> tuple[int, ...]:
        """Send the newest state of each block that no other peer has to one other disk, as fast as possible, for at most
        HAND_OVER_S.

        Returns the blocks that no peer took; empty if `wanted` is below 2 or there is nothing to save.
        """
        await self._tasks.close()
        store = self._store()
        step = None if store is None else store.newest()
        if store is None or not step or self._wanted < 2:
            return ()
        alone = {block: file for block, file in store.files(step).items() if self._lacking(block, wanted=2)}
        left = list(alone)

        async def send() -> None:
            for block, file in alone.items():  # a disk takes them one after another
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
        """Back up the next step that is due, or, if none is due, the last one again in case its disks were lost. Stops at
        the first block that not enough disks take."""
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
        """Estimate how many checkpoints are made while all scarce blocks are sent; infinite until one was made since the
        first look."""
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
        """Ask peers with free disk space to keep the state of `block` at `step`, until `count` have it. Returns whether they do."""
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
        """Ask a peer to keep this state. Returns whether it does; if not, the peer is not asked again for a while.
        Any failure, even a wrong answer (ProtocolError), counts as a refusal."""
        pace_bps = max(backups.LEAST_BPS, rate_bps)
        within_s = PATIENCE_S + SLOWER * state.size * 8 / pace_bps
        question = BackUp(encode_run(store.run), state, rate_bps)
        try:
            async for _ in ask(self._board, disk, question, silence_s=within_s):
                raise ProtocolError("it answered a backup with something other than END", peer=disk)
        except (PeerError, NetworkDown) as error:
            retry_s = error.retry_s if isinstance(error, PeerRefused) else None
            self._rests_until_s[disk] = asyncio.get_running_loop().time() + max(REST_S, retry_s or 0.0)
            log.info("peer %s does not keep a backup of step %d of layer %d: %s", disk, state.step, state.block, error)
            return False
        self.sent_bytes += state.size
        return True
