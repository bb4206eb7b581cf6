"""The checkpoint as a machine needs it: from the founder's folder, or from peers, only what the span needs."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import pytest_asyncio

from swarmnode.codec.body import VERSION
from swarmnode.codec.messages import Hello
from swarmnode.errors import CheckpointError
from swarmnode.links.link_config import LinkConfig
from swarmnode.plan.view import Span
from swarmnode.swarm.records.announcement import Announcement
from swarmnode.swarm.records.manifest import Manifest, ModelInfo, encode_manifest
from swarmnode.swarm.storage.content import CHUNK_BYTES, FileContent, checkpoint_files, describe_files
from swarmnode.swarm.storage.swarmfile import Swarm, new_swarm
from swarmnode.weights.chunk_server import Seeder
from swarmnode.weights.weights import Weights, header_chunks
from tests.llama import save_llama
from tests.peer.memory_network import MemoryNetwork
from tests.peer.toy_peer import ToyPeer

UNITS = 6
WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama with blocks of 3.3 MB, so that a span is a part of the chunks."""
    folder = tmp_path_factory.mktemp("model")
    save_llama(folder, UNITS - 2, vocab_size=2048, hidden_size=256, intermediate_size=768, num_key_value_heads=4)
    return folder


class Directory:
    """Who announces what, set by the test."""

    def __init__(self) -> None:
        self.revision = 0
        self.suspected: list[str] = []
        self._peers: dict[str, Announcement] = {}
        self._moved = asyncio.Event()

    def peers(self) -> dict[str, Announcement]:
        return self._peers

    def announce(self, peer: str, seeds: tuple[int, int]) -> None:
        self._peers[peer] = Announcement(1, bytes(32), peer, 1, 0.0, 1.0, 0.0, seeds=seeds)
        self._changed()

    def suspect(self, peer: str, _reason: str) -> None:
        self.suspected.append(peer)
        self._peers.pop(peer, None)
        self._changed()

    def _changed(self) -> None:
        self.revision += 1
        self._moved.set()
        self._moved = asyncio.Event()

    async def changed(self, since: int) -> int:
        while self.revision == since:
            await self._moved.wait()
        return self.revision


class World:
    """A swarm of a model, its seeders, and this machine with or without the founder's folder."""

    def __init__(self, model: Path, folder: Path, **more: Any) -> None:
        """`more`: fields of the manifest, of one with adapters."""
        self.folder = folder
        self.model = Path(shutil.copytree(model, folder / "model"))
        self.hint = Path(shutil.copytree(model, folder / "hint"))
        files = describe_files(checkpoint_files(model))
        self.swarm = new_swarm(encode_manifest(Manifest("m", ModelInfo("llama", UNITS, 256), files, created=1, **more)))
        self.hello = Hello(VERSION, self.swarm.id)
        self.directory = Directory()
        self.peers: dict[str, Any] = {}
        self.network = MemoryNetwork(self.peers, "me")
        self._closing: list[Any] = []

    async def seeder(self, name: str) -> Seeder:
        seeder = await Seeder.start(ToyPeer(MemoryNetwork(self.peers, name), LinkConfig(), self.hello), self.swarm)
        self._closing.append(seeder)
        return seeder

    async def founder(self) -> None:
        """A peer with the whole checkpoint."""
        seeder = await self.seeder("founder")
        seeder.add_folder(self.model)
        self.directory.announce("founder", seeder.units)

    def weights(
        self, *, hint: Path | None = None, home: str = "home", places: tuple[Path, ...] | None = None
    ) -> Weights:
        swarm = Swarm(self.swarm.id, "m", (), self.swarm.manifest_bytes, self.swarm.manifest, hint)
        host = SimpleNamespace(
            swarm=swarm,
            network=self.network,
            peer_id="me",
            hello=self.hello,
            link_config=LinkConfig(),
            directory=self.directory,
            config=SimpleNamespace(home=self.folder / home, max_cache_bytes=None, weights=places),
            bootstraps=lambda: ["door"],
        )
        weights = Weights(host)  # type: ignore[arg-type]
        self._closing.append(weights)
        return weights

    def same(self, checkpoint: Any, units: Span) -> bool:
        """Whether the tensors of these units are the model's, byte by byte."""
        original, copy = (self.model / WEIGHTS).read_bytes(), (checkpoint.path / WEIGHTS).read_bytes()
        entries = [checkpoint.entries[name] for name in checkpoint.tensors_of(units.start, units.end)]
        return bool(entries) and all(original[e.begin : e.end] == copy[e.begin : e.end] for e in entries)

    async def close(self) -> None:
        for thing in self._closing:
            await thing.close()
        for network in list(self.peers.values()):
            await network.close()


@pytest_asyncio.fixture
async def world(model: Path, tmp_path: Path) -> Any:
    world = World(model, tmp_path)
    yield world
    await world.close()


def chunks_of(checkpoint: Any, units: Span) -> int:
    entries = [checkpoint.entries[name] for name in checkpoint.tensors_of(units.start, units.end)]
    return len({n for e in entries for n in range(e.begin // CHUNK_BYTES, (e.end - 1) // CHUNK_BYTES + 1)} | {0})


async def test_a_span_moves_only_its_chunks(world: World) -> None:
    await world.founder()
    units = Span(2, 3)
    told: list[tuple[int, int]] = []
    checkpoint = await world.weights().span(units, lambda done, total: told.append((done, total)))
    assert world.same(checkpoint, units)
    small = sum(file.size for file in world.swarm.manifest.files if file.name != WEIGHTS)  # type: ignore[union-attr]
    moved = world.network.received()
    assert moved < chunks_of(checkpoint, units) * CHUNK_BYTES + small + 8192
    assert moved < (world.model / WEIGHTS).stat().st_size / 2
    assert told[-1][0] == told[-1][1] and told == sorted(told)


async def test_the_ends_and_the_small_files_are_little(world: World) -> None:
    await world.founder()
    weights = world.weights()
    folder = await weights.small_files()
    assert (folder / "config.json").read_bytes() == (world.model / "config.json").read_bytes()
    assert not (folder / WEIGHTS).exists()
    checkpoint = await weights.ends()
    assert world.same(checkpoint, Span(0, 1)) and world.same(checkpoint, Span(UNITS - 1, UNITS))
    assert not world.same(checkpoint, Span(2, 3))


async def test_the_founders_folder_needs_nobody(world: World) -> None:
    weights = world.weights(hint=world.hint)
    checkpoint = await weights.span(Span(0, UNITS))
    assert checkpoint.path == world.hint and weights.cache is None


def change_a_byte(data: bytearray) -> None:
    data[-5] ^= 1


def break_the_header(data: bytearray) -> None:
    data[8:16] = b"not JSON"


def cut_short(data: bytearray) -> None:
    del data[-100:]


@pytest.mark.parametrize("spoil", [change_a_byte, break_the_header, cut_short])
async def test_a_spoilt_folder_gives_way_to_peers(world: World, spoil: Any, caplog: pytest.LogCaptureFixture) -> None:
    await world.founder()
    path = world.hint / WEIGHTS
    data = bytearray(path.read_bytes())
    spoil(data)
    path.write_bytes(data)
    weights = world.weights(hint=world.hint)
    checkpoint = await weights.span(Span(3, 5))
    assert world.same(checkpoint, Span(3, 5)) and checkpoint.path != world.hint
    assert "changed or damaged" in caplog.text


async def test_a_spoilt_folder_without_peers_is_an_error(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarmnode.weights.weights.DAMAGED_PATIENCE_S", 0.0)
    (world.hint / WEIGHTS).unlink()
    with pytest.raises(
        CheckpointError, match="changed or damaged since the swarm was founded, and no peer has the weights"
    ):
        await world.weights(hint=world.hint).outline()


async def test_the_error_names_the_file_that_the_founder_moved(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GGUF file is linked, not copied: its owner knows it by its own path."""
    monkeypatch.setattr("swarmnode.weights.weights.DAMAGED_PATIENCE_S", 0.0)
    moved = world.hint / "my-model"
    (world.hint / WEIGHTS).rename(moved)
    (world.hint / WEIGHTS).symlink_to(moved)
    await world.weights(hint=world.hint).outline()
    moved.unlink()
    with pytest.raises(CheckpointError, match=f"moved, changed or damaged .*: {moved} cannot be read: No such file"):
        await world.weights(hint=world.hint).outline()


async def test_a_folder_of_another_machine_is_no_damage(world: World) -> None:
    """The .swarm file came from elsewhere: as with an invite alone, there is time until a peer turns up."""
    fetching = asyncio.ensure_future(world.weights(hint=world.folder / "elsewhere").outline())
    await asyncio.sleep(0)
    assert not fetching.done()
    await world.founder()
    assert (await fetching).units == UNITS


async def test_the_door_is_asked_before_anybody_announced(world: World) -> None:
    seeder = await world.seeder("door")
    seeder.add_folder(world.model)
    assert (await world.weights().outline()).units == UNITS


async def test_holders_of_parts_give_on_what_they_fetched(world: World) -> None:
    await world.founder()
    for name, span in {"low": Span(0, 3), "high": Span(3, UNITS)}.items():
        holder = world.weights(home=name)
        await holder.span(span)
        seeder = await world.seeder(name)
        assert holder.cache is not None
        seeder.add_cache(holder.cache, (span.start, span.end))
        world.directory.announce(name, seeder.units)
    world.directory.suspect("founder", "left")
    checkpoint = await world.weights(home="late").span(Span(2, 5))
    assert world.same(checkpoint, Span(2, 5))
    assert world.directory.suspected == ["founder"]


async def test_what_was_fetched_is_not_fetched_again(world: World) -> None:
    await world.founder()
    first = world.weights()
    await first.span(Span(1, 4))
    await first.close()
    moved = world.network.received()
    again = world.weights()
    assert world.same(await again.span(Span(1, 4)), Span(1, 4))
    assert world.network.received() == moved


def test_a_header_longer_than_any_is_refused(tmp_path: Path) -> None:
    """Else a founder's file of 16 TiB would have its reader ask for all of it."""
    path = tmp_path / "model.safetensors"
    path.write_bytes((1 << 50).to_bytes(8, "little"))
    with pytest.raises(CheckpointError, match="declares a header of 1125899906842624 bytes"):
        header_chunks(path, FileContent(path.name, 1 << 44, bytes(32)))
