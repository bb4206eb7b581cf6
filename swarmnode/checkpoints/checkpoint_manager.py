"""Checkpoint manager: a stage's states on its disk, served to other peers and fetched from them.

Training states that a peer serves to others: those of its stage, if it has one, and its backups of other peers' states.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Iterable
from dataclasses import KW_ONLY, dataclass
from functools import partial
from pathlib import Path

from torch import Tensor

from swarmnode.checkpoints.checkpoint_export import find_whole_step
from swarmnode.checkpoints.state_backups import BackupServer
from swarmnode.checkpoints.state_exchange import Fresh, StateServer, fetch_states, state_board
from swarmnode.checkpoints.votes import Electorate
from swarmnode.compute.executor import Executor, Urgency
from swarmnode.compute.training.device_learners import DeviceLearners
from swarmnode.compute.training.snapshot import read_step, write_step
from swarmnode.errors import LocalError
from swarmnode.ledger import Account, Full
from swarmnode.net.interfaces import PeerId
from swarmnode.peer.host import Host
from swarmnode.peer.questions import LocalPeer
from swarmnode.swarm.records.run import Run
from swarmnode.swarm.storage.chunk_folder import disk_error
from swarmnode.swarm.storage.state_store import OFFERED_SHARE, BackupFolder, StateStore, remove_old_runs, stored_runs

MAX_TOLD = 16


@dataclass(eq=False)
class CheckpointManager:
    """Manager of a stage's training states, of one run at a time: the latest run on this disk at first, later the current
    one.

    `blocks` are the stage's own. The disk may hold states of other blocks that the node held before. `electorate` returns the
    voters on fetched states.
    """

    peer: LocalPeer
    root: Path
    server: StateServer
    backups: BackupFolder | None = None
    _: KW_ONLY
    blocks: frozenset[int] = frozenset()
    electorate: Callable[[], Electorate] = Electorate

    def __post_init__(self) -> None:
        self._ledger = self.peer.link_config.ledger
        self._board = state_board(self.peer)
        self._fetching = asyncio.Lock()  # two fetches into one store would collide
        self.store: StateStore | None = None  # of the run; None before any run
        runs = stored_runs(self.root)
        if runs:
            self.open(runs[0])

    def __repr__(self) -> str:
        return f"<CheckpointManager of {self.store!r}>"

    @property
    def run(self) -> Run | None:
        """The run whose states are kept; None before any run."""
        return None if self.store is None else self.store.run

    def open(self, run: Run) -> None:
        """Keep the states of `run` from now on. Those of other runs are removed, except for the run that has come furthest."""
        if self.store is None or self.store.run != run:
            if self.store is not None:
                self.store.close()
            self.store = StateStore(self.root, run)
            self.server.give(self.store)  # other peers may need the states here before this stage is in a run again
            remove_old_runs(self.root, run)

    def stored_steps(self) -> tuple[int, ...]:
        """Return at most MAX_TOLD steps whose states of all `blocks` are on the disk, newest first."""
        if self.store is None:
            return ()
        whole = (step for step, blocks in self.store.steps().items() if self.blocks.issubset(blocks))
        return tuple(sorted(whole, reverse=True)[:MAX_TOLD])

    def give(self, fresh: Fresh) -> None:
        """Serve the states to peers. `fresh` writes a snapshot of the stage's step when a peer asks for a newer one (see
        `Fresh`)."""
        assert self.store is not None
        self.server.give(self.store, fresh)

    async def save(self, learner: DeviceLearners, executor: Executor) -> int:
        """Write the learner's current step to the disk, unless it is there, and return its number. Raises LocalError if the
        disk is full.

        The executor is free again once the state is copied. If the memory has no room for a copy, it waits for the disk.
        """
        assert self.store is not None
        try:
            memory = self._ledger.reserve(Account.CHECKPOINTS, learner.state_bytes)
        except Full:
            return await executor.call(Urgency.CONTROL, partial(_write_now, self.store, learner), kind="write states")
        with memory:
            copying = executor.call(Urgency.CONTROL, partial(_copy, self.store, learner), kind="copy states")
            step, states = await copying
            if states:
                await asyncio.to_thread(write_step, self.store, step, states)
        return step

    def load(self, learner: DeviceLearners, step: int) -> None:
        """Set the learner back to a step on the disk. Must run on the executor. Raises CheckpointError if the step is
        missing or damaged."""
        assert self.store is not None
        for block, tensors in read_step(self.store, step, learner.blocks).items():
            learner.load(block, tensors)
        learner.discard()
        learner.step = step

    async def fetch(self, peers: Callable[[], Iterable[PeerId]], blocks: Collection[int], *, at_least: int) -> int:
        """Fetch one step of `blocks` from the peers, not older than `at_least`, and return it.

        Raises PeerRefused if the peers have none, LocalError if the disk is full.
        """
        assert self.store is not None
        async with self._fetching:
            return await fetch_states(
                self._board, peers, blocks, into=self.store, at_least=at_least, electorate=self.electorate
            )

    def set_aside(self, step: int) -> None:
        """Treat the states of a step as missing from now on: they were fetched, and cannot be loaded."""
        assert self.store is not None
        for block in self.blocks:
            self.store.set_aside(step, block)

    async def restore(
        self,
        peers: Callable[[], Iterable[PeerId]],
        blocks: Collection[int],
        units: int,
        may_open: Callable[[], bool],
    ) -> int | None:
        """Fetch the newest step that is available for all layers, and keep the states of its run from now on.

        Args:
            peers: returns the peers to ask.
            blocks: the blocks to fetch.
            units: number of the model's layers.
            may_open: returns whether the states of another run may be kept instead of those of the present one.

        Returns:
            The step; None if there is none, if it is already here, or if it is of a run that may not be opened. Backups count.

        Raises:
            PeerRefused: if no peer sends a part in time, or the holders of a part do not agree.
            LocalError: if the disk is full, or the run's folder cannot be opened.
        """
        async with self._fetching:
            whole_step = await find_whole_step(self._board, peers, blocks, units, self.backups, self.electorate)
            if whole_step is None or (whole_step.run != self.run and not may_open()):
                return None
            self.open(whole_step.run)
            assert self.store is not None
            if set(blocks) <= set(self.store.files(whole_step.step)):
                return None
            return await fetch_states(
                self._board,
                peers,
                blocks,
                into=self.store,
                step=whole_step.step,
                backups=self.backups,
                electorate=self.electorate,
            )

    async def close(self) -> None:
        """Stop serving and fetching states."""
        self.server.give(None)
        await self._board.close()
        if self.store is not None:
            self.store.close()


def _copy(store: StateStore, learner: DeviceLearners) -> tuple[int, dict[int, dict[str, Tensor]]]:
    """Return the learner's step and a copy of its states; the copy is empty if the step is already on the disk."""
    return learner.step, {} if _is_stored(store, learner) else learner.copy_state()


def _write_now(store: StateStore, learner: DeviceLearners) -> int:
    if not _is_stored(store, learner):
        write_step(store, learner.step, {block: learner.state(block) for block in learner.blocks})
    return learner.step


def _is_stored(store: StateStore, learner: DeviceLearners) -> bool:
    return set(learner.blocks) <= set(store.files(learner.step))


log = logging.getLogger(__name__)


@dataclass(eq=False)
class SharedStates:
    """The state server and the backups of one peer, whatever the peer computes. Without a usable disk there are no backups."""

    state_server: StateServer
    backups: BackupFolder | None
    backup_server: BackupServer | None

    def __repr__(self) -> str:
        return f"<SharedStates {self.state_server!r}>"

    @classmethod
    async def start(cls, host: Host, *, share: float = OFFERED_SHARE) -> SharedStates:
        """Start serving states and taking backups; `share` of the lent disk space is for backups."""
        backups = await asyncio.to_thread(_open, host, share)
        backup_server = None if backups is None else BackupServer(host, backups)
        state_server = StateServer(host, backups)
        await state_server.serve()
        if backup_server is not None:
            await backup_server.start()
        return cls(state_server, backups, backup_server)

    async def close(self) -> None:
        """Stop serving states and taking backups."""
        if self.backup_server is not None:
            await self.backup_server.close()
        await self.state_server.close()
        if self.backups is not None:
            self.backups.close()


def _open(host: Host, share: float) -> BackupFolder | None:
    config = host.config
    try:
        return BackupFolder(config.home, host.swarm.id, config.max_cache_bytes, share=share)
    except OSError as error:
        log.warning("your node keeps no training states for others: %s", disk_error(config.home, error))
    except LocalError as error:
        log.warning("your node keeps no training states for others: %s", error)
    return None
