"""Keeps training states of other peers on this disk (`protocol/frames.md`, "Backups").

A writer offers a state that it alone holds, or that too few hold. It is got from the writer itself, chunk by chunk, each checked,
and told to be here once it is on the disk. What the writer says of itself in the directory must fit: it holds the unit.
"""

from __future__ import annotations

import asyncio
import logging

from swarmnode.codec.messages import End, Error
from swarmnode.codec.state_messages import BackUp, StateEntry
from swarmnode.errors import Busy, ErrorCode, LocalError, PeerLost, ProtocolError, SwarmnodeError, refusal
from swarmnode.net.interfaces import PeerId
from swarmnode.net.limits.address_group import Claimant
from swarmnode.net.tasks import Tasks
from swarmnode.plan.training.backups import LEAST_BPS, holds
from swarmnode.roles.fetching.sources import PeerSource
from swarmnode.roles.host import Host
from swarmnode.roles.question_server import Answer, QuestionServer
from swarmnode.roles.training.checkpoints.backup_places import RETRY_S, BackupPlaces
from swarmnode.roles.training.checkpoints.states import file_of, state_board
from swarmnode.swarm.records.run import decode_run
from swarmnode.swarm.records.sections import DiskOffer
from swarmnode.swarm.storage.backups import BackupFolder
from swarmnode.swarm.storage.chunk_folder import ChunkFolder, disk_error
from swarmnode.swarm.storage.content import FileContent, verify_chunk, verify_hashes
from swarmnode.swarm.storage.states import StateStore

log = logging.getLogger(__name__)

BACKUP_PROTOCOL = "/swarmnode/backup/1"
FULL_RETRY_S = 600.0
PATIENCE_S, SLOWER = 60.0, 4.0  # for a state: so long, and so many times what its rate asks for


class BackupServer:
    """Of one node. `folder` is what it keeps, and offers room in by its announcement."""

    def __init__(self, host: Host, folder: BackupFolder) -> None:
        self.kept_bytes = 0  # that came, since the start
        self._host = host
        self._folder = folder
        self._board = state_board(host.network, host.hello, host.link_config)
        self._places = BackupPlaces(host.clock.monotonic)
        self._tasks = Tasks("backups of others", on_crash=None)
        self._server = QuestionServer(host.network, BACKUP_PROTOCOL, host.hello, host.link_config, BackUp, self._answer)

    def __repr__(self) -> str:
        return f"<BackupServer {self._folder!r}, {self._places!r}>"

    async def start(self) -> None:
        """Take states from now on."""
        await self._server.start()
        await self._offer()

    async def close(self) -> None:
        """Take none any more."""
        await self._server.close()
        await self._tasks.close()
        await self._board.close()

    async def _offer(self) -> None:
        """Say how much room there is."""
        try:
            free_bytes = await asyncio.to_thread(lambda: self._folder.free_bytes)
        except OSError as error:
            log.warning("%s", disk_error(self._host.config.home, error))
            free_bytes = 0
        self._host.directory.announce(DiskOffer(backup_bytes=free_bytes))

    async def _answer(self, writer: Claimant, question: BackUp) -> Answer:
        try:
            await self._take_turn(writer, question)
        except LocalError as error:
            log.warning("a state of %s is not kept: %s", writer.peer, error)
            return Answer(Error(ErrorCode.BUSY, FULL_RETRY_S))
        except SwarmnodeError as error:
            log.info("a state of %s is not kept: %s", writer.peer, error)
            return Answer(Error(error.code, error.retry_s) if isinstance(error, Busy) else Error(error.code))
        return Answer(End())

    async def _take_turn(self, writer: Claimant, question: BackUp) -> None:
        """As far as it comes while it is this writer's turn; what has come stays. Raises as `_take`."""
        turn = self._places.take(writer)
        taking = self._tasks.spawn(self._take(writer.peer, question), f"from {writer.peer}", awaited=True)
        turn.give_way = taking.cancel
        try:
            await taking
        except asyncio.CancelledError:
            if not turn.over:
                raise
            raise Busy("it is another peer's turn", retry_s=RETRY_S) from None
        finally:
            self._places.leave(turn)
            await self._offer()

    async def _take(self, writer: PeerId, question: BackUp) -> None:
        """Have the state here. Raises PeerError, Busy, LocalError."""
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
            raise PeerLost(f"peer {writer} gives its state too slowly", peer=writer) from None
        except OSError as error:
            raise disk_error(self._host.config.home, error) from error

    def _check(self, writer: PeerId, state: StateEntry) -> None:
        """Raises PeerRefused where the swarm does not know the writer as a holder of the unit."""
        manifest, directory = self._host.swarm.manifest, self._host.directory
        assert manifest is not None
        # Who leaves is suspected by those who worked with it, and hands over what it has nevertheless.
        announced = directory.peers().get(writer) or directory.suspects().get(writer)
        if announced is None or not holds(announced, state.block, manifest.model.units):
            raise refusal(ErrorCode.WRONG_SPAN, peer=writer)

    async def _bring(self, writer: PeerId, store: StateStore, state: StateEntry, rate_bps: float) -> None:
        """Every chunk of the state, in order, no faster than asked."""
        file, source = file_of(state.block, (state.size, state.root)), PeerSource(self._board, writer)
        incoming = store.incoming(state.step)
        hashes = bytes(await source.hashes(file))
        if not verify_hashes(file, hashes):
            raise ProtocolError(f"peer {writer} gives hashes that are not those of its state", peer=writer)
        await asyncio.to_thread(incoming.keep_hashes, file, hashes)
        for number in await asyncio.to_thread(incoming.missing, file, range(file.chunks())):
            began_s = asyncio.get_running_loop().time()
            await self._bring_chunk(source, incoming, file, hashes, number)
            if rate_bps:
                due_s = began_s + file.chunk_size(number) * 8 / rate_bps
                await asyncio.sleep(due_s - asyncio.get_running_loop().time())
        await asyncio.to_thread(store.take_in, state.step, {state.block: file})
        self.kept_bytes += file.size

    async def _bring_chunk(
        self, source: PeerSource, incoming: ChunkFolder, file: FileContent, hashes: bytes, number: int
    ) -> None:
        async for _, chunk in source.chunks(file, number, 1):
            if not verify_chunk(hashes, number, bytes(chunk)):
                raise ProtocolError(f"peer {source.name} gives a false chunk of its state", peer=source.name)
            await asyncio.to_thread(incoming.write, file, number, bytes(chunk))
