"""Offers of adapters: their owner gives the offered files on conversations that it began, and nothing else happens on these."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from swarmnode.codec.body import VERSION
from swarmnode.codec.messages import Chunk, Error, GetChunks, Hello, OfferAdapter
from swarmnode.errors import ErrorCode, PeerError, PeerRefused
from swarmnode.links.link_config import LinkConfig
from swarmnode.links.switchboard import Channel
from swarmnode.net.identity import Identity
from swarmnode.peer.questions import board_of
from swarmnode.swarm.records.adapter_record import DAY_S, AdapterRecord, Share, sign_adapter
from swarmnode.swarm.storage.content import CHUNK_BYTES, FileContent
from swarmnode.swarm.storage.own_adapters import (
    CONFIG_NAME,
    WEIGHTS_NAME,
    AdapterTerms,
    OwnAdapter,
    adapter_in_folder,
)
from swarmnode.weights.adapter_offers import ADAPTER_PROTOCOL, MAX_OFFERS_PER_PEER, AdapterGiver, AdapterOffers
from tests.peer.memory_network import MemoryNetwork
from tests.peer.toy_peer import ToyPeer

SWARM, NOW = bytes(range(32)), 1_800_000_000
KEY = Identity(b"o" * 32)
WEIGHTS = bytes(range(256)) * 8192  # two chunks


class World:
    """A hop, and the owner of an adapter."""

    def __init__(self, folder: Path) -> None:
        (folder / CONFIG_NAME).write_text("{}")
        (folder / WEIGHTS_NAME).write_bytes(WEIGHTS)
        self.own: OwnAdapter = adapter_in_folder(folder, AdapterTerms("verse", Share.PRIVATE, NOW + DAY_S, 4))
        self.record: AdapterRecord = self.own.record(SWARM, KEY.peer_id, NOW)
        self.raw = sign_adapter(self.record, KEY.sign)
        self.peers: dict[str, Any] = {}
        self.owner = self.peer("owner")
        self.offers = AdapterOffers(self.peer("hop"), SWARM)
        self.giver = AdapterGiver(self.owner)

    def peer(self, name: str) -> ToyPeer:
        return ToyPeer(MemoryNetwork(self.peers, name), LinkConfig(), Hello(VERSION, SWARM))

    async def begin(self, answer: Any) -> Channel:
        """Offer the adapter as a peer whose answer to a question is of its own: `answer(channel, question)`."""
        board = board_of(self.owner, ADAPTER_PROTOCOL)
        channel = await board.call("hop", lambda _frame, _body: None, lambda _error: None)
        channel.on_frame = lambda _frame, body: answer(channel, body)
        channel.send(OfferAdapter(self.raw))
        await self.offers.changed()
        return channel

    @property
    def weights(self) -> FileContent:
        return self.record.info.weights


@pytest_asyncio.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    made = World(tmp_path)
    await made.offers.start()
    yield made
    await made.giver.close()
    await made.offers.close()
    for network in list(made.peers.values()):
        await network.close()


async def test_the_owner_gives_what_it_offers_again_and_again_and_nothing_else(world: World) -> None:
    await world.giver.offer(["hop", "nobody"], world.own, world.record, world.raw)
    await world.giver.offer(["hop"], world.own, world.record, world.raw)
    while not world.offers.sources(world.record.id):
        await world.offers.changed()
    (source,) = world.offers.sources(world.record.id)
    for file in world.record.info.files:
        hashes = bytes(await source.hashes(file))
        assert hashlib.sha256(hashes).digest() == file.root
    for _ in range(2):
        found = [bytes(data) async for _, data in source.chunks(world.weights, 0, 2)]
        assert b"".join(found) == WEIGHTS
    with pytest.raises(PeerRefused) as caught:
        await source.hashes(FileContent("other", 3, bytes(32)))
    assert caught.value.code == ErrorCode.MALFORMED
    assert world.offers.sources(world.record.id) == [], "an offer is over after a question that it has no answer to"


async def test_a_conversation_with_false_answers_ends(world: World) -> None:
    def refuses(channel: Channel, _question: object) -> None:
        channel.close(Error(ErrorCode.NOT_FOUND))

    def sends_another(channel: Channel, question: object) -> None:
        if isinstance(question, GetChunks):
            channel.send(Chunk(), seq=1, payload=[b"x" * CHUNK_BYTES])

    for answer in (refuses, sends_another):
        await world.begin(answer)
        (source,) = world.offers.sources(world.record.id)
        with pytest.raises(PeerError):
            _ = [data async for _, data in source.chunks(world.weights, 0, 2)]
        assert world.offers.sources(world.record.id) == []


async def test_chunks_that_nobody_asked_for_end_the_link(world: World) -> None:
    channel = await world.begin(lambda _channel, _body: None)
    ended = asyncio.Event()
    channel.on_lost = lambda _error: ended.set()
    channel.send(Chunk(), seq=0, payload=[b"x"])
    await asyncio.wait_for(ended.wait(), 10)
    assert world.offers.sources(world.record.id) == []


async def test_offers_of_one_peer_are_bounded(world: World) -> None:
    channels = [await world.begin(lambda _channel, _body: None) for _ in range(MAX_OFFERS_PER_PEER)]
    refused: list[object] = []
    board = board_of(world.owner, ADAPTER_PROTOCOL)
    one_more = await board.call("hop", lambda _frame, body: refused.append(body), lambda _error: None)
    one_more.send(OfferAdapter(world.raw))
    channels[0].close()
    while not refused:
        await one_more.drain()
    assert isinstance(refused[0], Error) and refused[0].code == ErrorCode.BUSY
