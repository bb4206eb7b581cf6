"""State server: it sends the training states on this disk to any peer that asks (`protocol/frames.md`, "A state's way")."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from itertools import islice
from pathlib import Path

from swarmnode.codec.body import Body
from swarmnode.codec.messages import MAX_ENTRIES, MAX_LISTED, GetChunks, ListStates, StateEntry, States
from swarmnode.errors import ErrorCode, SwarmnodeError
from swarmnode.links.switchboard import Channel
from swarmnode.peer.questions import LocalPeer
from swarmnode.swarm.records.run import Run, encode_run
from swarmnode.swarm.storage.content import FileContent
from swarmnode.swarm.storage.states import BackupFolder, StateStore
from swarmnode.weights.chunk_server import ChunkServer, Offer

log = logging.getLogger(__name__)

STATE_PROTOCOL = "/swarmnode/state/1"
HOLD_S = 60.0  # a requested step is kept for this time
FRESH_EVERY_S = 1.0  # shortest time between two snapshots that peers ask for
FRESH_SHARE = 0.05  # largest share of the time for snapshots that peers ask for; any peer may ask

Fresh = Callable[[int], Awaitable[int]]
"""Function (at_least) that writes a snapshot of the stage's step to the disk, unless it is there, and returns the step.

If the stage reaches the step `at_least` soon, it waits for that one. Raises LocalError if there is nothing to write.
"""


class StateServer(ChunkServer):
    """Server of this node's own training states, set by `give`, and of the `backups` that it keeps for other peers."""

    questions = (ListStates,)

    def __init__(self, peer: LocalPeer, backups: BackupFolder | None = None) -> None:
        super().__init__(peer, (STATE_PROTOCOL,))
        self._backups = backups
        self._store: StateStore | None = None
        self._fresh: Fresh | None = None
        self._refreshing: asyncio.Task[None] | None = None
        self._fresh_again_at = 0.0

    def give(self, store: StateStore | None, fresh: Fresh | None = None) -> None:
        """Serve the states of `store` instead of those of the previous one; None serves no own states. `fresh` makes
        snapshots for peers that ask for a newer step than the disk has."""
        self._store, self._fresh = store, fresh
        self._forget_offers()

    async def _send(self, channel: Channel, body: Body) -> ErrorCode | None:
        if isinstance(body, ListStates):
            await self._list(channel, body)
            return None
        assert isinstance(body, GetChunks)
        self._offer(body.root)
        return await super()._send(channel, body)

    # -- listings

    async def _list(self, channel: Channel, question: ListStates) -> None:
        """Send the list of states that the question asks for, newest step first, after a snapshot if it asks for a newer step.
        If there are more than MAX_LISTED, the oldest are left out."""
        run = self._run_asked_for(question)
        if self._store is not None and self._store.run == run:
            await self._make_fresh(self._store, question.at_least)
        self._forget_offers()
        entries = () if run is None else self._entries(run)
        wanted = (entry for entry in entries if not question.blocks or entry.block in question.blocks)
        listed = tuple(islice(wanted, MAX_LISTED))
        encoded = b"" if run is None else encode_run(run)
        for first in range(0, max(1, len(listed)), MAX_ENTRIES):
            channel.send(States(encoded, listed[first : first + MAX_ENTRIES]))
            await channel.drain()

    def _run_asked_for(self, question: ListStates) -> Run | None:
        """Return the run that the question names, if states of it are here, else None.

        A question that names no run gets the stage's run, else the run of most backups, else None.
        """
        own = None if self._store is None else self._store.run
        if not question.run:
            return own or (None if self._backups is None else self._backups.run())
        if own is not None and own.id == question.run:
            return own
        kept = None if self._backups is None else next(self._backups.of_run(question.run), None)
        return None if kept is None else kept.run

    def _entries(self, run: Run) -> list[StateEntry]:
        """Return the entries of all states of a run on this disk, newest step first."""
        own = [] if self._store is None or self._store.run != run else listed_of(self._store)
        kept = [] if self._backups is None else self._backups.of_run(run.id)
        backups = [entry for store in kept for entry in listed_of(store, backup=True)]
        return sorted([*own, *backups], key=lambda entry: -entry.step)

    async def _make_fresh(self, store: StateStore, at_least: int) -> None:
        """Make a snapshot if the newest step is older than `at_least`, and keep the newest step for HOLD_S."""
        newest = store.newest()
        if newest is None or newest < at_least:
            await self._refresh(at_least)
        newest = store.newest()
        if newest is not None:
            store.hold(newest, HOLD_S)

    async def _refresh(self, at_least: int) -> None:
        """Write a snapshot of the training state of step `at_least` or later. Requests that arrive meanwhile wait for the same
        snapshot."""
        if self._refreshing is None or self._refreshing.done():
            self._refreshing = self._tasks.spawn(self._make_snapshot(at_least), "snapshot")
        await asyncio.shield(self._refreshing)

    async def _make_snapshot(self, at_least: int) -> None:
        loop = asyncio.get_running_loop()
        await asyncio.sleep(self._fresh_again_at - loop.time())
        began_s = loop.time()
        try:
            if self._fresh is not None:
                await self._fresh(at_least)
        except SwarmnodeError as error:
            log.warning("your node cannot make a snapshot for a peer: %s", error)
        took_s = loop.time() - began_s
        self._fresh_again_at = loop.time() + max(FRESH_EVERY_S, took_s / FRESH_SHARE)

    # -- chunks

    def _offer(self, root: bytes) -> None:
        """Put the file with this root on offer and keep its step for HOLD_S; if it is gone, withdraw it."""
        found = self._find(root)
        if found is None:
            self._offers.pop(root, None)
            return
        store, step, _block, file, path = found
        store.hold(step, HOLD_S)
        self._offers.setdefault(root, Offer(file, path))

    def _find(self, root: bytes) -> tuple[StateStore, int, int, FileContent, Path] | None:
        """Find the file with this root among the stage's own states and the backups. Returns None if it is not here."""
        found = None if self._store is None else self._store.find(root)
        if self._store is not None and found is not None:
            return self._store, *found
        return None if self._backups is None else self._backups.find(root)

    def _forget_offers(self) -> None:
        """Offer the states of removed steps to other peers no longer."""
        for root in [root for root in self._offers if self._find(root) is None]:
            del self._offers[root]
            self._hashing.pop(root, None)

    def _withdraw(self, offer: Offer, reason: str) -> None:
        super()._withdraw(offer, reason)
        found = self._find(offer.file.root)
        if found is not None:
            store, step, block, _file, _path = found
            store.set_aside(step, block)


def listed_of(store: StateStore, *, backup: bool = False) -> list[StateEntry]:
    """Return entries for all training states in a store. `backup` marks them as kept for another peer."""
    return [
        StateEntry(step, block, file.size, file.root, backup)
        for step in store.steps()
        for block, file in store.files(step).items()
    ]
