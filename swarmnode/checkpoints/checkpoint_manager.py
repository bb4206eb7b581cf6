"""Checkpoint manager: a stage's states on its disk, given to who asks for them, and fetched from others."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable
from dataclasses import KW_ONLY, dataclass
from functools import partial
from pathlib import Path

from torch import Tensor

from swarmnode.checkpoints.export import find_whole_step
from swarmnode.checkpoints.state_server import Fresh, StateServer
from swarmnode.checkpoints.states import fetch_states, state_board
from swarmnode.checkpoints.votes import Electorate
from swarmnode.compute.executor import Executor, Urgency
from swarmnode.compute.training.device_learners import DeviceLearners
from swarmnode.compute.training.snapshot import read_step, write_step
from swarmnode.ledger import Account, Full
from swarmnode.net.interfaces import PeerId
from swarmnode.peer.local_peer import LocalPeer
from swarmnode.swarm.records.run import Run
from swarmnode.swarm.storage.backups import BackupFolder
from swarmnode.swarm.storage.states import StateStore, remove_old_runs, stored_runs

MAX_TOLD = 16


@dataclass(eq=False)
class CheckpointManager:
    """Store of a stage's states, one at a time: that of the run in force, at the start of the latest run on this disk. `blocks` are
    the stage's own; what the node held before may be on the disk, too. `electorate`: whose word counts on what is fetched."""

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
        self._fetching = asyncio.Lock()  # two who fetch into one store would be in each other's way
        self.store: StateStore | None = None  # where the run's states are kept; None before any run
        runs = stored_runs(self.root)
        if runs:
            self.open(runs[0])

    def __repr__(self) -> str:
        return f"<CheckpointManager of {self.store!r}>"

    @property
    def run(self) -> Run | None:
        """The run whose states are kept."""
        return None if self.store is None else self.store.run

    def open(self, run: Run) -> None:
        """Keep the states of this run from now on."""
        if self.store is None or self.store.run != run:
            if self.store is not None:
                self.store.close()
            self.store = StateStore(self.root, run)
            self.server.give(self.store)  # others may need what is here before this stage is in a run again
            remove_old_runs(self.root, run)

    def kept(self) -> tuple[int, ...]:
        """Steps on the disk of which all blocks are there, newest first."""
        if self.store is None:
            return ()
        whole = (step for step, blocks in self.store.steps().items() if self.blocks.issubset(blocks))
        return tuple(sorted(whole, reverse=True)[:MAX_TOLD])

    def give(self, fresh: Fresh) -> None:
        """Give states to peers; `fresh` writes down the step that the stage is at, or is about to come to."""
        assert self.store is not None
        self.server.give(self.store, fresh)

    async def save(self, learner: DeviceLearners, executor: Executor) -> int:
        """Write down the learner's step, unless it is there; which one it is. Raises LocalError where the disk is full.

        The executor goes on as soon as the state is copied; where memory has no room for a copy, it waits for the disk.
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
        """Put the learner back to a step on the disk; on the executor. Raises CheckpointError."""
        assert self.store is not None
        for block, tensors in read_step(self.store, step, learner.blocks).items():
            learner.load(block, tensors)
        learner.discard()
        learner.step = step

    async def fetch(self, peers: Callable[[], Iterable[PeerId]], blocks: Collection[int], *, at_least: int) -> int:
        """Bring a step of these blocks from the peers; which one it is."""
        assert self.store is not None
        async with self._fetching:
            return await fetch_states(
                self._board, peers, blocks, into=self.store, at_least=at_least, electorate=self.electorate
            )

    async def restore(
        self,
        peers: Callable[[], Iterable[PeerId]],
        blocks: Collection[int],
        units: int,
    ) -> int | None:
        """Bring these blocks of the newest step of which all `units` are there, as backups if need be, and keep its run's
        states from now on; which step it is. None where there is none, or it is here. Raises PeerRefused, LocalError."""
        async with self._fetching:
            return await self._restore(peers, blocks, units)

    async def _restore(
        self,
        peers: Callable[[], Iterable[PeerId]],
        blocks: Collection[int],
        units: int,
    ) -> int | None:
        found = await find_whole_step(self._board, peers, blocks, units, self.backups, self.electorate)
        if found is None:
            return None
        self.open(found.run)
        assert self.store is not None
        if set(blocks) <= set(self.store.files(found.step)):
            return None
        return await fetch_states(
            self._board,
            peers,
            blocks,
            into=self.store,
            step=found.step,
            backups=self.backups,
            electorate=self.electorate,
        )

    async def close(self) -> None:
        """Stop giving and fetching."""
        self.server.give(None)
        await self._board.close()
        if self.store is not None:
            self.store.close()


def _copy(store: StateStore, learner: DeviceLearners) -> tuple[int, dict[int, dict[str, Tensor]]]:
    """The step that the learner is at and its states; none where that step is on the disk."""
    return learner.step, {} if _is_kept(store, learner) else learner.copy_state()


def _write_now(store: StateStore, learner: DeviceLearners) -> int:
    if not _is_kept(store, learner):
        write_step(store, learner.step, {block: learner.state(block) for block in learner.blocks})
    return learner.step


def _is_kept(store: StateStore, learner: DeviceLearners) -> bool:
    return set(learner.blocks) <= set(store.files(learner.step))
