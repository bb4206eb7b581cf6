"""Fetching chunks from sources that lie, die, sleep or lack parts."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from swarmnode.errors import ErrorCode, LocalError, PeerLost, PeerRefused
from swarmnode.swarm.storage import chunk_folder
from swarmnode.swarm.storage.chunk_folder import WeightCache
from swarmnode.swarm.storage.content import CHUNK_BYTES, FileContent, chunk_hashes, describe_files
from swarmnode.weights.fetcher import RUN_CHUNKS, RUNS_AT_ONCE, Fetcher
from swarmnode.weights.sources import Source
from tests.net.virtual import in_virtual_time

CHUNKS = 20


class World:
    """A file of some chunks, its manifest, and a cache to fill."""

    def __init__(self, folder: Path, path: Path) -> None:
        self.path = path
        (self.file,) = describe_files([path])
        self.home = folder / "home"
        self.cache = WeightCache(self.home, bytes(32))
        self.dropped: list[str] = []

    def fetcher(self, *sources: Source) -> Fetcher:
        return Fetcher(self.cache, lambda: sources, lambda source, _reason: self.dropped.append(source.name))

    async def fetch(self, *sources: Source, numbers: range = range(CHUNKS)) -> Fetcher:
        fetcher = self.fetcher(*sources)
        await fetcher.fetch({self.file: numbers}, news=nobody_comes)
        return fetcher

    def reopen(self) -> None:
        """As the next process does."""
        self.cache.close()
        self.cache = WeightCache(self.home, bytes(32))

    def forget(self) -> None:
        self.cache.path(self.file).unlink()

    def fetched(self) -> bytes:
        return self.cache.path(self.file).read_bytes()


async def nobody_comes() -> None:
    await asyncio.Event().wait()


class Good(Source):
    """Gives everything, and remembers what it gave."""

    def __init__(self, world: World, name: str = "good") -> None:
        self.name = name
        self._path = world.path
        self.gave: list[int] = []
        self._gave_more = asyncio.Event()

    async def hashes(self, file: FileContent) -> bytes:
        return chunk_hashes(self._path)

    async def chunks(self, file: FileContent, first: int, count: int) -> AsyncIterator[tuple[int, bytes]]:
        with self._path.open("rb") as stream:
            for number in range(first, first + count):
                await asyncio.sleep(0)
                self.gave.append(number)
                self._gave_more.set()
                stream.seek(number * CHUNK_BYTES)
                yield number, self.spoil(number, stream.read(CHUNK_BYTES))

    async def finished(self, chunks: int) -> None:
        """Until it gave so many."""
        while len(self.gave) < chunks:
            self._gave_more.clear()
            await self._gave_more.wait()

    def spoil(self, number: int, data: bytes) -> bytes:
        return data


class Liar(Good):
    def spoil(self, number: int, data: bytes) -> bytes:
        return data[:-1] + bytes([data[-1] ^ 1])


class Counted(Good):
    """Notes how many runs are asked of it at once."""

    def __init__(self, world: World, name: str = "counted") -> None:
        super().__init__(world, name)
        self.open = self.most = 0

    async def chunks(self, file: FileContent, first: int, count: int) -> AsyncIterator[tuple[int, bytes]]:
        self.open += 1
        self.most = max(self.most, self.open)
        try:
            async for chunk in super().chunks(file, first, count):
                yield chunk
        finally:
            self.open -= 1


class Mortal(Good):
    """Dies so many times, each time with its fourth chunk."""

    deaths = 100

    def spoil(self, number: int, data: bytes) -> bytes:
        if self.deaths and len(self.gave) > 3:
            self.deaths -= 1
            self.gave.clear()
            raise PeerLost("peer died", peer=self.name)
        return data


class Busy(Good):
    """Has no time when first asked."""

    def spoil(self, number: int, data: bytes) -> bytes:
        if len(self.gave) == 1:
            raise PeerRefused("not now", code=ErrorCode.BUSY, retry_s=0.01, peer=self.name)
        return data


class Hanging(Good):
    """Never answers."""

    def __init__(self, world: World, name: str) -> None:
        super().__init__(world, name)
        self.asked = asyncio.Event()

    async def chunks(self, file: FileContent, first: int, count: int) -> AsyncIterator[tuple[int, bytes]]:
        self.asked.set()
        await asyncio.Event().wait()
        yield first, b""


class Partial(Good):
    """Has the first half only."""

    def spoil(self, number: int, data: bytes) -> bytes:
        if number >= CHUNKS // 2:
            raise PeerRefused("not here", code=ErrorCode.NOT_FOUND, peer=self.name)
        return data


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("original") / "model.safetensors"
    path.write_bytes(os.urandom(CHUNKS * CHUNK_BYTES - 77))
    return path


@pytest.fixture
def world(tmp_path: Path, original: Path) -> World:
    return World(tmp_path, original)


async def test_only_what_is_wanted_is_fetched(world: World) -> None:
    source = Good(world)
    fetcher = await world.fetch(source, numbers=range(3, 7))
    assert source.gave == [3, 4, 5, 6]
    assert fetcher.fetched_bytes == 4 * CHUNK_BYTES
    assert world.cache.path(world.file).stat().st_size == world.file.size, "sparse, but of full size"


async def test_two_sources_share_the_work(world: World) -> None:
    first, second = Good(world, "first"), Good(world, "second")
    await world.fetch(first, second)
    assert sorted(first.gave + second.gave) == list(range(CHUNKS))
    assert first.gave and second.gave
    assert world.fetched() == world.path.read_bytes()


async def test_a_quick_source_is_asked_for_the_next_run_before_the_last_has_come(world: World) -> None:
    source = Counted(world)
    await world.fetch(source)
    assert source.most == RUNS_AT_ONCE
    assert sorted(source.gave) == list(range(CHUNKS)), "nothing twice"


async def test_a_slow_source_is_asked_for_one_run_at_a_time(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarmnode.weights.fetcher.QUICK_S", 0.0)
    source = Counted(world)
    await world.fetch(source)
    assert source.most == 1


async def test_a_liar_is_refused_and_dropped(world: World) -> None:
    liar, good = Liar(world, "liar"), Good(world)
    await world.fetch(liar, good)
    assert world.dropped == ["liar"]
    assert len(liar.gave) == 1
    assert world.fetched() == world.path.read_bytes()


async def test_a_hash_list_is_that_of_the_first_source_with_the_right_one(world: World) -> None:
    class Forger(Good):
        async def hashes(self, file: FileContent) -> bytes:
            return bytes(len(chunk_hashes(self._path)))

    class Lacking(Good):
        async def hashes(self, file: FileContent) -> bytes:
            raise PeerRefused("not here", code=ErrorCode.NOT_FOUND, peer=self.name)

    hub = Good(world, "hub")
    hub.last_resort = True
    assert await world.fetcher(hub, Lacking(world, "lacking")).hashes(world.file) is None
    found = await world.fetcher(Lacking(world, "lacking"), Forger(world, "false"), Good(world)).hashes(world.file)
    assert found == chunk_hashes(world.path) == world.cache.hashes(world.file)
    assert world.dropped == ["false"]


async def test_a_source_that_dies_is_replaced(world: World) -> None:
    await world.fetch(Mortal(world, "mortal"), Good(world))
    assert world.dropped == ["mortal"]
    assert world.fetched() == world.path.read_bytes()


async def test_partial_sources_are_kept(world: World) -> None:
    await world.fetch(Partial(world, "partial"), Good(world))
    assert world.dropped == []
    assert world.fetched() == world.path.read_bytes()


async def test_a_fetch_that_was_cut_goes_on_where_it_was(world: World) -> None:
    await world.fetch(Good(world), numbers=range(10))
    world.reopen()
    again = Good(world)
    await world.fetch(again)
    assert again.gave == list(range(10, CHUNKS))


async def test_a_chunk_without_a_mark_is_fetched_again(world: World) -> None:
    """A killed process wrote a chunk, or half of it, and never came to mark it."""
    await world.fetch(Good(world))
    marks = world.cache.folder / f".{world.file.name}.have"
    marks.write_bytes(marks.read_bytes()[:5] + b"\0" + marks.read_bytes()[6:])
    again = Good(world)
    await world.fetch(again)
    assert again.gave == [5]


async def test_a_mark_without_its_chunk_is_found_by_the_next_process(world: World) -> None:
    """A power cut kept the mark and lost a part of the chunk."""
    await world.fetch(Good(world))
    with world.cache.path(world.file).open("r+b") as stream:
        stream.seek(7 * CHUNK_BYTES + CHUNK_BYTES // 2)
        stream.write(bytes(CHUNK_BYTES // 2))
    world.reopen()
    again = Good(world)
    await world.fetch(again)
    assert again.gave == [7]
    assert world.fetched() == world.path.read_bytes()


async def test_marks_of_a_file_that_was_removed_count_for_nothing(world: World) -> None:
    await world.fetch(Good(world))
    world.cache.path(world.file).unlink()
    again = Good(world)
    await world.fetch(again, numbers=range(3))
    assert again.gave == [0, 1, 2]
    assert world.cache.missing(world.file, range(CHUNKS)) == list(range(3, CHUNKS))


async def test_waits_for_news_while_nobody_has_it(world: World) -> None:
    sources: list[Source] = []
    waited = asyncio.Event()
    comes = asyncio.Event()

    async def news() -> None:
        waited.set()
        await comes.wait()
        comes.clear()

    fetcher = Fetcher(world.cache, lambda: sources, lambda _source, _reason: None)
    fetching = asyncio.ensure_future(fetcher.fetch({world.file: range(2)}, news=news))
    await waited.wait()
    assert not fetching.done()
    sources.append(Good(world))
    comes.set()
    await fetching


@in_virtual_time
async def test_nobody_for_too_long_is_an_error(world: World) -> None:
    fetcher = world.fetcher()
    with pytest.raises(PeerRefused, match="no peer has"):
        await fetcher.fetch({world.file: range(2)}, news=nobody_comes, patience_s=0.1)


async def test_a_full_disk_is_said_to_be_so(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(chunk_folder, "_write_at", full)
    with pytest.raises(LocalError, match="No space left on device"):
        await world.fetch(Good(world))


async def test_what_cannot_fit_is_refused_before_it_is_fetched(world: World) -> None:
    world.cache = WeightCache(world.home, bytes(32), max_bytes=CHUNK_BYTES)
    source = Good(world)
    with pytest.raises(LocalError, match="more than --disk 1MB leaves"):
        await world.fetch(source)
    assert source.gave == []


async def test_unused_folders_of_other_swarms_give_way(world: World) -> None:
    other = WeightCache(world.home, b"\1" * 32)
    other.write(world.file, 0, bytes(CHUNK_BYTES))
    bound = WeightCache(world.home, bytes(32), max_bytes=2 * CHUNK_BYTES + 65536)
    with pytest.raises(LocalError):
        bound.make_room(2 * CHUNK_BYTES)
    other.close()
    bound.make_room(2 * CHUNK_BYTES)
    assert not other.folder.exists()


@in_virtual_time
async def test_a_source_that_came_back_is_asked_again(world: World) -> None:
    """The only one who has the weights dies after a few chunks, again and again."""
    mortal = Mortal(world, "mortal")
    mortal.deaths = 2
    await world.fetch(mortal)
    assert world.dropped == ["mortal"] * 2
    assert world.fetched() == world.path.read_bytes()


@in_virtual_time
async def test_one_who_is_busy_is_asked_again(world: World) -> None:
    busy = Busy(world, "busy")
    await world.fetch(busy, numbers=range(2))
    assert world.dropped == []
    assert busy.gave == [0, 0, 1]


async def test_a_newcomer_helps_while_another_one_hangs(world: World) -> None:
    """Neither needs the other to end first: the fetch does not go in rounds."""
    sources: list[Source] = [Hanging(world, "hanging")]
    comes = asyncio.Event()

    async def news() -> None:
        await comes.wait()
        comes.clear()

    fetcher = Fetcher(world.cache, lambda: sources, lambda _source, _reason: None)
    fetching = asyncio.ensure_future(fetcher.fetch({world.file: range(CHUNKS)}, news=news))
    await sources[0].asked.wait()  # type: ignore[attr-defined]
    good = Good(world)
    sources.append(good)
    comes.set()
    await good.finished(CHUNKS - RUN_CHUNKS)  # all but the run that is held
    assert not fetching.done()
    fetching.cancel()
    with pytest.raises(asyncio.CancelledError):
        await fetching


async def test_what_one_holds_for_too_long_another_brings(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarmnode.weights.fetcher.OVERDUE_S", 0.0)
    hanging, good = Hanging(world, "hanging"), Good(world)
    await world.fetch(hanging, good)
    assert sorted(good.gave) == list(range(CHUNKS))
    assert world.fetched() == world.path.read_bytes()


async def test_the_last_resort_is_asked_where_nobody_else_can(world: World) -> None:
    hub = Good(world, "hub")
    hub.last_resort = True
    await world.fetch(hub, Good(world))
    assert hub.gave == []
    world.forget()
    await world.fetch(Partial(world, "partial"), hub)
    assert set(hub.gave) >= set(range(CHUNKS // 2, CHUNKS)) and hub.gave


async def test_a_failure_leaves_no_task_behind(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    before = asyncio.all_tasks()
    monkeypatch.setattr(chunk_folder, "_write_at", full)
    with pytest.raises(LocalError):
        await world.fetch(Good(world, "first"), Good(world, "second"))
    assert asyncio.all_tasks() == before
