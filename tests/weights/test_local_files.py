"""Weights on the volunteer's own disk: right chunks are copied, and peers are asked for the rest only."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from swarmnode.compute.gguf.gguf import LINK_NAME, GgufCheckpoint
from swarmnode.plan.view import Span
from swarmnode.swarm.records.manifest import PACKED_FORMAT
from swarmnode.swarm.storage.chunk_folder import ChunkFolder
from swarmnode.swarm.storage.content import CHUNK_BYTES, describe_files
from swarmnode.weights import sources
from swarmnode.weights.sources import LocalFiles, model_caches
from swarmnode.weights.weights import Weights
from tests.compute.model.llama_gguf import save_llama_gguf
from tests.weights.test_weights import UNITS, WEIGHTS, World
from tests.weights.test_weights import model as model  # a fixture

ALL = Span(0, UNITS)
FRAMES = 1 << 16  # of the questions, the small files' frames and the hash lists


@pytest_asyncio.fixture
async def world(model: Path, tmp_path: Path) -> Any:
    world = World(model, tmp_path)
    yield world
    await world.close()


def with_places(world: World, *places: Path) -> Weights:
    weights = world.weights(places=places)
    assert weights._local is not None
    return weights


def small_bytes(world: World) -> int:
    assert world.swarm.manifest is not None
    return sum(file.size for file in world.swarm.manifest.files if not file.name.endswith((".safetensors", ".gguf")))


def fetched_chunks(world: World) -> float:
    """Chunks of weights that came over the network."""
    return max(0.0, (world.network.received() - small_bytes(world) - FRAMES) / CHUNK_BYTES)


async def test_a_file_of_any_name_is_copied_and_nothing_is_fetched(world: World) -> None:
    await world.founder()
    file = world.hint / WEIGHTS
    own = Path(shutil.move(file, world.folder / "my own.bin"))
    told: list[tuple[int, int]] = []
    weights = with_places(world, own)
    checkpoint = await weights.span(ALL, lambda done, total: told.append((done, total)))
    assert world.same(checkpoint, ALL)
    assert fetched_chunks(world) == 0
    assert weights.cache is not None and not own.samefile(weights.cache.folder / WEIGHTS)  # noqa: ASYNC240
    assert told[-1][0] == told[-1][1] and told == sorted(told)


async def test_a_folder_is_searched_and_only_the_span_is_copied(world: World) -> None:
    await world.founder()
    inner = world.folder / "models/publisher/name"
    inner.mkdir(parents=True)
    shutil.move(world.hint / WEIGHTS, inner / WEIGHTS)
    weights = with_places(world, world.folder / "models")
    assert world.same(await weights.span(Span(2, 3)), Span(2, 3))
    assert fetched_chunks(world) == 0
    assert weights.cache is not None
    copied_bytes = (weights.cache.folder / WEIGHTS).stat().st_blocks * 512
    assert copied_bytes < (inner / WEIGHTS).stat().st_size / 2


async def test_only_different_chunks_are_fetched(world: World, caplog: pytest.LogCaptureFixture) -> None:
    await world.founder()
    path = world.hint / WEIGHTS
    data = bytearray(path.read_bytes())
    for number in (3, 7):
        data[number * CHUNK_BYTES + 5] ^= 1
    path.write_bytes(data)
    assert world.same(await with_places(world, world.hint).span(ALL), ALL)
    assert 1 < fetched_chunks(world) <= 2
    assert "2 chunks of this swarm's model.safetensors are not on this disk" in caplog.text
    assert path.read_bytes() == bytes(data), "the file itself is never written"


def cut(path: Path) -> None:
    os.truncate(path, 5 * CHUNK_BYTES + 17)


def of_another_model(path: Path) -> None:
    path.write_bytes(os.urandom(path.stat().st_size))


def longer(path: Path) -> None:
    path.write_bytes(os.urandom(1000) + path.read_bytes())


def empty(path: Path) -> None:
    os.truncate(path, 0)


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (cut, "chunks of this swarm's model.safetensors are not on this disk; your node asks the peers"),
        (of_another_model, "model.safetensors is another file than this swarm's model.safetensors; your node asks"),
        (longer, "model.safetensors is another file than this swarm's model.safetensors; your node asks"),
        (empty, "model.safetensors is another file than this swarm's model.safetensors; your node asks"),
    ],
)
@pytest.mark.parametrize("named", ["file", "folder"])
async def test_a_wrong_file_is_told_once_and_peers_give_the_weights(
    world: World, spoil: Callable[[Path], None], told: str, named: str, caplog: pytest.LogCaptureFixture
) -> None:
    await world.founder()
    path = world.hint / WEIGHTS
    spoil(path)
    weights = with_places(world, path if named == "file" else world.hint)
    assert world.same(await weights.span(Span(0, 4)), Span(0, 4))
    assert world.same(await weights.span(ALL), ALL)
    assert told in caplog.text
    warnings = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == len(set(warnings))
    assert world.directory.suspected == []


async def test_a_folder_without_weights_is_told(world: World, caplog: pytest.LogCaptureFixture) -> None:
    await world.founder()
    (world.hint / WEIGHTS).unlink()
    assert world.same(await with_places(world, world.hint).span(Span(0, 2)), Span(0, 2))
    assert f"no file of this swarm's weights is at {world.hint}; your node asks the peers" in caplog.text


async def test_only_regular_files_are_read(world: World, caplog: pytest.LogCaptureFixture) -> None:
    await world.founder()
    path = world.hint / WEIGHTS
    path.unlink()
    os.mkfifo(path)
    for place in (world.hint, path, Path("/dev/zero")):
        weights = world.weights(places=(place,), home=f"home-{place.name}")
        assert world.same(await weights.span(Span(0, 2)), Span(0, 2))
        assert f"no file of this swarm's weights is at {place}" in caplog.text


async def test_a_file_that_becomes_a_pipe_is_not_read(world: World, caplog: pytest.LogCaptureFixture) -> None:
    await world.founder()
    path = world.hint / WEIGHTS
    weights = with_places(world, path)
    await weights.outline()
    path.unlink()
    os.mkfifo(path)
    assert world.same(await weights.span(ALL), ALL)
    assert f"{path} cannot be read (not a regular file); your node asks the peers" in caplog.text


async def test_an_unreadable_file_is_told(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    await world.founder()
    path, opened = world.hint / WEIGHTS, os.open

    def refuse(name: Any, *rest: Any, **more: Any) -> int:
        if Path(name) == path:
            raise PermissionError(13, "Permission denied")
        return opened(name, *rest, **more)

    monkeypatch.setattr(sources.os, "open", refuse)
    assert world.same(await with_places(world, path).span(Span(0, 2)), Span(0, 2))
    assert f"{path} cannot be read (Permission denied); your node asks the peers" in caplog.text


@pytest.mark.parametrize("change", [lambda path: os.truncate(path, 0), of_another_model])
async def test_a_file_that_changes_while_it_is_read(
    world: World, change: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks from before the change are kept, and wrong ones are not."""
    await world.founder()
    path, reads, pread = world.hint / WEIGHTS, 0, os.pread

    def read(*place: int) -> bytes:
        nonlocal reads
        reads += 1
        if reads == 8:
            change(path)
        return pread(*place)

    monkeypatch.setattr(sources.os, "pread", read)
    assert world.same(await with_places(world, path).span(ALL), ALL)
    assert reads > 8 and fetched_chunks(world) > 1


async def test_links_out_of_the_folder_are_not_followed(world: World, caplog: pytest.LogCaptureFixture) -> None:
    await world.founder()
    outside = Path(shutil.move(world.hint, world.folder / "outside"))
    inside = world.folder / "inside"
    inside.mkdir()
    (inside / WEIGHTS).symlink_to(outside / WEIGHTS)
    (inside / "folder").symlink_to(outside)
    (inside / "round").symlink_to(inside)
    (inside / "loop.gguf").symlink_to(inside / "loop.gguf")
    assert world.same(await with_places(world, inside).span(Span(0, 2)), Span(0, 2))
    assert "no file of this swarm's weights" in caplog.text and fetched_chunks(world) > 1


@pytest.mark.parametrize("named", ["hub", "models--org--name/snapshots/abc"])
async def test_a_snapshot_of_the_hub_links_to_its_blobs(world: World, named: str) -> None:
    await world.founder()
    cache = world.folder / "hub/models--org--name"
    (cache / "blobs").mkdir(parents=True)
    (cache / "snapshots/abc").mkdir(parents=True)
    shutil.move(world.hint / WEIGHTS, cache / "blobs/0123")
    (cache / "snapshots/abc" / WEIGHTS).symlink_to("../../blobs/0123")
    place = world.folder / "hub" if named == "hub" else world.folder / "hub" / named
    assert world.same(await with_places(world, place).span(ALL), ALL)
    assert fetched_chunks(world) == 0


async def test_a_snapshot_that_links_elsewhere_is_not_followed(world: World) -> None:
    await world.founder()
    snapshot = world.folder / "hub/models--org--name/snapshots/abc"
    snapshot.mkdir(parents=True)
    (snapshot / WEIGHTS).symlink_to(world.hint / WEIGHTS)
    assert world.same(await with_places(world, snapshot).span(Span(0, 2)), Span(0, 2))
    assert fetched_chunks(world) > 1


@pytest.mark.parametrize(
    "place",
    [
        f".ollama/models/blobs/sha256-{'5f' * 32}",
        ".lmstudio/models/publisher/model/any.gguf",
        ".cache/lm-studio/models/publisher/model/any.gguf",
        ".cache/llama.cpp/ggml-org_model.gguf",
        ".cache/huggingface/hub/models--org--name/snapshots/abc/any.safetensors",
    ],
)
async def test_caches_of_other_programs_are_known(world: World, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    await world.founder()
    for name in ("OLLAMA_MODELS", "XDG_CACHE_HOME", "LLAMA_CACHE", "HF_HOME", "HF_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(world.folder))
    path = world.folder / place
    path.parent.mkdir(parents=True)
    shutil.move(world.hint / WEIGHTS, path)
    assert world.same(await with_places(world, *model_caches()).span(ALL), ALL)
    assert fetched_chunks(world) == 0


async def test_a_huge_folder_is_looked_at_in_part(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    await world.founder()
    monkeypatch.setattr(sources, "MAX_LISTED", 50)
    deep = world.folder / "huge"
    for number in range(30):
        deep = deep / str(number)
        deep.mkdir(parents=True)
        (deep / "other.gguf").touch()
    assert world.same(await with_places(world, world.folder / "huge").span(Span(0, 2)), Span(0, 2))
    assert "has more than 50 entries" in caplog.text


async def test_no_peer_needs_to_have_the_weights(world: World) -> None:
    """The founder's file is gone: the volunteer's own one has all that the manifest names."""
    (world.model / WEIGHTS).unlink()
    seeder = await world.seeder("founder")
    seeder.add_folder(world.model)
    world.directory.announce("founder", (0, UNITS))
    whole = world.hint / WEIGHTS
    checkpoint = await with_places(world, whole).span(ALL)
    assert (checkpoint.path / WEIGHTS).read_bytes() == whole.read_bytes()


async def test_a_wrong_file_is_hashed_once_if_no_peer_has_the_weights(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = world.hint / WEIGHTS
    of_another_model(path)
    (local,) = LocalFiles((path,), describe_files([world.model / WEIGHTS]))._candidates.values()
    cache = ChunkFolder(world.folder)
    assert local[0].hashes(cache) is None
    monkeypatch.setattr(sources.os, "pread", None)
    assert local[0].hashes(cache) is None and not local[0].fault


async def test_peers_get_the_copied_chunks(world: World) -> None:
    await world.founder()
    own = with_places(world, world.hint)
    await own.span(ALL)
    assert own.cache is not None
    seeder = await world.seeder("holder")
    seeder.add_cache(own.cache, (0, UNITS))
    world.directory.suspect("founder", "left")
    world.directory.announce("holder", seeder.units)
    assert world.same(await world.weights(home="late").span(ALL), ALL)


async def test_a_packed_swarm_takes_a_gguf_file_of_any_name(tmp_path: Path) -> None:
    file, packed = tmp_path / "downloaded-Q8_0.gguf", tmp_path / "packed"
    save_llama_gguf(file)
    packed.mkdir()
    GgufCheckpoint(file).pack(packed)
    (tmp_path / "world").mkdir()
    world = World(packed, tmp_path / "world", format=PACKED_FORMAT)
    try:
        await world.founder()
        weights = with_places(world, file)
        checkpoint = await weights.span(Span(0, 3))
        assert checkpoint.is_packed
        assert (checkpoint.path / LINK_NAME).read_bytes() == file.read_bytes()
        roots = {each.name: each for each in world.swarm.manifest.files}  # type: ignore[union-attr]
        fetched = roots.keys() - {LINK_NAME}
        assert world.network.received() < sum(roots[name].size for name in fetched) + FRAMES
    finally:
        await world.close()
