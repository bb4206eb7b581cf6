"""Training states between peers: from those that have them, whoever dies, lies or has other bytes."""

from __future__ import annotations

import asyncio
import errno
import functools
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import pytest_asyncio

from swarmnode.checkpoints.checkpoint_manager import CheckpointManager
from swarmnode.checkpoints.state_exchange import StateServer, fetch_states, list_states, state_board, survey
from swarmnode.checkpoints.votes import ChosenStep, Electorate, Votes
from swarmnode.codec.body import SHARED, VERSION
from swarmnode.codec.messages import Hello, ListStates, StateEntry, States
from swarmnode.errors import LocalError, PeerRefused, ProtocolError
from swarmnode.links.link_config import LinkConfig
from swarmnode.swarm.records.announcement import Announcement, State
from swarmnode.swarm.records.run import Run
from swarmnode.swarm.storage import chunk_folder
from swarmnode.swarm.storage.content import CHUNK_BYTES
from swarmnode.swarm.storage.state_store import StateStore
from tests.net.virtual import in_virtual_time
from tests.peer.memory_network import MemoryNetwork
from tests.peer.toy_peer import ToyPeer

CHUNKS = 12
RUN = Run(data=bytes(32), steps=95, batch=4, microbatch=2, checkpoint_steps=10)
SWARM = b"s" * 32


@functools.lru_cache(maxsize=32)
def content(step: int, block: int, version: int = 0) -> bytes:
    """What a block is at a step; replicas on other devices have other versions, which differ in last bits."""
    generator = np.random.default_rng([step, block + 1])
    values_N = generator.random(CHUNKS * CHUNK_BYTES // 4, dtype="<f4") * np.float32(1 + version * 1e-6)
    return values_N.tobytes()[:-5]


class Peer:
    """A node that has some blocks of some steps, and is at `step`."""

    def __init__(self, world: World, name: str, run: Run) -> None:
        self.name = name
        self.step = 0
        self.snapshots: list[int] = []
        self.blocks: tuple[int, ...] = ()
        self.network = MemoryNetwork(world.peers, name)
        self.store = StateStore(world.folder / name, run)
        self.server = StateServer(ToyPeer(self.network, LinkConfig(), world.hello))
        self.server.give(self.store, self._fresh)

    async def _fresh(self, _at_least: int) -> int:
        self.snapshots.append(self.step)
        self.has(self.step, *self.blocks)
        return self.step

    def has(self, step: int, *blocks: int, version: int = 0) -> None:
        self.step, self.blocks = step, blocks
        self.store.write(step, blocks, lambda block, path: _write(path, content(step, block, version)))

    def lies(self) -> None:
        """All chunks that it gives are false from now on."""
        read = self.server._read

        def false(*arguments: Any) -> tuple[bytes, Any]:
            data, stamp = read(*arguments)
            return b"?" + data[1:], stamp

        setattr(self.server, "_read", false)  # noqa: B010

    async def die(self) -> None:
        await self.server.close()
        await self.network.close()
        self.store.close()


def _write(path: Path, data: bytes) -> None:
    path.write_bytes(data)


class World:
    """Peers, and a newcomer with a store of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.peers: dict[str, MemoryNetwork] = {}
        self.hello = Hello(VERSION, SWARM)
        self.network = MemoryNetwork(self.peers, "newcomer")
        self.board = state_board(ToyPeer(self.network, LinkConfig(), self.hello))
        self.store = StateStore(folder / "newcomer", RUN)
        self.nodes: dict[str, Peer] = {}

    async def peer(self, name: str, run: Run = RUN) -> Peer:
        node = self.nodes[name] = Peer(self, name, run)
        await node.server.serve()
        return node

    async def fetch(self, *blocks: int, **options: Any) -> int:
        return await fetch_states(self.board, lambda: list(self.nodes), blocks, into=self.store, **options)

    def assert_has(self, step: int, *blocks: int, version: int = 0) -> None:
        for block in blocks:
            assert self.store.path(step, block).read_bytes() == content(step, block, version)

    def restart(self) -> None:
        """As the next process does."""
        self.store.close()
        self.store = StateStore(self.folder / "newcomer", RUN)

    async def close(self) -> None:
        await self.board.close()
        for node in self.nodes.values():
            await node.die()
        self.store.close()


@pytest_asyncio.fixture
async def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[World]:
    monkeypatch.setattr("swarmnode.checkpoints.state_exchange.IDLE_S", 0.05)
    monkeypatch.setattr("swarmnode.checkpoints.state_exchange.AGAIN_S", 0.01)
    monkeypatch.setattr("swarmnode.checkpoints.state_exchange.FRESH_EVERY_S", 0.0)
    monkeypatch.setattr("swarmnode.weights.fetcher.LOOK_AGAIN_S", 0.02)
    world = World(tmp_path)
    yield world
    await world.close()


async def test_the_newest_step_that_they_have_together_comes_from_whoever_has_it(world: World) -> None:
    front, back = await world.peer("front"), await world.peer("back")
    for step in (10, 20, 30):
        front.has(step, SHARED, 0, 1)
    for step in (10, 20):
        back.has(step, SHARED, 2)
    amounts: list[tuple[int, int]] = []
    step = await world.fetch(SHARED, 0, 1, 2, progress=lambda done, total: amounts.append((done, total)))
    assert step == 20
    world.assert_has(20, SHARED, 0, 1, 2)
    assert amounts[-1] == (4 * (CHUNKS * CHUNK_BYTES - 5),) * 2
    assert world.store.begun() == [] and world.store.newest() == 20


async def test_a_certain_step_can_be_asked_for(world: World) -> None:
    node = await world.peer("a")
    for step in (10, 20):
        node.has(step, 0)
    assert await world.fetch(0, step=10) == 10
    with pytest.raises(PeerRefused, match="no state of step 15"):
        await world.fetch(0, step=15, patience_s=0.1)


async def test_a_snapshot_is_made_where_none_is_late_enough(world: World) -> None:
    node = await world.peer("a")
    node.has(10, 0)
    node.step = 17
    assert await world.fetch(0, at_least=9) == 10 and node.snapshots == []
    assert await world.fetch(0, at_least=15) == 17 and node.snapshots == [17]
    world.assert_has(17, 0)


async def test_many_that_ask_at_once_get_one_snapshot(world: World) -> None:
    node = await world.peer("a")
    node.has(10, 0)
    node.step = 17
    asked = [list_states(world.board, "a", at_least=15) for _ in range(5)]
    for listing in await asyncio.gather(*asked):
        assert max(entry.step for entry in listing.entries) == 17
    assert node.snapshots == [17]


@in_virtual_time
async def test_who_asks_again_and_again_costs_a_twentieth_of_the_time(tmp_path: Path) -> None:
    world = World(tmp_path)
    node = await world.peer("a")
    node.has(0, 0)
    fresh, took_s = node._fresh, 2.0

    async def slow(at_least: int) -> int:
        await asyncio.sleep(took_s)
        return await fresh(at_least)

    node.server._fresh = slow
    until_s = asyncio.get_running_loop().time() + 400
    while asyncio.get_running_loop().time() < until_s:
        node.step += 1
        await list_states(world.board, "a", at_least=1 << 39)
    assert len(node.snapshots) * took_s <= 0.06 * 400
    await world.close()


@in_virtual_time
async def test_peers_at_different_steps_come_to_a_common_one(tmp_path: Path) -> None:
    """One has committed already: the other one is asked again, for a later step than before."""
    world = World(tmp_path)
    ahead, behind = await world.peer("ahead"), await world.peer("behind")
    ahead.has(10, 0)
    behind.has(10, 1)
    ahead.step, behind.step = 18, 17
    make = behind._fresh

    async def fresh(at_least: int) -> int:
        step = await make(at_least)
        behind.step = 18  # commits afterwards
        return step

    behind.server._fresh = fresh
    assert await world.fetch(0, 1, at_least=15) == 18
    assert (ahead.snapshots, behind.snapshots) == ([18], [17, 18])
    world.assert_has(18, 0, 1)
    await world.close()


async def test_a_peer_that_cannot_make_a_snapshot_still_gives_what_it_has(world: World) -> None:
    node = await world.peer("a")
    node.has(10, 0)

    async def full(_at_least: int) -> int:
        raise LocalError("disk full")

    node.server._fresh = full
    listing = await list_states(world.board, "a", at_least=15)
    assert [entry.step for entry in listing.entries] == [10]


def after(node: Peer, chunks: int, then: Callable[[], object]) -> None:
    """Once the peer has given so many chunks, this happens before every other one."""
    read, given = node.server._read, 0

    def count(*arguments: Any) -> bytes:
        nonlocal given
        given += 1
        if given > chunks:
            then()
        return read(*arguments)

    setattr(node.server, "_read", count)  # noqa: B010


def fail() -> None:
    raise OSError(errno.EIO, "no more")


async def test_another_peer_gives_the_rest_where_one_dies(world: World) -> None:
    first, second = await world.peer("first"), await world.peer("second")
    loop = asyncio.get_running_loop()
    for node in (first, second):
        node.has(10, 0)
    dead: list[asyncio.Task[None]] = []

    def die() -> None:
        if not dead:
            loop.call_soon_threadsafe(lambda: dead.append(loop.create_task(first.network.close())))

    after(first, 4, die)
    assert await world.fetch(0) == 10
    world.assert_has(10, 0)
    assert len(dead) == 1


async def test_a_fetch_that_was_cut_goes_on_where_it_was(world: World) -> None:
    """The only peer dies in the middle, then this process; both come back, and the peer has a newer step meanwhile."""
    node = await world.peer("a")
    node.has(10, 0)
    after(node, 4, fail)
    with pytest.raises(PeerRefused, match=r"no state of all layers \[0\]"):
        await world.fetch(0, patience_s=0.1)
    await node.die()
    world.restart()
    assert world.store.begun() == [10] and world.store.steps() == {}
    node = await world.peer("a")
    node.has(20, 0)
    amounts: list[tuple[int, int]] = []
    assert await world.fetch(0, progress=lambda *amount: amounts.append(amount)) == 10
    assert amounts[-1][1] == CHUNKS * CHUNK_BYTES - 5 - 4 * CHUNK_BYTES, "what had come is not fetched again"
    world.assert_has(10, 0)


async def test_replicas_with_other_bytes_take_the_place_of_one_that_is_lost(world: World) -> None:
    """What came of the lost one's version is of no use; the block begins anew."""
    first, second = await world.peer("first"), await world.peer("second")
    first.has(10, 0)
    second.has(10, 0, version=1)
    mine = max(world.nodes.values(), key=lambda node: node.store.files(10)[0].root)
    after(mine, 4, fail)
    assert await world.fetch(0) == 10
    world.assert_has(10, 0, version=1 if mine is first else 0)


async def test_a_liar_is_found_out_and_left(world: World) -> None:
    liar, honest = await world.peer("liar"), await world.peer("honest")
    for node in (liar, honest):
        node.has(10, 0)
    liar.lies()
    assert await world.fetch(0) == 10
    world.assert_has(10, 0)


async def test_a_liar_alone_is_not_believed(world: World) -> None:
    liar = await world.peer("liar")
    liar.has(10, 0)
    liar.lies()
    with pytest.raises(PeerRefused):
        await world.fetch(0, patience_s=0.1)
    assert world.store.steps() == {}


async def test_one_that_promises_what_it_does_not_have_holds_nobody_up(world: World) -> None:
    braggart, honest, other = [await world.peer(name) for name in ("braggart", "honest", "other")]
    for node in (braggart, honest, other):
        node.has(10, 0)

    async def brag(channel: Any, _question: ListStates) -> None:
        channel.send(States(listing.run, (StateEntry(1 << 30, 0, 5, b"?" * 32),)))

    listing = await list_states(world.board, "honest")
    setattr(braggart.server, "_list", brag)  # noqa: B010
    assert await world.fetch(0) == 10


async def test_peers_of_another_run_are_not_asked_for_anything(world: World) -> None:
    other = await world.peer("other", Run(data=b"\1" * 32, steps=95, batch=4, microbatch=2))
    other.has(50, 0)
    with pytest.raises(PeerRefused):
        await world.fetch(0, patience_s=0.05)
    (listing,) = (await survey(world.board, ["other", "nobody"])).values()
    assert listing.run_id == other.store.run.id


async def test_a_damaged_file_is_not_given_and_not_listed_any_more(world: World) -> None:
    node = await world.peer("a")
    node.has(10, 0)
    node.has(20, 0)
    path = node.store.path(20, 0)
    path.write_bytes(b"?" + path.read_bytes()[1:])
    assert await world.fetch(0) == 10
    assert node.store.steps() == {10: (0,)}


async def test_a_full_disk_leaves_no_half_step(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    node = await world.peer("a")
    node.has(10, 0)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(chunk_folder, "_write_at", full)
    with pytest.raises(LocalError, match="No space left on device"):
        await world.fetch(0)
    assert world.store.steps() == {} and world.store.begun() == []


async def test_a_step_that_is_being_fetched_is_not_removed(world: World) -> None:
    node = await world.peer("a")
    node.has(13, 0)
    after(node, 4, lambda: 14 in node.store.steps() or node.has(14, 0))
    assert await world.fetch(0) == 13
    assert list(node.store.steps()) == [13, 14]


async def test_more_answers_than_there_can_be_are_refused(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    node = await world.peer("a")
    node.has(10, 0, 1, 2)
    monkeypatch.setattr("swarmnode.checkpoints.state_exchange.MAX_LISTED", 2)
    monkeypatch.setattr(
        "swarmnode.checkpoints.state_exchange.islice", lambda listed, _most: listed
    )  # the other peer keeps no bound
    with pytest.raises(ProtocolError, match="more states"):
        await list_states(world.board, "a")


async def test_long_lists_come_in_several_frames(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarmnode.checkpoints.state_exchange.MAX_ENTRIES", 2)
    node = await world.peer("a")
    node.has(10, 0, 1, 2)
    node.has(20, 0, 1)
    listing = await list_states(world.board, "a")
    assert [(entry.step, entry.block) for entry in listing.entries] == [(20, 0), (20, 1), (10, 0), (10, 1), (10, 2)]
    only = await list_states(world.board, "a", [2])
    assert [(entry.step, entry.block) for entry in only.entries] == [(10, 2)]


def entry(step: int, block: int, root: bytes) -> StateEntry:
    return StateEntry(step, block, 7, root * 32)


A, B, C = ((7, root * 32) for root in (b"a", b"b", b"c"))


def test_the_choice() -> None:
    votes = Votes(
        {
            "one": [entry(20, 0, b"b"), entry(30, 0, b"e"), entry(20, 0, b"a")],
            "two": [entry(20, 0, b"a"), entry(10, 0, b"a")],
            "three": [entry(20, 0, b"a"), entry(10, 0, b"a"), entry(20, 1, b"c"), entry(10, 1, b"c")],
        }
    )
    assert votes.choose((0, 1)) == ChosenStep(20, {0: A, 1: C})
    assert votes.choose((0, 1), begun=(5, 10)) == ChosenStep(10, {0: A, 1: C})
    assert votes.choose((0,)) == ChosenStep(20, {0: A}), "one alone says that it has step 30"
    assert votes.choose((0,), failed=[A]) == ChosenStep(20, {0: B}, {0: 1}), "which one of the others must confirm"
    assert votes.choose((1,), at_least=21) is None and votes.choose((1,), step=20) == ChosenStep(20, {1: C})
    assert votes.choose((0, 2)) is None
    assert votes.reached((0,)) == 20 and votes.reached((1,)) == 20


@pytest.mark.parametrize("honest", [1, 2, 9])
async def test_a_step_that_one_alone_claims_is_not_believed(world: World, honest: int) -> None:
    """A liar at a later step beat nine honest replicas. Of two that disagree neither is believed."""
    for number in range(honest):
        (await world.peer(f"honest {number}")).has(10, 0)
    (await world.peer("liar")).has(RUN.steps, 0)
    if honest > 1:
        assert await world.fetch(0, at_least=5) == 10
        world.assert_has(10, 0)
    else:
        with pytest.raises(PeerRefused, match="agree on"):
            await world.fetch(0, patience_s=0.1)


async def test_a_peer_that_lists_a_step_beyond_the_end_of_its_run_has_no_say(world: World) -> None:
    """Both of two holders had to agree, so one such listing held up each joining stage."""
    (await world.peer("honest")).has(10, 0)
    (await world.peer("liar")).has(RUN.steps + 1, 0)
    assert await world.fetch(0, at_least=5) == 10
    with pytest.raises(ProtocolError, match="beyond the end"):
        await list_states(world.board, "liar")


@pytest.mark.parametrize("liars", [1, 2])
async def test_a_state_that_nobody_else_has_is_not_believed(world: World, liars: int) -> None:
    """All say step 10, and have other values: those of the majority count, whatever the order."""
    for number in range(3):
        node = await world.peer(f"{number}")
        node.has(10, 0, version=number if number < 3 - liars else 10**5 * (number + 1))
    if liars == 1:
        assert await world.fetch(0) == 10
        assert world.store.path(10, 0).read_bytes() in (content(10, 0), content(10, 0, 1))
    else:
        with pytest.raises(PeerRefused, match="agree on"):
            await world.fetch(0, patience_s=0.3)


def with_a_false_value(step: int, block: int) -> bytes:
    """As it was trained, but for one number among hundreds of thousands."""
    values_N = np.frombuffer(content(step, block)[: -(len(content(step, block)) % 4)], "<f4").copy()
    values_N[len(values_N) // 2] += 1.0
    return values_N.tobytes() + content(step, block)[4 * len(values_N) :]


def lie_in_one_value(node: Peer, step: int, *blocks: int) -> None:
    node.step, node.blocks = step, blocks
    node.store.write(step, blocks, lambda block, path: _write(path, with_a_false_value(step, block)))


@pytest.mark.parametrize(("honest", "liars"), [(1, 1), (2, 2), (3, 1), (1, 3)])
async def test_an_exported_state_is_what_most_of_its_holders_have(
    world: World, caplog: pytest.LogCaptureFixture, honest: int, liars: int
) -> None:
    """The same step, and one wrong value: of two, both have to have it, of four three. Who differs is named."""
    for number in range(honest):
        (await world.peer(f"honest {number}")).has(10, 0)
    for number in range(liars):
        lie_in_one_value(await world.peer(f"liar {number}"), 10, 0)
    if honest > liars:
        assert await world.fetch(0, whole=True) == 10
        world.assert_has(10, 0)
        assert "liar 0 has another state of layer 0 at step 10" in caplog.text and "honest" not in caplog.text
    elif honest == liars:
        with pytest.raises(PeerRefused, match="of layer 0 at step 10 its") as caught:
            await world.fetch(0, whole=True, patience_s=0.1)
        assert all(name in str(caught.value) for name in world.nodes), "whoever is false, the user hears who says what"
        assert world.store.steps() == {}
    else:
        assert await world.fetch(0, whole=True) == 10, "most of the holders together can make up what they like"


@pytest.mark.parametrize("holders", [2, 3])
async def test_replicas_that_round_differently_can_be_exported(world: World, holders: int) -> None:
    unconfirmed: list[int] = []
    for number in range(holders):
        (await world.peer(f"{number}")).has(10, 0, version=number // 2)
    assert await world.fetch(0, whole=True, on_unconfirmed=unconfirmed.extend) == 10
    assert not unconfirmed


@pytest.mark.parametrize("has_watched", [False, True])
async def test_an_exporter_hears_that_two_identities_have_another_state_than_the_only_holder(
    world: World, has_watched: bool
) -> None:
    """A node that has just begun to look cannot tell them from two holders that were there before."""
    for number, name in enumerate(at := {"lone": "9.9.9.9", "one": "8.8.8.8", "two": "7.7.7.7"}):
        node = await world.peer(name)
        node.has(10, 0, version=FALSE if number else 0)
        node.has(10, 1)
    announced = {name: msgspec.structs.replace(one, span=(0, 2)) for name, one in ready_at(**at).items()}
    electorate = Electorate(announced, {"one": 10, "two": 10} if has_watched else {})
    unconfirmed: list[int] = []
    assert await world.fetch(0, 1, whole=True, electorate=lambda: electorate, on_unconfirmed=unconfirmed.extend) == 10
    world.assert_has(10, 0, version=0 if has_watched else FALSE)
    assert unconfirmed == ([0, 1] if has_watched else [0])


@in_virtual_time
async def test_a_holder_that_says_nothing_holds_nobody_up(tmp_path: Path) -> None:
    world = World(tmp_path)
    for name in ("one", "two", "silent"):
        (await world.peer(name)).has(10, 0)

    async def silence(*_: object) -> None:
        await asyncio.Event().wait()

    setattr(world.nodes["silent"].server, "_list", silence)  # noqa: B010
    began_s = asyncio.get_running_loop().time()
    assert await fetch_states(world.board, lambda: list(world.nodes), (0,), into=world.store, whole=True) == 10
    assert asyncio.get_running_loop().time() - began_s < 30
    await world.close()


def test_what_ends_share_and_who_agrees_are_not_named() -> None:
    same = {name: [entry(20, SHARED, b"a"), entry(20, 0, b"a")] for name in ("one", "two")}
    assert Votes(same).disagreement((SHARED, 0)) is None
    differ = Votes({**same, "three": [entry(20, SHARED, b"b")], "four": [entry(20, SHARED, b"c")]})
    found = differ.disagreement((SHARED, 0))
    assert found is not None and "the weights that the first and the last layer share at step 20" in found
    assert "one, two: " in found and "three" in found and "four" in found


FALSE = 100_000  # a version that differs by a tenth


def ready_at(**addresses: str) -> dict[str, Announcement]:
    """Announcements of peers that are ready with unit 0, by name."""
    return {
        name: Announcement(1, SWARM, name, 1, 1.0, 2.0, 0.0, State.READY, (0, 1), addresses=(f"/ip4/{address}/tcp/1",))
        for name, address in addresses.items()
    }


async def join_by(world: World, electorate: Electorate) -> int | None:
    """What version of unit 0 a stage that joins gets, of those that all nodes of the world hold; None if it gets none."""
    peer = ToyPeer(world.network, LinkConfig(), world.hello)
    manager = CheckpointManager(peer, world.folder / "joiner", StateServer(peer), electorate=lambda: electorate)
    manager.open(RUN)
    try:
        step = await asyncio.wait_for(manager.fetch(lambda: list(world.nodes), (0,), at_least=10), 3)
        assert manager.store is not None
        brought = manager.store.path(step, 0).read_bytes()
        return next(version for version in (0, FALSE) if content(step, 0, version) == brought)
    except asyncio.TimeoutError:
        return None
    finally:
        await manager.close()


async def test_a_run_that_a_stage_is_in_is_not_changed_by_an_earlier_one(world: World) -> None:
    """The states of a second run were written into the folder of the first one."""
    (await world.peer("other")).has(10, 0)
    peer = ToyPeer(world.network, LinkConfig(), world.hello)
    manager = CheckpointManager(peer, world.folder / "joiner", StateServer(peer))
    second = Run(data=b"\1" * 32, steps=95, batch=4, microbatch=2)
    manager.open(second)
    assert await manager.restore(lambda: list(world.nodes), (0,), 1, lambda: False) is None
    assert manager.run == second
    assert await manager.restore(lambda: list(world.nodes), (0,), 1, lambda: True) == 10
    assert manager.run == RUN and manager.stored_steps() == (10,)
    await manager.close()


@pytest.mark.parametrize(
    ("addresses", "ready_after", "brought"),
    [
        ({"lone": "9.9.9.9", "one": "8.8.8.8", "two": "7.7.7.7"}, {"one": 10, "two": 10}, 0),
        ({"lone": "9.9.9.9", "one": "8.8.8.8", "two": "8.8.8.9"}, {}, None),
        ({"lone": "9.9.9.9"}, {}, 0),
    ],
    ids=["came after the step", "one owner", "not ready"],
)
async def test_two_identities_do_not_decide_what_a_joining_stage_gets(
    world: World, addresses: dict[str, str], ready_after: dict[str, int], brought: int | None
) -> None:
    """It asked each peer for its vote, and took what two of them said."""
    for name, version in (("lone", 0), ("one", FALSE), ("two", FALSE)):
        (await world.peer(name)).has(10, 0, version=version)
    assert await join_by(world, Electorate(ready_at(**addresses), ready_after)) == brought
