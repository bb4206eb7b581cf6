"""Adapters come from peers by their hashes, as much of them as the units here need, and nothing that is false."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from swarmnode.errors import ErrorCode, PeerRefused
from swarmnode.founding.model_source import from_checkpoint
from swarmnode.founding.swarm_creation import AdapterSource, from_folders
from swarmnode.plan.view import Span
from swarmnode.swarm.records.manifest import ADAPTERS_FORMAT
from swarmnode.swarm.storage.chunk_folder import HAVE
from swarmnode.weights import adapter_files
from swarmnode.weights.adapter_files import AdapterFiles
from tests.adapters import matrices, write_adapter
from tests.weights.test_weights import UNITS, World
from tests.weights.test_weights import model as model  # a fixture

RANK = 128  # so that a layer's matrices are some 1.5 MB: a span needs a part of the chunks


@pytest.fixture(scope="module")
def adapters(model: Path, tmp_path_factory: pytest.TempPathFactory) -> AdapterSource:
    from transformers import AutoModelForCausalLM

    folder = tmp_path_factory.mktemp("adapters")
    whole = AutoModelForCausalLM.from_pretrained(model)
    write_adapter(folder / "verse", matrices(whole, lambda name: "_proj" in name, rank=RANK), r=RANK)
    return from_folders({"verse": folder / "verse"}, from_checkpoint(str(model), folder / "none"), folder / "out")


class Nobody:
    """Members that bring no adapters."""

    def __contains__(self, _adapter: str) -> bool:
        return False


class AdapterWorld(World):
    """The swarm has an adapter, too."""

    def __init__(self, model: Path, folder: Path, adapters: AdapterSource) -> None:
        super().__init__(model, folder, format=ADAPTERS_FORMAT, adapters=adapters.adapters)
        self.adapters = adapters
        self.copy = Path(shutil.copytree(adapters.folder, folder / "adapters"))

    async def giver(self, name: str, folder: Path | None = None) -> None:
        """A peer with the whole checkpoint, and the adapters in this folder."""
        seeder = await self.seeder(name)
        seeder.add_folder(self.model)
        seeder.add_adapters(folder or self.copy)
        self.directory.announce(name, (0, UNITS))

    async def files(self, home: str = "home") -> AdapterFiles:
        return AdapterFiles(self.swarm, self.weights(home=home), await self.seeder(f"seeder of {home}"), Nobody())  # type: ignore[arg-type]


@pytest_asyncio.fixture
async def world(model: Path, tmp_path: Path, adapters: AdapterSource) -> AsyncIterator[AdapterWorld]:
    made = AdapterWorld(model, tmp_path, adapters)
    yield made
    await made.close()


async def test_only_the_chunks_of_the_units_are_fetched(world: AdapterWorld) -> None:
    await world.giver("founder")
    files = await world.files()
    first = await files.bring("verse", Span(0, 2))
    info = world.adapters.adapters[0].weights
    assert info.chunks() > 4
    cache = files._weights.open_cache()
    held = cache.have(info).count(HAVE)
    assert 0 < held < info.chunks()
    family = (await files._weights.outline()).family
    original, copy = (world.copy / info.name).read_bytes(), first.weights.read_bytes()
    entries = first.tensors_of(family, 0, 2)
    assert entries and all(original[one.begin : one.end] == copy[one.begin : one.end] for one in entries)
    await files.bring("verse", Span(0, UNITS))
    assert cache.have(info) == HAVE * info.chunks()


async def test_a_false_chunk_is_refused_and_blamed_on_who_gave_it(world: AdapterWorld) -> None:
    false = Path(shutil.copytree(world.copy, world.folder / "false"))
    file = false / "adapter-verse.safetensors"
    await world.giver("liar", false)
    raw = bytearray(file.read_bytes())
    raw[-5] ^= 1
    file.write_bytes(raw)
    await world.giver("honest")
    files = await world.files()
    brought = await files.bring("verse", Span(0, UNITS))
    assert brought.weights.read_bytes() == (world.copy / file.name).read_bytes()
    assert set(world.directory.suspected) <= {"liar"}


async def test_who_has_fetched_one_gives_it(world: AdapterWorld) -> None:
    await world.giver("giver")
    first = await world.files("first")
    await first.bring("verse", Span(0, UNITS))
    world.directory.suspect("giver", "gone")
    await world.founder()  # who has no adapters any more
    world.directory.announce("seeder of first", (1, 3))
    second = await world.files("second")
    brought = await second.bring("verse", Span(1, 3))
    assert brought.config.rank == RANK


async def test_nobody_has_it(world: AdapterWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter_files, "PATIENCE_S", 0.2)
    monkeypatch.setattr("swarmnode.weights.fetcher.LOOK_AGAIN_S", 0.02)
    await world.founder()
    files = await world.files()
    with pytest.raises(PeerRefused) as caught:
        await files.bring("verse", Span(0, UNITS))
    assert caught.value.code == ErrorCode.NOT_FOUND
