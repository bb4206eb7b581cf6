"""The real engine where processes and ports are concerned: who is killed, what is in use, who is not there."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import psutil
import pytest
import pytest_asyncio

from swarmnode.errors import LocalError, NetworkDown, PeerLost, UsageError
from swarmnode.net.addressing.addresses import free_port
from swarmnode.net.clock import Deadline
from swarmnode.net.direct import direct_connections
from swarmnode.net.direct.direct_stream import DirectStream
from swarmnode.net.identity import Identity
from swarmnode.net.interfaces import Stream
from swarmnode.net.libp2p import daemon, dht
from swarmnode.net.libp2p.engine import Engine, EngineConfig
from tests.conformance import puppet

OPTIONS = {"timeout_s": 5.0}
Start = Callable[..., Awaitable[Engine]]


@pytest_asyncio.fixture
async def start(tmp_path: Path) -> AsyncIterator[Start]:
    """Starts engines on loopback with identities of their own, and ends them."""
    engines: list[Engine] = []

    async def start(**options: object) -> Engine:
        path = tmp_path / f"{len(engines)}.key"
        Identity.load_or_create(path)
        engines.append(await Engine.start(EngineConfig(path, **options)))  # type: ignore[arg-type]
        return engines[-1]

    yield start
    for engine in engines:
        await engine.close()


def p2pd_of(engine: Engine) -> psutil.Process:
    assert engine._daemon is not None
    return psutil.Process(engine._daemon.pid)


async def joined(start: Start, **options: object) -> tuple[Engine, Engine]:
    """Two engines that know one another; the second one echoes."""
    first, second = await start(**options), await start()
    assert await first.connect(await second.addresses(), **OPTIONS)
    await second.serve(puppet.ECHO, puppet.echo)
    return first, second


async def echoes(network: Engine, peer: str) -> bool:
    stream = await network.open(peer, puppet.ECHO, **OPTIONS)
    stream.write([b"ping"])
    answer = await asyncio.wait_for(stream.read(), 60)
    stream.abort()
    return answer == b"ping"


async def until(happened: Callable[[], Awaitable[bool]], timeout_s: float = 120.0) -> None:
    """Ask again and again; the network tells nobody when it is back."""
    deadline_s = time.monotonic() + timeout_s
    while True:
        with contextlib.suppress(PeerLost, NetworkDown, asyncio.TimeoutError):
            if await happened():
                return
        assert time.monotonic() < deadline_s, "did not happen in time"
        await asyncio.sleep(0.05)


# -- p2pd dies


async def test_a_killed_p2pd_is_started_again_as_the_same_peer(start: Start) -> None:
    first, second = await joined(start, direct=False)
    await second.serve("/test/later/1", puppet.bye)
    stream = await first.open(second.peer_id, puppet.ECHO, **OPTIONS)
    before = await second.addresses()
    p2pd_of(second).kill()
    with contextlib.suppress(PeerLost):
        assert await asyncio.wait_for(stream.read(), 60) == b""
    await until(lambda: echoes(first, second.peer_id))
    assert second.restarts == 1
    assert await second.addresses() == before
    assert "restarts=1" in repr(second)


async def test_a_direct_stream_outlives_the_p2pd_that_introduced_it(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(direct_connections, "DIALLING", Deadline(floor_s=60.0, ceiling_s=60.0, slack=1.0))
    first, second = await joined(start)
    stream = await first.open(second.peer_id, puppet.ECHO, **OPTIONS)
    assert isinstance(stream, DirectStream)
    p2pd_of(second).kill()
    await until(lambda: asyncio.sleep(0, second.restarts == 1))
    stream.write([b"still there"])
    assert await asyncio.wait_for(stream.read(), 60) == b"still there"


async def test_a_node_whose_p2pd_was_killed_finds_back_into_the_dht(start: Start) -> None:
    first, second = await joined(start, direct=False)
    assert await first.dht.store(b"key", b"mine", b"1", expires_at=time.time() + 3600)
    stream = await first.open(second.peer_id, puppet.ECHO, **OPTIONS)
    p2pd_of(first).kill()
    with contextlib.suppress(PeerLost):
        assert await asyncio.wait_for(stream.read(), 60) == b""

    async def stores() -> bool:
        return await first.dht.store(b"key", b"again", b"2", expires_at=time.time() + 60)

    await until(stores)
    assert await echoes(first, second.peer_id)
    assert set((await second.dht.get([b"key"]))[b"key"]) == {b"mine", b"again"}


async def test_while_p2pd_is_down_the_network_is_down(start: Start) -> None:
    first, second = await joined(start)
    assert first._daemon is not None
    p2pd_of(first).kill()
    await first._daemon.exited
    with pytest.raises(NetworkDown):
        await first.open(second.peer_id, puppet.ECHO, **OPTIONS)
    await until(lambda: echoes(first, second.peer_id))


async def test_handlers_end_with_their_streams_and_the_engine(start: Start) -> None:
    first, second = await joined(start)
    ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def wait(stream: Stream) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set_result("cancelled")

    await second.serve("/test/wait/1", wait)
    stream = await first.open(second.peer_id, "/test/wait/1", **OPTIONS)
    stream.write([b"so that it is opened for sure"])
    await until(lambda: asyncio.sleep(0, len(second._streams) > 0))
    process = p2pd_of(second)
    await second.close()
    assert await ended == "cancelled"
    assert not process.is_running()
    assert not second._folder.path.exists()


# -- we die


def parent_of_p2pd(identity: Path, body: str) -> subprocess.Popen[str]:
    script = f"""
import asyncio, json
from pathlib import Path
from swarmnode.net.libp2p.engine import Engine, EngineConfig
{body}
async def main():
    engine = await Engine.start(EngineConfig(Path({str(identity)!r})))
    print(json.dumps([engine._daemon.pid, str(engine._folder.path)]), flush=True)
    await asyncio.Event().wait()
asyncio.run(main())
"""
    return subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)


@pytest.fixture
def orphan(tmp_path: Path) -> Iterator[Callable[[str], tuple[psutil.Process, Path]]]:
    """Starts a process with a p2pd and kills it -9; (its p2pd, the folder that it left)."""
    left: list[psutil.Process] = []

    def orphan(body: str) -> tuple[psutil.Process, Path]:
        identity = tmp_path / "peer.key"
        Identity.load_or_create(identity)
        with parent_of_p2pd(identity, body) as parent:
            assert parent.stdout is not None
            pid, folder = json.loads(parent.stdout.readline())
            left.append(psutil.Process(pid))
            os.kill(parent.pid, signal.SIGKILL)
        return left[-1], Path(folder)

    yield orphan
    for process in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


OTHER_SYSTEMS = (
    "import swarmnode.net.libp2p.daemon as d; d.die_with_parent = lambda: None"  # no signal at a parent's death there
)


@pytest.mark.parametrize("body", ["", OTHER_SYSTEMS], ids=["linux", "elsewhere"])
def test_p2pd_does_not_outlive_its_parent(orphan: Callable[[str], tuple[psutil.Process, Path]], body: str) -> None:
    p2pd, folder = orphan(body)
    with contextlib.suppress(psutil.NoSuchProcess):
        p2pd.wait(10)
    assert not p2pd.is_running()
    daemon.remove_stale_folders()
    assert not folder.exists()


def test_folders_of_the_living_stay() -> None:
    folder = daemon.SocketFolder()
    try:
        daemon.remove_stale_folders()
        assert folder.path.exists()
        assert folder.new_socket("p2pd") != folder.new_socket("p2pd")
    finally:
        folder.remove()


def test_folders_of_processes_in_other_containers_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their numbers mean nothing here; whoever is dead everywhere holds no lock."""
    with tempfile.TemporaryDirectory() as shared:
        monkeypatch.setattr(tempfile, "tempdir", shared)
        monkeypatch.setattr(daemon, "_is_alive", lambda _pid: False)
        folder = daemon.SocketFolder()
        daemon.remove_stale_folders()
        assert folder.path.parent == Path(shared) and folder.path.exists()
        assert folder._lock is not None
        folder._lock.close()
        daemon.remove_stale_folders()
        assert not folder.path.exists()


def test_a_deep_temp_folder_is_left_for_a_short_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = tmp_path / ("deep" * 20)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    folder = daemon.SocketFolder()
    try:
        assert folder.path.parent == Path("/tmp")
        assert list(deep.iterdir()) == []
    finally:
        folder.remove()


# -- coming up


async def test_a_port_in_use_is_refused_in_words(start: Start) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        address = f"/ip4/127.0.0.1/tcp/{listener.getsockname()[1]}"
        with pytest.raises(LocalError, match=f"cannot listen on {address}: .*; choose another port"):
            await start(host_maddrs=(address,))


async def test_a_port_of_another_engine_is_refused_too(start: Start) -> None:
    first = await start()
    address = first.config.host_maddrs[0]
    assert not address.endswith("/tcp/0")
    with pytest.raises(LocalError, match="choose another port"):
        await start(host_maddrs=(address,))


@pytest.mark.parametrize("option", ["host_maddrs", "announce_maddrs", "relays"])
async def test_addresses_that_are_none(start: Start, option: str) -> None:
    with pytest.raises(UsageError, match="is not a multiaddr"):
        await start(**{option: ("127.0.0.1:4001",)})


async def test_a_p2pd_that_does_not_start_says_why(tmp_path: Path) -> None:
    before = set(psutil.Process().children())
    with pytest.raises(LocalError, match=r"p2pd failed to start: .*missing\.key"):
        await Engine.start(EngineConfig(tmp_path / "missing.key"))
    assert set(psutil.Process().children()) == before


async def test_coming_up_needs_nobody(start: Start) -> None:
    engine = await start()
    dead = [f"/ip4/127.0.0.1/tcp/{free_port()}/p2p/{Identity.generate().peer_id}" for _ in range(2)]
    assert not await engine.connect(dead, timeout_s=1.0)
    other = await start(host_maddrs=(dead[0].partition("/p2p/")[0],))
    assert await engine.connect(await other.addresses(), **OPTIONS)


async def test_a_client_uses_the_table_without_a_place_in_it(start: Start) -> None:
    client, server = await joined(start, client_mode=True)
    assert await client.dht.store(b"key", b"sub", b"value", expires_at=time.time() + 60)
    assert set((await server.dht.get([b"key"]))[b"key"]) == {b"sub"}
    assert repr(server.dht) == "<EngineDht knows 0 peers, keeps 1 keys>"


# -- clocks


async def test_a_wrong_clock_is_told_and_not_fatal(
    start: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    answer = dht.dht_pb2.PingResponse

    class Slow:
        FromString = answer.FromString

        def __new__(cls, peer: object, dht_time: float) -> object:  # type: ignore[misc]
            return answer(peer=peer, dht_time=dht_time - 60)

    monkeypatch.setattr(dht.dht_pb2, "PingResponse", Slow)
    first, second = await start(), await start()
    with caplog.at_level(logging.WARNING):
        assert await first.connect(await second.addresses(), **OPTIONS)
    assert f"this machine's clock is 60 s ahead of that of peer {second.peer_id}" in caplog.text
    assert "NTP" in caplog.text


# -- hivemind


def test_hivemind_is_taken_without_its_weight_and_left_as_if_untouched() -> None:
    script = (
        "import sys, swarmnode.net.libp2p.engine; light = {'torch', 'hivemind', 'scipy'} & set(sys.modules);"
        "import hivemind, hivemind.p2p; print(light, hivemind.p2p.P2P.__name__, hivemind.DHT.__name__)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[0] == "set() P2P DHT"
