"""What every network promises: one suite for the fake and for the real one, where the other peer is a process of its own."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import psutil
import pytest
import pytest_asyncio
import uvloop

from swarmnode.errors import NetworkDown, PeerLost
from swarmnode.net.addressing.addresses import free_port, without_peer
from swarmnode.net.identity import Identity
from swarmnode.net.interfaces import MAX_RECORD_BYTES, Network, PeerId, Record, RecordValidator, Stream
from swarmnode.net.libp2p.engine import Engine, EngineConfig
from swarmnode.net.memory.network import FakeNetwork, FakeWorld
from swarmnode.net.network_config import OPEN_GATE, Gate
from tests.conformance import puppet

pytestmark = pytest.mark.asyncio(loop_scope="module")

STORES = 5  # until all keepers have a record: one that is busy for too long misses it
PATIENCE_S = 3600.0  # of what comes, however slow the machine is: the suite's own timeout ends what does not
LATER_S = 3600.0  # when records expire that shall not do so here
MIB = 1 << 20


@pytest.fixture(scope="module")
def event_loop_policy() -> asyncio.AbstractEventLoopPolicy:
    return uvloop.EventLoopPolicy()


class Puppet(ABC):
    """The other peer."""

    peer: PeerId
    addresses: list[str]

    @abstractmethod
    def kill(self) -> None: ...

    @abstractmethod
    def hang(self) -> None: ...

    @abstractmethod
    def wake(self) -> None: ...


class Bench(ABC):
    """Makes networks in this process and puppets elsewhere, and clears them away."""

    @abstractmethod
    async def network(
        self, believes: RecordValidator = puppet.believes, *, client_mode: bool = False, gate: Gate = OPEN_GATE
    ) -> Network: ...

    @abstractmethod
    async def puppet(self) -> Puppet: ...

    @abstractmethod
    async def pass_time(self, until: float) -> None:
        """Until records that expire then have done so."""

    @abstractmethod
    async def close(self) -> None: ...


class FakePuppet(Puppet):
    def __init__(self, world: FakeWorld, network: FakeNetwork, addresses: list[str]) -> None:
        self._world = world
        self.network = network
        self.peer = network.peer_id
        self.addresses = addresses

    def kill(self) -> None:
        self._world.kill(self.peer)

    def hang(self) -> None:
        self._world.hang(self.peer)

    def wake(self) -> None:
        self._world.wake(self.peer)


class FakeBench(Bench):
    def __init__(self, folder: Path) -> None:
        self._ahead_s = 0.0
        self._world = FakeWorld(seed=7, clock=lambda: time.time() + self._ahead_s)
        self._networks: list[FakeNetwork] = []

    async def network(
        self, believes: RecordValidator = puppet.believes, *, client_mode: bool = False, gate: Gate = OPEN_GATE
    ) -> FakeNetwork:
        self._networks.append(self._world.join(record_validator=believes, client_mode=client_mode, gate=gate))
        return self._networks[-1]

    async def puppet(self) -> Puppet:
        network = await self.network()
        await puppet.serve(network)
        return FakePuppet(self._world, network, await network.addresses())

    async def pass_time(self, until: float) -> None:
        self._ahead_s += max(0.0, until - self._world.clock()) + 0.05

    async def close(self) -> None:
        for network in self._networks:
            await network.close()


class ProcessPuppet(Puppet):
    def __init__(self, identity: Path) -> None:
        command = [sys.executable, "-m", puppet.__name__, str(identity)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self.peer, self.addresses = json.loads(self._process.stdout.readline())

    def _all(self) -> list[psutil.Process]:
        own = psutil.Process(self._process.pid)
        return [own, *own.children()]

    def kill(self) -> None:
        os.kill(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def hang(self) -> None:
        for process in self._all():
            process.suspend()

    def wake(self) -> None:
        for process in self._all():
            process.resume()

    def end(self) -> None:
        if self._process.poll() is None:
            self.wake()
            self._process.communicate()


class EngineBench(Bench):
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._engines: list[Engine] = []
        self._puppets: list[ProcessPuppet] = []

    def _identity(self) -> Path:
        path = self._folder / f"{len(self._engines)}-{len(self._puppets)}.key"
        Identity.load_or_create(path)
        return path

    async def network(
        self, believes: RecordValidator = puppet.believes, *, client_mode: bool = False, gate: Gate = OPEN_GATE
    ) -> Engine:
        config = EngineConfig(self._identity(), record_validator=believes, client_mode=client_mode, gate=gate)
        self._engines.append(await Engine.start(config))
        return self._engines[-1]

    async def puppet(self) -> Puppet:
        self._puppets.append(await asyncio.to_thread(ProcessPuppet, self._identity()))
        return self._puppets[-1]

    async def pass_time(self, until: float) -> None:
        await asyncio.sleep(max(0.0, until - time.time()) + 0.05)

    async def close(self) -> None:
        for engine in self._engines:
            await engine.close()
        for process in self._puppets:
            await asyncio.to_thread(process.end)


BENCHES = (pytest.param(FakeBench, id="fake"), pytest.param(EngineBench, id="engine", marks=pytest.mark.real))


@pytest_asyncio.fixture(loop_scope="module", scope="module", params=BENCHES)
async def bench(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Bench]:
    bench = request.param(tmp_path_factory.mktemp("bench"))
    try:
        yield bench
    finally:
        await bench.close()


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def there(bench: Bench) -> Puppet:
    return await bench.puppet()


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def here(bench: Bench, there: Puppet) -> Network:
    network = await bench.network()
    assert await network.connect(there.addresses, timeout_s=PATIENCE_S)
    return network


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def other(bench: Bench, there: Puppet) -> Network:
    network = await bench.network()
    assert await network.connect(there.addresses, timeout_s=PATIENCE_S)
    return network


async def read_to_end(stream: Stream) -> bytes:
    data = b""
    while piece := await stream.read():
        data += piece
    return data


async def cut(stream: Stream) -> None:
    """Wait until the stream is over, in whichever way it shows."""
    with contextlib.suppress(PeerLost):
        assert await stream.read() == b""


async def test_bytes_come_back_in_order(here: Network, there: Puppet) -> None:
    stream = await here.open(there.peer, puppet.ECHO, timeout_s=PATIENCE_S)
    assert (stream.peer, stream.protocol) == (there.peer, puppet.ECHO)
    stream.write([b"a", bytearray(b"bc"), memoryview(b"def")])
    stream.write([b"", b"g"])
    data = b""
    while len(data) < 7:
        data += await stream.read()
    assert data == b"abcdefg"
    await stream.close()


async def test_a_peer_that_the_table_does_not_lead_to_is_reached_at_the_addresses_that_it_states(
    bench: Bench, there: Puppet
) -> None:
    alone = await bench.network(client_mode=True)
    places = [without_peer(address) for address in there.addresses]
    for useless in ([], ["nonsense", "/ip4/224.0.0.1/tcp/4001", "/dns4/localhost/tcp/4001"]):
        with pytest.raises(PeerLost):
            await alone.open(there.peer, puppet.ECHO, timeout_s=5.0, addresses=useless)
    stream = await alone.open(there.peer, puppet.ECHO, timeout_s=PATIENCE_S, addresses=[*useless, *places])
    stream.write([b"found"])
    assert await stream.read() == b"found"
    await stream.close()
    assert there.peer in await alone.connected()


async def test_large_transfers_with_flow_control(here: Network, there: Puppet) -> None:
    stream = await here.open(there.peer, puppet.ECHO, timeout_s=PATIENCE_S)
    payload = bytes(range(256)) * 4096 * 16  # 16 MiB: beyond every buffer on the way

    async def write() -> None:
        for start in range(0, len(payload), 3 * MIB):
            stream.write([payload[start : start + 3 * MIB]])
            await stream.drain()

    writing = asyncio.ensure_future(write())
    received = bytearray(len(payload))
    view, filled = memoryview(received), 0
    while filled < len(payload):
        filled += await stream.read_into(view[filled:])
    await writing
    assert received == payload
    await stream.close()


async def test_a_writer_is_held_back_by_a_reader_that_does_not_read(here: Network, there: Puppet) -> None:
    stream = await here.open(there.peer, puppet.HOLD, timeout_s=PATIENCE_S)

    async def write() -> None:
        while True:
            stream.write([bytes(4 * MIB)])
            await stream.drain()

    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(write(), 0.5)  # it would fill the memory
    stream.abort()


async def test_peers_are_authenticated(here: Network, other: Network, there: Puppet) -> None:
    for network in (here, other):
        stream = await network.open(there.peer, puppet.WHO, timeout_s=PATIENCE_S)
        assert (await read_to_end(stream)).decode() == network.peer_id


async def test_close_flushes_and_is_read_as_the_end(here: Network, there: Puppet) -> None:
    stream = await here.open(there.peer, puppet.BYE, timeout_s=PATIENCE_S)
    assert await read_to_end(stream) == b"bye"
    assert await stream.read() == b""
    await stream.close()
    await stream.close()
    with pytest.raises(PeerLost):
        stream.write([b"late"])


async def test_many_streams_at_once(here: Network, there: Puppet) -> None:
    async def ask(number: int) -> bytes:
        stream = await here.open(there.peer, puppet.ECHO, timeout_s=PATIENCE_S)
        text = f"stream {number}".encode()
        stream.write([text])
        answer = b""
        while len(answer) < len(text):
            answer += await stream.read()
        stream.abort()
        return answer

    answers = await asyncio.gather(*(ask(number) for number in range(30)))
    assert answers == [f"stream {number}".encode() for number in range(30)]


async def test_incoming_streams_are_served_in_this_process_too(here: Network, other: Network) -> None:
    served: asyncio.Future[PeerId] = asyncio.get_running_loop().create_future()

    async def answer(stream: Stream) -> None:
        served.set_result(stream.peer)
        stream.write([b"welcome"])
        await stream.close()

    await here.serve("/test/here/1", answer)
    stream = await other.open(here.peer_id, "/test/here/1", timeout_s=PATIENCE_S)
    assert await read_to_end(stream) == b"welcome"
    assert await served == other.peer_id


async def test_an_unknown_protocol_is_refused(here: Network, there: Puppet) -> None:
    with pytest.raises(PeerLost):
        stream = await here.open(there.peer, "/test/nobody/1", timeout_s=PATIENCE_S)
        await cut(stream)  # where protocols are negotiated lazily it shows on the first read
        raise PeerLost("refused late")


@pytest.mark.parametrize("name", ["stranger", "nonsense"])
async def test_peers_that_nobody_knows_are_refused_in_time(here: Network, name: str) -> None:
    peer = Identity.generate().peer_id if name == "stranger" else "nonsense"
    with pytest.raises(PeerLost):
        await here.open(peer, puppet.ECHO, timeout_s=1.0)


async def test_a_killed_peer_is_noticed_and_then_refused(bench: Bench, here: Network) -> None:
    doomed = await bench.puppet()
    assert await here.connect(doomed.addresses, timeout_s=PATIENCE_S)
    stream = await here.open(doomed.peer, puppet.HOLD, timeout_s=PATIENCE_S)
    doomed.kill()
    await cut(stream)
    stream.abort()
    with pytest.raises(PeerLost):
        while True:  # for a moment its p2pd may outlive it, and streams break as soon as they are open
            stream = await here.open(doomed.peer, puppet.ECHO, timeout_s=1.0)
            await cut(stream)
            stream.abort()


async def test_a_hanging_peer_costs_no_more_than_the_timeout_and_may_wake(bench: Bench, here: Network) -> None:
    sleeper = await bench.puppet()
    assert await here.connect(sleeper.addresses, timeout_s=PATIENCE_S)
    stream = await here.open(sleeper.peer, puppet.ECHO, timeout_s=PATIENCE_S)
    sleeper.hang()
    try:
        stream.write([b"anybody there?"])
        reading = asyncio.ensure_future(stream.read())
        with pytest.raises((PeerLost, asyncio.TimeoutError)):  # opening may succeed before the peer has agreed
            late = await here.open(sleeper.peer, puppet.WHO, timeout_s=0.5)
            await asyncio.wait_for(late.read(), 0.5)
        assert not reading.done()
    finally:
        sleeper.wake()
    assert await reading == b"anybody there?"
    stream.abort()


async def test_dead_addresses_do_not_hold_up_a_live_one(bench: Bench, there: Puppet) -> None:
    newcomer = await bench.network()
    dead = [f"/ip4/127.0.0.1/tcp/{free_port()}/p2p/{Identity.generate().peer_id}" for _ in range(3)]
    assert not await newcomer.connect(dead, timeout_s=1.0)
    assert await newcomer.connect([*dead, *there.addresses], timeout_s=PATIENCE_S)
    assert await newcomer.connect(await newcomer.addresses(), timeout_s=1.0) is False  # itself is nobody


async def until(holds: Callable[[], Awaitable[bool]]) -> None:
    """Wait for what nobody tells."""
    while True:
        if await holds():
            return
        await asyncio.sleep(0.02)


async def test_both_sides_know_of_a_connection_until_one_is_gone(bench: Bench, here: Network) -> None:
    guest, doomed = await bench.network(), await bench.puppet()
    assert await guest.connect(await here.addresses(), timeout_s=PATIENCE_S)
    assert guest.peer_id in await here.connected()
    assert here.peer_id in await guest.connected()
    assert await guest.connect(doomed.addresses, timeout_s=PATIENCE_S)
    assert doomed.peer in await guest.connected()
    doomed.kill()

    async def is_gone() -> bool:
        return doomed.peer not in await guest.connected()

    await until(is_gone)


async def test_visitors_are_those_who_came_by_themselves(bench: Bench) -> None:
    server, dialled = await bench.network(), await bench.network()
    assert await server.connect(await dialled.addresses(), timeout_s=PATIENCE_S)
    before = await server.visitors()  # mostly nobody; but a table dials whom it hears of: who was called may call back
    guest = await bench.network(client_mode=True)
    assert await guest.connect(await server.addresses(), timeout_s=PATIENCE_S)
    after = await server.visitors()
    assert len(after) > len(before)
    assert all(address.startswith("/ip4/") and "/p2p/" not in address for address in after)


async def test_a_client_uses_the_table_without_a_place_in_it(bench: Bench) -> None:
    server, client = await bench.network(), await bench.network(client_mode=True)
    assert await client.connect(await server.addresses(), timeout_s=PATIENCE_S)
    assert await client.dht.store(b"a client's", b"sub", b"value", expires_at=time.time() + LATER_S)
    assert set((await server.dht.get([b"a client's"]))[b"a client's"]) == {b"sub"}
    stranger = await bench.network()
    assert not await stranger.connect(await client.addresses(), timeout_s=1.0), "nobody enters the table by a client"


class Doorkeeper(Gate):
    """Answers calls of the table to those on its list alone."""

    guards_table = True

    def __init__(self) -> None:
        self.members: set[PeerId] = set()
        self.called: list[PeerId] = []

    def admits(self, peer: PeerId) -> bool:
        return peer in self.members

    async def introduce(self, peer: PeerId, *, anew: bool = False) -> None:
        self.called.append(peer)


async def test_a_guarded_table_answers_members_alone(bench: Bench) -> None:
    keeper, guest = Doorkeeper(), Doorkeeper()
    server, client = await bench.network(gate=keeper), await bench.network(gate=guest)
    assert not await client.connect(await server.addresses(), timeout_s=1.0)
    assert guest.called and set(guest.called) == {server.peer_id}, "who guards its own table calls upon others first"
    keeper.members.add(client.peer_id)
    guest.members.add(server.peer_id)
    assert await client.connect(await server.addresses(), timeout_s=PATIENCE_S)
    assert await server.dht.store(b"guarded", b"sub", b"value", expires_at=time.time() + LATER_S)
    assert set((await client.dht.get([b"guarded"]))[b"guarded"]) == {b"sub"}
    stranger = await bench.network()
    assert not await stranger.connect(await server.addresses(), timeout_s=1.0)
    assert (await stranger.dht.get([b"guarded"]))[b"guarded"] == {}


async def test_records_are_stored_for_others_and_expire(bench: Bench, here: Network, other: Network) -> None:
    late = time.time() + LATER_S
    assert await here.dht.store(b"key", b"late", b"2", expires_at=late)
    soon = time.time() + 2.0
    assert await here.dht.store(b"key", b"soon", b"1", expires_at=soon)
    found = await other.dht.get([b"key", b"nothing"])
    assert found[b"key"][b"late"] == Record(b"2", pytest.approx(late, abs=1e-3))
    assert found[b"key"].get(b"soon", Record(b"1", soon)).value == b"1"  # it may be over already
    assert found[b"nothing"] == {}
    await bench.pass_time(until=soon)
    assert set((await other.dht.get([b"key"]))[b"key"]) == {b"late"}


async def test_the_later_expiry_wins(here: Network, other: Network) -> None:
    later = time.time() + LATER_S
    assert await here.dht.store(b"race", b"who", b"first", expires_at=later)
    for _ in range(STORES):
        assert await other.dht.store(b"race", b"who", b"second", expires_at=later + 1)
        if not await here.dht.store(b"race", b"who", b"too old", expires_at=later + 0.5):
            break
    else:
        pytest.fail("who comes too late is told so")
    for network in (here, other):
        assert (await network.dht.get([b"race"]))[b"race"][b"who"].value == b"second"


async def test_records_that_the_validator_or_the_bounds_refuse(here: Network, other: Network) -> None:
    later = time.time() + LATER_S
    assert not await here.dht.store(b"refused", b"a", b"bad value", expires_at=later)
    assert not await here.dht.store(b"refused", b"b", bytes(MAX_RECORD_BYTES + 1), expires_at=later)
    assert await here.dht.store(b"refused", b"c", bytes(MAX_RECORD_BYTES - 100), expires_at=later)
    assert set((await other.dht.get([b"refused"]))[b"refused"]) == {b"c"}


async def test_a_record_that_a_reader_does_not_believe_hides_no_other(bench: Bench, here: Network) -> None:
    later = time.time() + LATER_S
    assert await here.dht.store(b"mixed", b"a", b"of a peer that was revoked since", expires_at=later)
    assert await here.dht.store(b"mixed", b"b", b"good", expires_at=later)
    reader = await bench.network(lambda key, subkey, value, expires_at: value != b"of a peer that was revoked since")
    assert await reader.connect(await here.addresses(), timeout_s=PATIENCE_S)
    assert set((await reader.dht.get([b"mixed"]))[b"mixed"]) == {b"b"}


async def test_alone_nothing_is_stored_with_others(bench: Bench) -> None:
    loner = await bench.network()
    assert not await loner.dht.store(b"lonely", b"a", b"value", expires_at=time.time() + LATER_S)
    assert (await loner.dht.get([b"nothing"]))[b"nothing"] == {}
    assert len(await loner.addresses()) >= 1


async def test_after_close_everything_is_refused(bench: Bench, there: Puppet) -> None:
    leaver = await bench.network()
    assert await leaver.connect(there.addresses, timeout_s=PATIENCE_S)
    stream = await leaver.open(there.peer, puppet.HOLD, timeout_s=PATIENCE_S)
    await leaver.close()
    await leaver.close()
    await cut(stream)
    with pytest.raises((NetworkDown, PeerLost)):
        await leaver.open(there.peer, puppet.ECHO, timeout_s=1.0)
    with pytest.raises(NetworkDown):
        await leaver.dht.get([b"key"])
