"""Discovery on a local network: two network namespaces joined by a cable, so that no packet leaves this machine."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

from swarmnode.net.addressing.lan import LanDiscovery, usable
from swarmnode.net.identity import Identity

SWARM = bytes(range(32))

PEER = """
import asyncio, json, sys
from swarmnode.net.addressing.lan import LanDiscovery

async def until(condition):
    while not condition():
        await asyncio.sleep(0.02)

async def main(swarm, peer, address):
    lan = await LanDiscovery.start(bytes.fromhex(swarm), peer, ["/ip4/127.0.0.1/tcp/4001", address])
    print(json.dumps("ready"), flush=True)
    leaving = asyncio.create_task(asyncio.to_thread(sys.stdin.readline))
    for condition in (lambda: lan.addresses(), lambda: not lan.addresses()):
        heard = asyncio.create_task(until(condition))
        await asyncio.wait({leaving, heard}, return_when=asyncio.FIRST_COMPLETED)
        if leaving.done():
            break
        print(json.dumps(lan.addresses()), flush=True)
    await leaving
    await lan.close()

asyncio.run(main(*sys.argv[1:4]))
"""


class Peer:
    """A process in a namespace that tells what it hears."""

    def __init__(self, namespace: str, swarm: bytes, address: str) -> None:
        self.id = Identity.generate().peer_id
        self.address = f"{address}/p2p/{self.id}"
        command = ["ip", "netns", "exec", namespace, sys.executable, "-c", PEER, swarm.hex(), self.id, self.address]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.tells() == "ready"

    def tells(self) -> object:
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())

    def leave(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        assert self._process.wait(240) == 0

    def end(self) -> None:
        self._process.kill()
        self._process.wait()


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@pytest.fixture
def rooms() -> Iterator[tuple[str, str]]:
    """Two namespaces, 10.77.0.1 and 10.77.0.2, with a veth cable between them."""
    if not sys.platform.startswith("linux") or os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need Linux, root and iproute2")
    names = (f"swarmnode-a{os.getpid()}", f"swarmnode-b{os.getpid()}")
    try:
        for name in names:
            ip("netns", "add", name)
        ip("-n", names[0], "link", "add", "veth0", "type", "veth", "peer", "name", "veth0", "netns", names[1])
        for number, name in enumerate(names, 1):
            ip("-n", name, "addr", "add", f"10.77.0.{number}/24", "dev", "veth0")
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "link", "set", "veth0", "up")
    except subprocess.CalledProcessError as error:
        pytest.skip(f"this machine makes no network namespaces: {error.stderr.decode().strip()}")
    try:
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


@pytest.fixture
def start(rooms: tuple[str, str]) -> Iterator[Callable[..., Peer]]:
    peers: list[Peer] = []

    def start(room: int, swarm: bytes = SWARM) -> Peer:
        peers.append(Peer(rooms[room], swarm, f"/ip4/10.77.0.{room + 1}/tcp/4001"))
        return peers[-1]

    yield start
    for peer in peers:
        peer.end()


@pytest.mark.real
def test_peers_of_a_swarm_hear_of_one_another_and_of_goodbyes(start: Callable[..., Peer]) -> None:
    first = start(0)
    stranger = start(1, swarm=bytes(32))
    second = start(1)
    assert first.tells() == [second.address]
    assert second.tells() == [first.address]
    stranger.leave()  # had heard nothing: its next line would have been an address
    second.leave()
    assert first.tells() == []
    first.leave()


async def test_loopback_stays_silent() -> None:
    lan = await LanDiscovery.start(SWARM, "us", ["/ip4/127.0.0.1/tcp/4001/p2p/us", "/ip6/::1/tcp/4001/p2p/us"])
    assert repr(lan) == "<LanDiscovery silent 0 addresses, 0 peers found>"
    assert lan.addresses() == []
    await lan.close()
    await lan.close()


def test_what_strangers_tell_is_checked() -> None:
    peer, other = Identity.generate().peer_id, Identity.generate().peer_id
    good = "/ip4/10.0.0.7/tcp/4001"
    told = [good, f"{good}/p2p/{other}", "/ip4/127.0.0.1/tcp/1", "/ip4/10.0.0.300/tcp/1", "nonsense", "/unix/tmp/x"]
    assert usable(told, peer) == [f"{good}/p2p/{peer}"]
    assert usable([good], "not a peer id") == []
