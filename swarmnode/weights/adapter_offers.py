"""Offers of adapters: how hops fetch the files of an adapter from its owner's client, which they cannot dial.

The client opens a conversation with each hop of a route and names the adapter. The hop asks for chunks on this conversation when a
session needs them. Format: `protocol/frames.md`.

List of the adapters that members share: signed records in the DHT, where each owner's nodes keep their own.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

from swarmnode.codec.body import Body
from swarmnode.codec.frames import Frame
from swarmnode.codec.messages import Chunk, End, Error, GetChunks, OfferAdapter
from swarmnode.errors import ErrorCode, LocalError, NetworkDown, PeerError, PeerLost, ProtocolError, refusal
from swarmnode.links.switchboard import Channel, Switchboard
from swarmnode.membership.access_control import load_home_key
from swarmnode.net.identity import verify
from swarmnode.net.interfaces import Buffer, PeerId
from swarmnode.peer.host import Host
from swarmnode.peer.questions import MAX_WAITING, LocalPeer, board_of, next_answer
from swarmnode.swarm.peers.record_validation import LISTED_S, adapter_subkey, adapters_in, adapters_key
from swarmnode.swarm.records.adapter_record import AdapterRecord, open_adapter, sign_adapter
from swarmnode.swarm.storage.content import CHUNK_BYTES, FileContent
from swarmnode.swarm.storage.own_adapters import OwnAdapter
from swarmnode.weights.chunk_server import Asker, ChunkServer, Offer
from swarmnode.weights.sources import Source

log = logging.getLogger(__name__)

ADAPTER_PROTOCOL = "/swarmnode/adapter/1"
MAX_OFFERS = 1024  # kept by one hop; further ones get BUSY
MAX_OFFERS_PER_PEER = 32
BUSY_RETRY_S = 2.0
DIAL_S = 3.0  # for all hops of a route together


class OfferedSource(Source):
    """Owner's client at the other end of a conversation about an adapter."""

    def __init__(self, channel: Channel) -> None:
        self.name = channel.peer
        self._channel = channel
        self._turn = asyncio.Lock()
        self._answers: asyncio.Queue[Frame | PeerError] | None = None  # None: nothing has been asked
        channel.on_frame, channel.on_lost = self._receive, self._lost

    async def hashes(self, file: FileContent) -> Buffer:
        async with contextlib.aclosing(self._ask(GetChunks(file.root, 0, 0), 1)) as answers:
            frame = await anext(answers)
        return frame.payload

    async def chunks(self, file: FileContent, first: int, count: int) -> AsyncIterator[tuple[int, Buffer]]:
        number = first
        async with contextlib.aclosing(self._ask(GetChunks(file.root, first, count), count)) as answers:
            async for frame in answers:
                if frame.seq != number:
                    raise ProtocolError("it sent another chunk than the requested one", peer=self.name)
                yield number, frame.payload
                number += 1

    @property
    def open(self) -> bool:
        """Whether the offer still stands."""
        return self._channel.open

    def close(self) -> None:
        """End the conversation."""
        self._channel.close()

    def _lost(self, error: PeerError) -> None:
        if self._answers is not None:
            self._answers.put_nowait(error)

    def _receive(self, frame: Frame, body: Body) -> None:
        if isinstance(body, End | Error):
            self._channel.close()
            self._lost(
                refusal(body.code, retry_s=body.retry_s, peer=self.name)
                if isinstance(body, Error)
                else PeerLost(f"peer {self.name} has taken its offer back", peer=self.name)
            )
        elif not isinstance(body, Chunk) or self._answers is None or self._answers.qsize() >= MAX_WAITING:
            raise ProtocolError("it sends more than it was asked for", code=ErrorCode.TOO_LARGE, peer=self.name)
        else:
            self._answers.put_nowait(frame)

    async def _ask(self, question: GetChunks, count: int) -> AsyncGenerator[Frame, None]:
        """Yield `count` answers. A question that does not get all of them ends the conversation."""
        async with self._turn:
            if not self._channel.open:
                raise PeerLost(f"peer {self.name} has taken its offer back", peer=self.name)
            answers = self._answers = asyncio.Queue()
            left = count
            try:
                self._channel.send(question)
                while left:
                    frame = await next_answer(answers, self.name)
                    left -= 1
                    yield frame
            finally:
                self._answers = None
                if left:
                    self._channel.close()


class AdapterOffers:
    """Offers that this node has received, by the adapters' ids."""

    def __init__(self, peer: LocalPeer, swarm: bytes) -> None:
        self._swarm = swarm
        self._sources: dict[str, list[OfferedSource]] = {}
        self._news = asyncio.Event()
        config = replace(peer.link_config, max_payload_bytes=CHUNK_BYTES)
        self._board = Switchboard(peer.network, ADAPTER_PROTOCOL, peer.hello, config, accept=self._accept)

    async def start(self) -> None:
        """Start to take offers."""
        await self._board.start()

    async def close(self) -> None:
        """End all conversations about adapters."""
        await self._board.close()

    def sources(self, adapter: str) -> list[Source]:
        """Return the peers that offer the adapter now."""
        return [source for source in self._sources.get(adapter, ()) if source.open]

    async def changed(self) -> None:
        """Wait for the next offer."""
        self._news.clear()
        await self._news.wait()

    def forget(self, adapter: str) -> None:
        """End all conversations about an adapter."""
        for source in self._sources.pop(adapter, ()):
            source.close()

    def _accept(self, channel: Channel, _frame: Frame, body: Body) -> None:
        if not isinstance(body, OfferAdapter):
            channel.close(Error(ErrorCode.MALFORMED))
            return
        record = open_adapter(body.record, self._swarm, verify)
        self._sources = {
            adapter: standing
            for adapter, sources in self._sources.items()
            if (standing := [source for source in sources if source.open])
        }
        givers = [source.name for sources in self._sources.values() for source in sources]
        if len(givers) >= MAX_OFFERS or givers.count(channel.peer) >= MAX_OFFERS_PER_PEER:
            channel.close(Error(ErrorCode.BUSY, BUSY_RETRY_S))
            return
        self._sources.setdefault(record.id, []).append(OfferedSource(channel))
        self._news.set()


class AdapterGiver(ChunkServer):
    """Client's side of offers: it begins conversations with hops, and sends the chunks that they ask for."""

    def __init__(self, peer: LocalPeer) -> None:
        super().__init__(peer, ())
        self._board = board_of(peer, ADAPTER_PROTOCOL)
        self._channels: dict[tuple[PeerId, str], Channel] = {}

    async def close(self) -> None:
        """End all conversations."""
        await super().close()
        await self._board.close()

    async def offer(self, peers: Iterable[PeerId], own: OwnAdapter, record: AdapterRecord, raw: bytes) -> None:
        """Offer an adapter to each of `peers` that has no conversation about it. Peers that cannot be reached, or take no offers,
        are left out: their answer to OPEN says why."""
        for file in record.info.files:
            self._offers.setdefault(file.root, Offer(file, own.paths[file.root]))
        self._channels = {key: channel for key, channel in self._channels.items() if channel.open}
        new = [peer for peer in peers if (peer, record.id) not in self._channels]
        dialling = [self._tasks.spawn(self._offer(peer, record, raw), f"offer to {peer}") for peer in new]
        if dialling:
            await asyncio.wait(dialling, timeout=DIAL_S)

    async def _offer(self, peer: PeerId, record: AdapterRecord, raw: bytes) -> None:
        roots = frozenset(file.root for file in record.info.files)
        try:
            channel = await self._board.call(peer, lambda _frame, _body: None, lambda _error: None)
            channel.on_frame = lambda _frame, body: self._receive(channel, body, roots)
            self._channels[peer, record.id] = channel
            channel.send(OfferAdapter(raw))
        except (PeerError, NetworkDown) as error:
            log.debug("no offer of an adapter to %s: %s", peer, error)

    def _receive(self, channel: Channel, body: Body, roots: frozenset[bytes]) -> None:
        """Answer a question of a hop. It may ask for the offered files alone."""
        if isinstance(body, End | Error):
            channel.close()
        elif not isinstance(body, GetChunks) or body.root not in roots:
            channel.close(Error(ErrorCode.MALFORMED))
        else:
            self._enqueue(channel, body, self._askers.setdefault(channel.peer, Asker()))

    def _finish(self, channel: Channel, refused: ErrorCode | None) -> None:
        """Keep the conversation for the next question, unless this one was refused."""
        if refused is not None:
            channel.close(Error(refused))


TABLE_TIMEOUT_S = 10.0


class SharedAdapter(NamedTuple):
    """Record of an adapter that its owner shares, and its signed bytes."""

    record: AdapterRecord
    raw: bytes


async def shared_adapters(host: Host) -> list[SharedAdapter]:
    """Return the adapters that members share, by name. Raises NetworkDown; LocalError if the DHT does not answer."""
    key = adapters_key(host.swarm.id)
    try:
        found = await asyncio.wait_for(host.network.dht.get([key]), TABLE_TIMEOUT_S)
    except asyncio.TimeoutError:
        raise LocalError("the swarm's list of adapters cannot be read at the moment; try again") from None
    records = adapters_in(found.get(key, {}).values(), host.swarm.id, verify, host.clock.unix())
    return sorted((SharedAdapter(*one) for one in records), key=lambda one: (one.record.name, one.record.id))


async def list_adapters(host: Host, shared: Sequence[OwnAdapter]) -> None:
    """Sign a record of each adapter with the key of the home folder, and store the records in the DHT.

    Raises NetworkDown; LocalError if the DHT does not answer, or the key cannot be read.
    """
    if not shared:
        return
    key, now = await asyncio.to_thread(load_home_key, host.config.home), host.clock.unix()
    for own in shared:
        record = own.record(host.swarm.id, key.peer_id, now)
        expires_at = min(record.expires_at, now + LISTED_S)
        if expires_at <= now:
            continue
        key_of_list, subkey, raw = adapters_key(record.swarm), adapter_subkey(record), sign_adapter(record, key.sign)
        storing = host.network.dht.store(key_of_list, subkey, raw, expires_at=expires_at)
        try:
            await asyncio.wait_for(storing, TABLE_TIMEOUT_S)
        except asyncio.TimeoutError:
            raise LocalError("the adapter cannot be listed in the swarm at the moment; try again") from None
