"""Gives the training states that this node has on its disk to whoever asks (`protocol/frames.md`, "A state's way")."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from itertools import islice

from swarmnode.codec.messages import Body, GetChunks, Hello
from swarmnode.codec.state_messages import MAX_ENTRIES, MAX_LISTED, ListStates, StateEntry, States
from swarmnode.errors import ErrorCode, SwarmnodeError
from swarmnode.net.interfaces import Network
from swarmnode.net.links.link import LinkConfig
from swarmnode.net.links.switchboard import Channel
from swarmnode.roles.fetching.chunk_server import ChunkServer, Offer
from swarmnode.swarm.records.run import encode_run
from swarmnode.swarm.storage.states import StateStore

log = logging.getLogger(__name__)

STATE_PROTOCOL = "/swarmnode/state/1"
HOLD_S = 60.0  # a step that was asked for stays for so long
FRESH_EVERY_S = 1.0  # at most this often a snapshot is made because somebody asks
FRESH_SHARE = 0.05  # of the time, whoever asks: anybody may

Fresh = Callable[[int], Awaitable[int]]
"""(at_least): see `StateServer`"""


class StateServer(ChunkServer):
    """Answers for one store. `fresh` writes down the step that the node is at, unless it is there, and returns it; the step that is
    asked for, where the node is about to come to it."""

    questions = (ListStates,)

    def __init__(
        self,
        network: Network,
        hello: Hello,
        link_config: LinkConfig,
        store: StateStore,
        fresh: Fresh,
    ) -> None:
        super().__init__(network, (STATE_PROTOCOL,), hello, link_config)
        self._store = store
        self._fresh = fresh
        self._refreshing: asyncio.Task[None] | None = None
        self._fresh_again_at = 0.0

    def __repr__(self) -> str:
        return f"<StateServer of {self._store!r}, {len(self._askers)} peers asking>"

    @classmethod
    async def start(
        cls,
        network: Network,
        hello: Hello,
        link_config: LinkConfig,
        store: StateStore,
        fresh: Fresh,
    ) -> StateServer:
        """Serve the store from now on."""
        server = cls(network, hello, link_config, store, fresh)
        await server.serve()
        return server

    async def _send(self, channel: Channel, body: Body) -> ErrorCode | None:
        if isinstance(body, ListStates):
            await self._list(channel, body)
            return None
        assert isinstance(body, GetChunks)
        self._offer(body.root)
        return await super()._send(channel, body)

    # -- what there is

    async def _list(self, channel: Channel, question: ListStates) -> None:
        """Newest step first: where there is more than an answer holds, the oldest are left out."""
        newest = self._store.newest()
        if newest is None or newest < question.at_least:
            await self._refresh(question.at_least)
        self._forget_offers()
        steps = self._store.steps()
        if steps:
            self._store.hold(max(steps), HOLD_S)
        entries = (
            StateEntry(step, block, file.size, file.root)
            for step in sorted(steps, reverse=True)
            for block, file in self._store.files(step).items()
            if not question.blocks or block in question.blocks
        )
        listed = tuple(islice(entries, MAX_LISTED))
        run = encode_run(self._store.run)
        for first in range(0, max(1, len(listed)), MAX_ENTRIES):
            channel.send(States(run, listed[first : first + MAX_ENTRIES]))
            await channel.drain()

    async def _refresh(self, at_least: int) -> None:
        """Have a snapshot made; who asks meanwhile waits for the same one."""
        if self._refreshing is None or self._refreshing.done():
            self._refreshing = self._tasks.spawn(self._make_snapshot(at_least), "snapshot")
        await asyncio.shield(self._refreshing)

    async def _make_snapshot(self, at_least: int) -> None:
        loop = asyncio.get_running_loop()
        await asyncio.sleep(self._fresh_again_at - loop.time())
        began_s = loop.time()
        try:
            await self._fresh(at_least)
        except SwarmnodeError as error:
            log.warning("no snapshot could be made for a peer: %s", error)
        took_s = loop.time() - began_s
        self._fresh_again_at = loop.time() + max(FRESH_EVERY_S, took_s / FRESH_SHARE)

    # -- chunks

    def _offer(self, root: bytes) -> None:
        """See whether the file with this root is (still) there."""
        found = self._store.find(root)
        if found is None:
            self._offers.pop(root, None)
            return
        step, _block, file, path = found
        self._store.hold(step, HOLD_S)
        self._offers.setdefault(root, Offer(file, path))

    def _forget_offers(self) -> None:
        """Steps that were removed are not offered any more."""
        for root in [root for root in self._offers if self._store.find(root) is None]:
            del self._offers[root]
            self._hashing.pop(root, None)

    def _withdraw(self, offer: Offer, reason: str) -> None:
        super()._withdraw(offer, reason)
        found = self._store.find(offer.file.root)
        if found is not None:
            self._store.set_aside(found[0], found[1])
