"""A host's machine serves wherever its bootstrap peer listens, and a founder learns how a swarm that does not run is started."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from swarmnode.client.swarm_client import SwarmClient
from swarmnode.config import StageConfig
from swarmnode.errors import NetworkDown, with_remedy
from swarmnode.net.addressing.addresses import bound
from swarmnode.net.identity import Identity
from swarmnode.node.bootstrap import SwarmHost
from swarmnode.node.node_config import NodeConfig
from swarmnode.peer.host import Host
from swarmnode.peer.host_config import HostConfig
from swarmnode.swarm.storage.remembered import store_own_name
from swarmnode.swarm.storage.swarmfile import Swarm, load_swarm, save_swarm
from tests.net.virtual import in_virtual_time
from tests.node.conftest import Founded
from tests.node.virtual_swarm import VirtualSwarm

PATIENCE_S = 60.0


@in_virtual_time
async def test_a_host_whose_port_is_taken_serves_at_another_one(founded: Founded, tmp_path: Path) -> None:
    async with VirtualSwarm(tmp_path) as swarm:
        founded.into(swarm)
        with bound("127.0.0.1", 0, backlog=1) as taken:
            listen = f"/ip4/127.0.0.1/tcp/{taken.getsockname()[1]}"
            gone = f"{listen}/p2p/{Identity.generate().peer_id}"
            save_swarm(replace(swarm.load(), bootstraps=(gone,), bootstrap_listen=(listen,)), swarm.file)
            serves, stop, invites = asyncio.Event(), asyncio.Event(), list[str]()

            def tell(event: str, _text: str, **_details: object) -> None:
                if event == "ready":
                    serves.set()

            async def opened(now: Swarm, reached: list[str]) -> None:
                invites.append(now.invite)
                assert set(reached) <= set(now.bootstraps)

            host = SwarmHost(
                swarm.load(),
                HostConfig(tmp_path / "door", name="bootstrap"),
                NodeConfig(HostConfig(tmp_path / "node", name="host"), StageConfig()),
                tell,
                platform=swarm.platform(),
            )
            running = asyncio.ensure_future(host.run(stop, opened))
            await asyncio.wait(
                {running, asyncio.ensure_future(serves.wait())}, timeout=PATIENCE_S, return_when="FIRST_COMPLETED"
            )
            assert serves.is_set() and not running.done()
            async with swarm.client(invites[0]) as client:
                assert client.status()["covered"]
            stop.set()
            with suppress(asyncio.CancelledError):
                await running


@in_virtual_time
async def test_a_host_never_says_that_it_waits_for_its_own_bootstrap_peer(
    founded: Founded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Though its node reaches that peer late, as on a busy machine."""
    call, calls = Host._call, 0

    async def late(self: Host, addresses: Sequence[str]) -> bool:
        nonlocal calls
        calls += 1
        return calls > 4 and await call(self, addresses)

    monkeypatch.setattr(Host, "_call", late)
    async with VirtualSwarm(tmp_path) as swarm:
        founded.into(swarm)
        serves, stop, told = asyncio.Event(), asyncio.Event(), list[str]()

        def tell(event: str, text: str, **_details: object) -> None:
            told.append(text)
            if event == "ready":
                serves.set()

        async def opened(_now: Swarm, _reached: list[str]) -> None:
            pass

        store_own_name(tmp_path / "node", "Carol")
        door = HostConfig(tmp_path / "door", name="bootstrap")
        config = NodeConfig(HostConfig(tmp_path / "node"), StageConfig())
        host = SwarmHost(swarm.load(), door, config, tell, platform=swarm.platform())
        running = asyncio.ensure_future(host.run(stop, opened))
        await asyncio.wait_for(serves.wait(), PATIENCE_S)
        stop.set()
        await running
    assert any(text.startswith("Opening") for text in told)
    assert any(text.startswith("This machine is Carol (") for text in told), "by the name that its home keeps"
    assert not any(
        word in text.lower() for text in (*told, caplog.text) for word in ("waiting for", "cannot be reached")
    )


@in_virtual_time
async def test_a_founder_learns_how_the_swarm_is_started(founded: Founded, tmp_path: Path) -> None:
    async with VirtualSwarm(tmp_path) as swarm:
        founded.into(swarm)
        gone = f"/ip4/127.0.0.1/tcp/9/p2p/{Identity.generate().peer_id}"
        save_swarm(replace(swarm.load(), bootstraps=(gone,)), swarm.file)
        for known, has, lacks in (
            (swarm.load(), f"swarmnode host {swarm.file}", gone),
            (load_swarm(swarm.load().invite), gone, "swarmnode host"),
        ):
            with pytest.raises(NetworkDown) as caught:
                await SwarmClient.join(known, home=tmp_path / "client", patience_s=5.0, platform=swarm.platform())
            told = with_remedy(caught.value)
            assert "cannot be reached" in told and has in told and lacks not in told
