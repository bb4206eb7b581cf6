"""Discovery on a local network: two network namespaces joined by a cable, so that no packet leaves this machine."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator

import pytest

from swarmnode.net.identity import Identity
from swarmnode.net.lan import LanDiscovery, usable

SWARM = bytes(range(32))

PEER = """
import asyncio, json, sys
from swarmnode.net.lan import LanDiscovery

async def main(swarm, peer, address, leave_early):
    lan = await LanDiscovery.start(bytes.fromhex(swarm), peer, ["/ip4/127.0.0.1/tcp/4001", address])
    print("ready", flush=True)
    for line in sys.stdin:  # blocks on purpose between questions: answers are given while we wait below
        found = []
        for _ in range(int(line)):
            await asyncio.sleep(0.05)
            found = lan.addresses()
            if found:
                break
        print(json.dumps(found), flush=True)
    await lan.close()

asyncio.run(main(*sys.argv[1:5]))
"""


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
