"""Manifest and chunks over links: a seeder at one end, a fetcher at the other."""

import asyncio
import json
import random
from dataclasses import replace

import pytest

from swarmnode.codec.body import VERSION
from swarmnode.codec.messages import Attach, Chunk, GetChunks, Hello
from swarmnode.errors import ErrorCode, PeerError, PeerLost, PeerRefused, ProtocolError
from swarmnode.links.link_config import LinkConfig
from swarmnode.links.switchboard import Switchboard
from swarmnode.peer.host import fetch_manifest
from swarmnode.peer.questions import ask
from swarmnode.swarm.records.manifest import Manifest, ModelInfo, encode_manifest
from swarmnode.swarm.storage.chunk_folder import WeightCache
from swarmnode.swarm.storage.content import CHUNK_BYTES, checkpoint_files, chunk_hashes, describe_files, matching_hashes
from swarmnode.swarm.storage.swarmfile import new_swarm
from swarmnode.weights.chunk_server import REQUESTS_PER_PEER, WEIGHTS_PROTOCOL, Seeder
from swarmnode.weights.fetcher import Fetcher
from swarmnode.weights.sources import PeerSource, largest_answer_bytes
from tests.peer.memory_network import MemoryNetwork
from tests.peer.toy_peer import ToyPeer

CHUNKS = 12


class LateSource(PeerSource):
    """Gives its chunks once somebody was dropped: else it might have given all before the other's first is here."""

    def __init__(self, board, peer, dropped):
        super().__init__(board, peer)
        self._dropped = dropped

    async def chunks(self, file, first, count):
        await self._dropped.wait()
        async for chunk in super().chunks(file, first, count):
            yield chunk


class World:
    """A checkpoint, seeders of it, and a newcomer with an empty cache."""

    def __init__(self, folder):
        self.folder = folder / "checkpoint"
        self.folder.mkdir()
        (self.folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
        (self.folder / "model.safetensors").write_bytes(random.Random(7).randbytes(CHUNKS * CHUNK_BYTES - 5))
        files = describe_files(checkpoint_files(self.folder))
        self.swarm = new_swarm(encode_manifest(Manifest("m", ModelInfo("llama", 6, 8), files, created=1)))
        self.weights = self.swarm.manifest.file("model.safetensors")
        self.hello = Hello(VERSION, self.swarm.id)
        self.peers = {}
        self.home = folder / "home"
        self.newcomer = MemoryNetwork(self.peers, "newcomer")
        config = LinkConfig(max_payload_bytes=largest_answer_bytes(self.swarm.manifest))
        self.board = Switchboard(self.newcomer, WEIGHTS_PROTOCOL, self.hello, config)
        self.cache = WeightCache(self.home, self.swarm.id)
        self.dropped = []
        self.has_dropped = asyncio.Event()
        self._seeders = []

    async def seeder(self, name, *, swarm=None):
        swarm = swarm or self.swarm
        seeder = await Seeder.start(
            ToyPeer(MemoryNetwork(self.peers, name), LinkConfig(), Hello(VERSION, swarm.id)), swarm
        )
        self._seeders.append(seeder)
        return seeder

    async def whole(self, name, verified=None):
        seeder = await self.seeder(name)
        seeder.add_folder(self.folder, verified or {})
        return seeder

    def hash_lists(self):
        """The chunk hashes of all files, by root: who has them reads no file again, and so notices nothing."""
        return {file.root: matching_hashes(self.folder / file.name, file) for file in self.swarm.manifest.files}

    async def fetch(self, *sources, numbers=range(CHUNKS), late=()):
        peers = [PeerSource(self.board, name) for name in sources]
        peers += [LateSource(self.board, name, self.has_dropped) for name in late]
        fetcher = Fetcher(self.cache, lambda: peers, self._drop)
        await fetcher.fetch({self.weights: numbers}, news=nobody_comes)
        return fetcher

    def _drop(self, source, _reason):
        self.dropped.append(source.name)
        self.has_dropped.set()

    def complete(self):
        return self.cache.path(self.weights).read_bytes() == (self.folder / "model.safetensors").read_bytes()

    async def close(self):
        await self.board.close()
        for seeder in self._seeders:
            await seeder.close()
        for network in list(self.peers.values()):
            await network.close()


async def nobody_comes():
    await asyncio.Event().wait()


@pytest.fixture
async def world(tmp_path):
    world = World(tmp_path)
    yield world
    await world.close()


async def test_manifest_comes_from_whoever_has_the_right_one(world):
    other = new_swarm(encode_manifest(another(world.swarm.manifest)))
    liar = await world.seeder("liar")
    liar._manifest_bytes = other.manifest_bytes
    dropped = []
    with pytest.raises(ProtocolError, match="not the swarm's"):
        await fetch_manifest(
            world.newcomer, ["liar"], world.hello, LinkConfig(), drop=lambda peer, _: dropped.append(peer)
        )
    assert dropped == ["liar"]
    with pytest.raises(PeerLost):
        await fetch_manifest(world.newcomer, ["nobody"], world.hello, LinkConfig())
    await world.seeder("honest")
    raw = await fetch_manifest(world.newcomer, ["nobody", "liar", "honest"], world.hello, LinkConfig())
    assert raw == world.swarm.manifest_bytes


def another(manifest):
    return Manifest("other", manifest.model, manifest.files, manifest.created)


async def test_a_peer_of_another_swarm_is_refused(world):
    await world.seeder("stranger", swarm=new_swarm(encode_manifest(another(world.swarm.manifest))))
    with pytest.raises(PeerError):
        await fetch_manifest(world.newcomer, ["stranger"], world.hello, LinkConfig())


async def test_only_the_wanted_bytes_move(world):
    seeder = await world.whole("a")
    assert seeder.units == (0, 6)
    await world.fetch("a", numbers=[2, 3, 11])
    moved = world.newcomer.received()
    assert 3 * CHUNK_BYTES - 5 < moved < 3 * CHUNK_BYTES + 2000
    assert world.cache.missing(world.weights, range(CHUNKS)) == [0, 1, 4, 5, 6, 7, 8, 9, 10]


def tamper(world, seeder):
    """Let a seeder's weights be zeros, of the right size."""
    tampered = world.folder.parent / "tampered"
    tampered.write_bytes(bytes(world.weights.size))
    seeder._offers[world.weights.root] = offer = replace(seeder._offers[world.weights.root], path=tampered)
    return offer


async def test_a_tampered_chunk_is_refused_and_fetched_elsewhere(world):
    await world.whole("good")
    await world.fetch("good", numbers=[0])  # with the hash list, so that only a chunk can be false
    liar, hashes = await world.whole("bad", world.hash_lists()), world.hash_lists()
    liar._took_hashes(tamper(world, liar), hashes[world.weights.root])
    await world.fetch("bad", late=["good"])
    assert world.dropped == ["bad"] and world.complete()


async def test_tampered_hashes_are_refused_and_fetched_elsewhere(world):
    liar = await world.whole("liar")

    async def lie(_offer):
        return bytes(32 * CHUNKS)

    liar._hash = lie
    await world.whole("good")
    await world.fetch("liar", "good")
    assert world.dropped == ["liar"] and world.complete()


async def test_a_damaged_file_is_not_given_by_who_notices(world):
    seeder = await world.whole("bad")
    tamper(world, seeder)
    await world.whole("good")
    await world.fetch("bad", "good")
    assert world.dropped == [] and world.complete()
    assert seeder.units == (0, 0)


async def test_a_file_that_was_cut_short_meanwhile_is_not_given(world):
    seeder = await world.whole("a")
    copy = world.folder.parent / "copy"
    copy.write_bytes(b"short")
    seeder._offers[world.weights.root] = replace(seeder._offers[world.weights.root], path=copy)
    with pytest.raises(PeerRefused) as caught:
        await answers(world, GetChunks(world.weights.root, 2, 1))
    assert caught.value.code == ErrorCode.NOT_FOUND
    assert seeder.units == (0, 0)


async def test_holders_of_different_parts_complete_one_another(world):
    """Each is asked first for what only the other one has."""
    await world.whole("founder")
    parts = {"even": [0, 1, 2, 3, 8, 9, 10, 11], "odd": [4, 5, 6, 7]}
    for name, numbers in parts.items():
        cache = WeightCache(world.home / name, world.swarm.id)
        fetcher = Fetcher(cache, lambda: [PeerSource(world.board, "founder")], lambda *_: None)
        await fetcher.fetch({world.weights: numbers}, news=nobody_comes)
        (await world.seeder(name)).add_cache(cache, (0, 3))
    await world.fetch("odd", "even")
    assert world.complete() and world.dropped == []


async def test_more_sources_are_asked_than_at_once(world):
    empty = [f"empty {i}" for i in range(9)]
    for name in empty:
        await world.seeder(name)
    await world.whole("last")
    await world.fetch(*empty, "last")
    assert world.complete() and world.dropped == []


async def answers(world, question):
    return [item async for item in ask(world.board, "a", question)]


async def test_unknown_and_impossible_requests(world):
    await world.whole("a")
    with pytest.raises(PeerRefused) as caught:
        await answers(world, GetChunks(b"?" * 32, 0, 1))
    assert caught.value.code == ErrorCode.NOT_FOUND
    with pytest.raises(PeerRefused) as caught:
        await answers(world, GetChunks(world.weights.root, CHUNKS - 1, 2))
    assert caught.value.code == ErrorCode.MALFORMED
    with pytest.raises(PeerRefused) as caught:
        await answers(world, Attach(b"s" * 16, 0))
    assert caught.value.code == ErrorCode.MALFORMED
    assert len(await answers(world, GetChunks(world.weights.root, CHUNKS - 1, 1))) == 1
    assert len(world.newcomer._streams) == 1, "the link lives on"


async def test_one_who_asks_for_too_much_at_once_loses_the_link_alone(world):
    seeder = await world.whole("a")
    stranger = MemoryNetwork(world.peers, "stranger")
    board = Switchboard(stranger, WEIGHTS_PROTOCOL, world.hello, LinkConfig())
    lost = asyncio.get_running_loop().create_future()
    for _ in range(REQUESTS_PER_PEER + 1):  # in one turn of the loop, so that none is answered in between
        channel = await board.call("a", lambda *_: None, lambda error: lost.done() or lost.set_result(error))
        channel.send(GetChunks(world.weights.root, 0, CHUNKS))
    error = await lost
    assert isinstance(error, PeerRefused) and error.code == ErrorCode.TOO_LARGE
    await world.fetch("a")
    assert world.complete() and not seeder._askers
    await board.close()


async def test_more_peers_than_it_has_room_for_are_told_to_come_back(world, monkeypatch):
    monkeypatch.setattr("swarmnode.weights.chunk_server.PEERS_AT_ONCE", 0)
    await world.whole("a")
    with pytest.raises(PeerRefused) as caught:
        await answers(world, GetChunks(world.weights.root, 0, 1))
    assert caught.value.code == ErrorCode.BUSY and caught.value.retry_s > 0


async def test_what_is_announced_follows_what_is_held(world):
    seeder = await world.seeder("a")
    assert seeder.units == (0, 0)
    for units, announced in [((1, 3), (1, 3)), ((3, 4), (1, 4)), ((5, 6), (5, 6))]:
        seeder.add_cache(world.cache, units)
        assert seeder.units == announced


async def test_a_manifest_is_found_behind_peers_that_hang(world):
    hanging = [f"hanging {i}" for i in range(3)]
    for name in hanging:
        (await world.seeder(name))._send = never
    await world.seeder("honest")
    fetching = fetch_manifest(world.newcomer, [*hanging, "honest"], world.hello, LinkConfig())
    assert await fetching == world.swarm.manifest_bytes


async def never(*_):
    await asyncio.Event().wait()


async def test_a_source_that_sends_without_end_is_cut_off(world):
    seeder = await world.whole("flood")

    async def flood(channel, _offer, numbers):
        for _ in range(100):  # all in one turn of the loop, so that nobody can take them in between
            channel.send(Chunk(), seq=numbers.start, payload=[b"x"])

    seeder._send_chunks = flood
    await world.whole("good")
    await world.fetch("flood", "good")
    assert world.dropped == ["flood"] and world.complete()


async def test_a_cancelled_fetch_goes_on_where_it_was(world):
    await world.whole("a")
    started = asyncio.Event()
    source = PeerSource(world.board, "a")
    fetcher = Fetcher(world.cache, lambda: [source], lambda *_: None)
    task = asyncio.create_task(
        fetcher.fetch({world.weights: range(CHUNKS)}, news=nobody_comes, progress=lambda *_: started.set())
    )
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    left = world.cache.missing(world.weights, range(CHUNKS))
    assert 0 < len(left) < CHUNKS
    again = await world.fetch("a")
    assert world.complete()
    # What was being written when the fetch was cancelled is there a moment later.
    assert 0 < again.fetched_bytes <= sum(world.weights.chunk_size(number) for number in left)


async def test_hashes_are_worked_out_before_anybody_asks_for_them(world, monkeypatch):
    hashed, loop, done = [], asyncio.get_running_loop(), asyncio.Event()

    def note(path, file):
        hashed.append(file.name)
        loop.call_soon_threadsafe(done.set)
        return matching_hashes(path, file)

    monkeypatch.setattr("swarmnode.weights.chunk_server.matching_hashes", note)
    seeder = await world.seeder("seeder")
    known = {world.weights.root: chunk_hashes(world.folder / "model.safetensors")}
    seeder.add_folder(world.folder, known)
    await done.wait()
    await world.fetch("seeder")
    assert world.complete() and hashed == ["config.json"], "what was verified elsewhere is not read again"
