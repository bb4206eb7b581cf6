"""Backups at a keeper: what is taken and what not, by honest writers and others; and what their listings are worth."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import pytest_asyncio

from swarmnode.checkpoints.checkpoint_export import whole_step
from swarmnode.checkpoints.state_backups import AT_ONCE, BACKUP_PROTOCOL, TURN_S, BackupServer
from swarmnode.checkpoints.state_exchange import Listing, StateServer, fetch_states, list_states, state_board
from swarmnode.checkpoints.votes import Electorate, Votes, all_named, named
from swarmnode.codec.body import SHARED
from swarmnode.codec.messages import BackUp, Hello, StateEntry
from swarmnode.errors import ErrorCode, LocalError, PeerRefused
from swarmnode.links.link_config import LinkConfig
from swarmnode.links.switchboard import Switchboard
from swarmnode.net.tasks import cancel_and_wait
from swarmnode.peer.questions import ask
from swarmnode.swarm.records.announcement import VERSION, Announcement, State
from swarmnode.swarm.records.run import Run, encode_run
from swarmnode.swarm.storage.content import CHUNK_BYTES
from swarmnode.swarm.storage.state_store import BackupFolder, StateStore
from tests.peer.memory_network import MemoryNetwork
from tests.peer.toy_peer import ToyPeer

RUN = Run(data=bytes(32), steps=95, batch=4, microbatch=2, checkpoint_steps=10)
SWARM = b"s" * 32
HELLO = Hello(1, SWARM)
UNITS = 4
SIZE_BYTES = 2 * CHUNK_BYTES + 7


def announced(peer: str, span: tuple[int, int]) -> Announcement:
    return Announcement(VERSION, SWARM, peer, 1, 0.0, 60.0, 0.0, State.READY, span)


class Directory:
    """What the keeper knows of the writers."""

    def __init__(self) -> None:
        self.known: dict[str, Announcement] = {}
        self.offered_bytes = -1

    def peers(self) -> dict[str, Announcement]:
        return self.known

    def suspects(self) -> dict[str, Announcement]:
        return {}

    def announce(self, section: Any) -> None:
        self.offered_bytes = section.backup_bytes


class Writer:
    """A node that holds some units and gives their states."""

    def __init__(self, world: World, name: str) -> None:
        self.network = MemoryNetwork(world.peers, name)  # type: ignore[no-untyped-call]
        self.store = StateStore(world.folder / name, RUN)
        self.server = StateServer(ToyPeer(self.network, LinkConfig(), HELLO))
        self.server.give(self.store)
        self.board = Switchboard(self.network, BACKUP_PROTOCOL, HELLO, LinkConfig())

    def keeps(self, step: int, block: int, size_bytes: int = SIZE_BYTES) -> StateEntry:
        """The entry of a state that it has from now on."""

        def write(_block: int, path: Path) -> None:
            path.write_bytes(os.urandom(8) + bytes(size_bytes - 8))

        self.store.write(step, (block,), write)
        file = self.store.files(step)[block]
        return StateEntry(step, block, file.size, file.root)

    async def back_up(self, state: StateEntry, run: Run = RUN) -> None:
        """Raises PeerRefused."""
        async for _ in ask(self.board, "keeper", BackUp(encode_run(run), state)):
            raise AssertionError("an answer with a body")

    async def close(self) -> None:
        await self.board.close()
        await self.server.close()
        self.store.close()


class World:
    """A keeper, whose clock stands still unless it is given one, and writers by name."""

    def __init__(self, folder: Path, max_bytes: int | None, *, clock: Callable[[], float] | None = None) -> None:
        self.folder = folder
        self.now_s = 0.0
        self.peers: dict[str, Any] = {}
        self.directory = Directory()
        self.network = MemoryNetwork(self.peers, "keeper")  # type: ignore[no-untyped-call]
        self.home = folder / "home"
        self.backups = BackupFolder(self.home, SWARM, max_bytes)
        manifest = SimpleNamespace(model=SimpleNamespace(units=UNITS))
        self.host: Any = SimpleNamespace(
            network=self.network,
            hello=HELLO,
            link_config=LinkConfig(),
            directory=self.directory,
            swarm=SimpleNamespace(manifest=manifest),
            config=SimpleNamespace(home=self.home),
            clock=SimpleNamespace(monotonic=clock or (lambda: self.now_s)),
        )
        self.keeper = BackupServer(self.host, self.backups)
        self.states = StateServer(ToyPeer(self.network, LinkConfig(), HELLO), self.backups)
        self.writers: dict[str, Writer] = {}

    async def writer(self, name: str, span: tuple[int, int] = (0, UNITS)) -> Writer:
        writer = self.writers[name] = Writer(self, name)
        await writer.server.serve()
        self.directory.known[name] = announced(name, span)
        return writer

    async def close(self) -> None:
        await self.keeper.close()
        await self.states.close()
        for writer in self.writers.values():
            await writer.close()
        self.backups.close()


@pytest_asyncio.fixture
async def world(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[World]:
    world = World(tmp_path, getattr(request, "param", None))
    await world.keeper.start()
    await world.states.serve()
    yield world
    await world.close()


async def test_a_state_is_kept_listed_and_given_on(world: World, tmp_path: Path) -> None:
    writer = await world.writer("writer")
    state = writer.keeps(10, 2)
    await writer.back_up(state)
    await writer.back_up(state)  # it is there: nothing is sent twice
    assert world.keeper.received_bytes == SIZE_BYTES
    written = writer.store.path(10, 2).read_bytes()
    await writer.server.close()
    board = state_board(ToyPeer(MemoryNetwork(world.peers, "newcomer"), LinkConfig(), HELLO))  # type: ignore[no-untyped-call]
    store = StateStore(tmp_path / "newcomer", RUN)
    try:
        listing = await list_states(board, "keeper")
        assert listing == Listing(encode_run(RUN), [StateEntry(10, 2, SIZE_BYTES, state.root, backup=True)])
        assert await fetch_states(board, lambda: ["keeper"], (2,), into=store) == 10
        assert store.path(10, 2).read_bytes() == written
    finally:
        store.close()
        await board.close()


async def test_what_a_keeper_has_itself_is_used_without_the_network(world: World, tmp_path: Path) -> None:
    writer = await world.writer("writer")
    await writer.back_up(writer.keeps(10, 2))
    store = StateStore(tmp_path / "own", RUN)
    board = state_board(ToyPeer(world.network, LinkConfig(), HELLO))
    try:
        assert await fetch_states(board, lambda: (), (2,), into=store, step=10, backups=world.backups) == 10
        assert store.path(10, 2).read_bytes() == writer.store.path(10, 2).read_bytes()
    finally:
        store.close()
        await board.close()


async def test_it_is_there_after_a_restart(world: World) -> None:
    writer = await world.writer("writer")
    state = writer.keeps(10, 2)
    await writer.back_up(state)
    world.backups.close()
    again = BackupFolder(world.home, SWARM)
    assert again.find(state.root) is not None and again.run() == RUN
    again.close()


@pytest.mark.parametrize("span", [(0, 2), (3, 4)])
async def test_nobody_brings_units_of_others(world: World, span: tuple[int, int]) -> None:
    writer = await world.writer("writer", span)
    with pytest.raises(PeerRefused) as caught:
        await writer.back_up(writer.keeps(10, 2))
    assert caught.value.code == ErrorCode.WRONG_SPAN and world.backups.run() is None


async def test_who_is_not_known_is_refused(world: World) -> None:
    writer = await world.writer("writer")
    world.directory.known.clear()
    with pytest.raises(PeerRefused) as caught:
        await writer.back_up(writer.keeps(10, 2))
    assert caught.value.code == ErrorCode.WRONG_SPAN


@pytest.mark.parametrize("world", [16 * SIZE_BYTES], indirect=True)
async def test_one_writer_has_a_quarter_of_what_is_offered_at_most(world: World) -> None:
    """Of 16 states' room four are offered, so that each writer may bring one."""
    greedy, modest = await world.writer("greedy"), await world.writer("modest")
    await greedy.back_up(greedy.keeps(10, 2))
    for step, run in ((20, RUN), (20, Run(data=bytes(32), steps=7, batch=4, microbatch=2))):
        with pytest.raises(PeerRefused) as caught:
            await greedy.back_up(greedy.keeps(step, 2, 2 * SIZE_BYTES), run)
        assert caught.value.code == ErrorCode.BUSY
    await modest.back_up(modest.keeps(10, 1))
    assert world.directory.offered_bytes < 2 * SIZE_BYTES


async def test_a_full_disk_is_said(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise LocalError("cannot keep files: No space left on device")

    writer = await world.writer("writer")
    state = writer.keeps(10, 2)
    with monkeypatch.context() as patch, pytest.raises(PeerRefused) as caught:
        patch.setattr("swarmnode.swarm.storage.chunk_folder.ChunkFolder.write", full)
        await writer.back_up(state)
    assert caught.value.code == ErrorCode.BUSY
    await writer.back_up(state)


async def test_false_chunks_are_not_kept(world: World) -> None:
    writer = await world.writer("writer")
    state = writer.keeps(10, 2)
    read = writer.server._read

    def falsified(*arguments: Any) -> tuple[bytes, Any]:
        data, stamp = read(*arguments)
        return b"?" + data[1:], stamp

    setattr(writer.server, "_read", falsified)  # noqa: B010
    with pytest.raises(PeerRefused) as caught:
        await writer.back_up(state)
    assert caught.value.code == ErrorCode.MALFORMED and world.backups.find(state.root) is None


async def test_a_writer_that_never_gives_its_state_is_left(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarmnode.checkpoints.state_backups.PATIENCE_S", 0.0)
    monkeypatch.setattr("swarmnode.checkpoints.state_backups.SLOWER", 0.0)
    writer = await world.writer("writer")
    with pytest.raises(PeerRefused) as caught:
        await writer.back_up(writer.keeps(10, 2))
    assert caught.value.code == ErrorCode.PEER_LOST


async def test_writers_that_never_give_their_states_keep_no_place(world: World) -> None:
    """Four hold all; a turn later another one's state is kept, and one of them hears that it is not its turn."""
    silent = [await world.writer(f"silent {number}") for number in range(AT_ONCE)]
    asking = []
    for writer in silent:
        asked = asyncio.Event()

        async def wait(*_: Any, asked: asyncio.Event = asked) -> None:
            asked.set()
            await asyncio.Event().wait()

        setattr(writer.server, "_send", wait)  # noqa: B010
        asking.append(asyncio.create_task(writer.back_up(writer.keeps(10, 2, 64))))
        await asked.wait()
    honest = await world.writer("honest")
    state = honest.keeps(10, 2)
    with pytest.raises(PeerRefused) as caught:
        await honest.back_up(state)
    assert caught.value.code == ErrorCode.BUSY
    world.now_s += TURN_S
    await honest.back_up(state)
    done, waiting = await asyncio.wait(asking, return_when=asyncio.FIRST_COMPLETED)
    assert world.keeper.received_bytes == SIZE_BYTES and done == {asking[0]} and len(waiting) == AT_ONCE - 1
    with pytest.raises(PeerRefused) as caught:
        asking[0].result()
    assert caught.value.code == ErrorCode.BUSY
    await cancel_and_wait(*asking)


async def test_old_folders_make_room_and_young_ones_do_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarmnode.swarm.storage.state_store.MAX_WRITERS", 1)
    folder = BackupFolder(tmp_path, SWARM)
    try:
        store = folder.open("first", RUN, 10)
        with pytest.raises(Exception, match="of 1 peers are kept here already"):
            folder.open("second", RUN, 10)
        os.utime(store.folder, (0, 0))
        folder.open("second", RUN, 10)
        assert not store.folder.exists()
    finally:
        folder.close()


def test_a_writers_old_run_makes_room_for_its_new_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarmnode.swarm.storage.state_store.WRITER_SHARE", 1.0)
    folder, newer = (
        BackupFolder(tmp_path, SWARM, 4 << 20, share=1.0),
        Run(data=bytes(32), steps=7, batch=4, microbatch=2),
    )
    try:
        store = folder.open("writer", RUN, 10)
        (store.folder / "state").write_bytes(bytes(3 << 20))
        with pytest.raises(Exception, match=r"more than one peer|is full"):
            folder.open("writer", newer, 5 << 20)
        assert store.folder.exists()
        folder.open("writer", newer, 3 << 20)
        assert not store.folder.exists()
    finally:
        folder.close()


# -- what listings are worth -------------------------------------------------------------------------------------------

ROOT, OTHER = b"r" * 32, b"o" * 32


def entries(block: int, *steps: int, root: bytes = ROOT, backup: bool = False) -> list[StateEntry]:
    return [StateEntry(step, block, 5, root, backup) for step in steps]


def test_a_keeper_that_has_little_vetoes_nothing() -> None:
    """It has only what it was given."""
    votes = Votes({"holder": entries(0, 50, 40, 30), "keeper": entries(0, 20, backup=True)})
    chosen = votes.choose((0,))
    assert chosen is not None and chosen.step == 50


def test_two_keepers_that_differ_need_another_voice() -> None:
    votes = Votes({"one": entries(0, 40, backup=True), "two": entries(0, 40, root=OTHER, backup=True)})
    chosen = votes.choose((0,))
    assert chosen is not None and chosen.lacking == {0: 1}


def test_the_step_is_one_of_which_all_units_are_there() -> None:
    run = encode_run(RUN)
    front = Listing(run, [*entries(0, 63, 60, 50, 40), *entries(1, 63, 60, 50, 40)])
    keeper = Listing(run, [*entries(2, 40, 30, backup=True), *entries(3, 50, 40, backup=True)])
    found = whole_step({"front": front, "keeper": keeper}, UNITS)
    assert found is not None and (found.run, found.step) == (RUN, 40)
    assert whole_step({"front": front}, UNITS) is None


def living_at(peer: str, units: tuple[int, int], address: str, state: State = State.READY) -> Announcement:
    return Announcement(1, bytes(32), peer, 1, 1.0, 2.0, 0.0, state=state, span=units, addresses=(address,))


def test_identities_do_not_decide_what_a_lone_holder_has() -> None:
    """Two of them outvoted it: without a word that they hold the unit, and with one network between them."""
    lone = living_at("lone", (0, 1), "/ip4/9.9.9.9/tcp/1")
    listings = {"lone": entries(0, 50), "one": entries(0, 50, 60, root=OTHER), "two": entries(0, 50, 60, root=OTHER)}
    strangers = {name: living_at(name, (1, 2), "/ip4/8.8.8.8/tcp/1") for name in ("one", "two")}
    loading = {name: living_at(name, (0, 1), "/ip4/8.8.8.8/tcp/1", State.LOADING) for name in ("one", "two")}
    for others in ({}, strangers, loading):
        chosen = Votes(listings, Electorate({"lone": lone, **others})).choose((0,))
        assert chosen is not None
        assert (chosen.step, chosen.unconfirmed) == (50, (0,))
        assert chosen.versions[0] == Votes({"lone": listings["lone"]}).choose((0,)).versions[0]  # type: ignore[union-attr]


def test_two_that_came_after_a_step_have_no_say_in_it() -> None:
    """Ready, of two networks, and of one mind: they outvoted the holder that they had their state from."""
    at = {"lone": "/ip4/9.9.9.9/tcp/1", "one": "/ip4/8.8.8.8/tcp/1", "two": "/ip4/7.7.7.7/tcp/1"}
    announced = {name: living_at(name, (0, 1), address) for name, address in at.items()}
    listings = {"lone": entries(0, 50), "one": entries(0, 50, root=OTHER), "two": entries(0, 50, root=OTHER)}
    known = Votes(listings, Electorate(announced, {"lone": -1, "one": 50, "two": 50})).choose((0,))
    assert known is not None
    assert (known.versions, known.unconfirmed) == (Votes({"lone": listings["lone"]}).choose((0,)).versions, (0,))  # type: ignore[union-attr]
    before = Votes(listings, Electorate(announced, {"lone": -1, "one": 49, "two": 49})).choose((0,))
    assert before is not None and before.versions[0] == (5, OTHER) and not before.unconfirmed, "they took part in it"
    left = Votes({name: listings[name] for name in ("one", "two")}, Electorate(announced, {"one": 50, "two": 50}))
    assert left.choose((0,)) is not None, "where no other peer has it their word counts"


def test_an_owner_has_one_vote() -> None:
    at = {"lone": "/ip4/9.9.9.9/tcp/1", "one": "/ip4/8.8.8.8/tcp/1", "two": "/ip4/8.8.8.9/tcp/1"}
    electorate = Electorate({name: living_at(name, (0, 1), address) for name, address in at.items()})
    listings = {"lone": entries(0, 50), "one": entries(0, 50, root=OTHER), "two": entries(0, 50, root=OTHER)}
    chosen = Votes(listings, electorate).choose((0,))
    assert chosen is not None and chosen.lacking == {0: 1}, "one against one"
    assert len(Votes(listings, electorate).others(chosen, 0)) == 1
    assert not chosen.unconfirmed


FURTHER = Run(data=b"f" * 32, steps=1 << 31, batch=4, microbatch=2, checkpoint_steps=10)


@pytest.mark.parametrize(
    "strangers",
    [
        pytest.param({"units": (0, 0)}, id="announce nothing"),
        pytest.param({"units": (0, UNITS), "state": State.LOADING}, id="load all"),
        pytest.param({"units": (0, UNITS), "one_network": True}, id="one owner"),
        pytest.param({"units": (0, UNITS), "backup": True}, id="list backups alone"),
        pytest.param({"units": (UNITS, UNITS + 1)}, id="hold layers that they do not list"),
    ],
)
@pytest.mark.parametrize("holders", [1, 2])
def test_the_run_is_that_of_most_owners_that_announce_layers_of_it(holders: int, strangers: dict[str, Any]) -> None:
    """Any five peers that listed another run decided which one is exported or restored."""
    said = {key: strangers[key] for key in ("units", "state") if key in strangers}
    backup, one_network = strangers.get("backup", False), strangers.get("one_network", False)
    announced: dict[str, Announcement] = {}
    listings: dict[str, Listing] = {}
    for number in range(holders):
        name = f"holder {number}"
        announced[name] = living_at(name, (0, UNITS), f"/ip4/9.9.{number}.9/tcp/1")
        listings[name] = Listing(encode_run(RUN), [entry for block in range(UNITS) for entry in entries(block, 50)])
    for number in range(5):
        name, at = f"stranger {number}", "8.8.8" if one_network else f"8.8.{number}"
        announced[name] = living_at(name, **{"state": State.READY, **said}, address=f"/ip4/{at}.{number}/tcp/1")
        every = [entry for block in range(UNITS) for entry in entries(block, 1 << 31, backup=backup)]
        listings[name] = Listing(encode_run(FURTHER), every)
    electorate = Electorate(announced, {name: 50 for name in announced if name.startswith("stranger")})
    found = whole_step(listings, UNITS, electorate)
    assert found is not None and (found.run, found.step) == (RUN, 50)


def test_keepers_alone_have_a_vote_for_each_owner() -> None:
    """No holder is left: a vote by peers would give it to the identities of one network."""
    announced = {f"a{n}": living_at(f"a{n}", (0, 0), f"/ip4/8.8.8.{n}/tcp/1") for n in range(1, 6)}
    announced |= {f"k{n}": living_at(f"k{n}", (0, 0), f"/ip4/9.9.{n}.9/tcp/1") for n in range(2)}
    run = {"a": FURTHER, "k": RUN}
    listings = {name: Listing(encode_run(run[name[0]]), entries(0, 40, backup=True)) for name in announced}
    found = whole_step(listings, 1, Electorate(announced))
    assert found is not None and found.run == RUN


def test_where_holders_meet_is_not_for_strangers_to_say() -> None:
    """A stage that joins asks for a step that half of the holders have reached: it asked for that of two strangers."""
    announced = {"holder": living_at("holder", (0, 1), "/ip4/9.9.9.9/tcp/1")}
    listings = {"holder": entries(0, 50), **{name: entries(0, 1 << 30) for name in ("one", "two", "three")}}
    assert Votes(listings, Electorate(announced)).reached((0, 1)) == 50
    announced |= {name: living_at(name, (0, 1), "/ip4/8.8.8.8/tcp/1") for name in ("one", "two", "three")}
    announced["other"] = living_at("other", (0, 1), "/ip4/7.7.7.7/tcp/1")
    listings["other"] = entries(0, 40)
    assert Votes(listings, Electorate(announced)).reached((0, 1)) == 50, "one owner of three"


def test_layers_that_follow_one_another_are_named_as_a_range() -> None:
    assert all_named([SHARED, 2, 0, 1, 5]) == ["layers 0 to 2", "layer 5", named(SHARED)]
    assert all_named([]) == []
